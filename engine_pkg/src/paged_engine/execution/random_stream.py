"""The random numbers of sampling: a pure function of a sequence's seed and of the position of the token to be chosen.

Since nothing is drawn from a generator with a state, a seeded request gets the same numbers alone, in any batch, on any
device, and after it was preempted and computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_LOW_BITS = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Philox4x32-10: four random 32-bit words for each counter and key.

    From Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 3.

    Args:
        counter: [4, n], every element below 2^32.
        key: [2, n], every element below 2^32.

    Returns:
        uint64 [4, n], every element below 2^32.
    """
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * _MULTIPLIERS
        even, odd = (product >> _WORD)[::-1] ^ odd ^ key, (product & _LOW_BITS)[::-1]
        key = (key + _KEY_STEPS) & _LOW_BITS
    return np.stack((even[0], odd[0], even[1], odd[1]))


@dataclass(frozen=True)
class RandomStreams:
    """Where each row of a step stands in its random stream; arrays [rows], so that all rows are computed at once."""

    seeds: NDArray[np.uint64]
    """The request's seed: Philox's key."""
    indices: NDArray[np.uint64]
    """Which of the request's sequences the row is, below 2^32: the counter's third word."""
    positions: NDArray[np.uint64]
    """How many tokens the sequence has generated so far: the counter's first two words."""

    def uniforms(self, attempt: int = 0) -> NDArray[np.float64]:
        """A number in [0, 1), a multiple of 2^-53, for each row; another one for each `attempt` (the counter's fourth word)."""
        attempts = np.full_like(self.positions, attempt)
        counter = np.stack((self.positions & _LOW_BITS, self.positions >> _WORD, self.indices, attempts))
        words = philox4x32(counter, np.stack((self.seeds & _LOW_BITS, self.seeds >> _WORD)))
        bits = (words[0] << _WORD | words[1]) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53

    def select(self, rows: NDArray[np.int64]) -> RandomStreams:
        """The streams of some rows."""
        return RandomStreams(self.seeds[rows], self.indices[rows], self.positions[rows])
