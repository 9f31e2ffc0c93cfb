"""The random stream is Philox4x32-10, uniform, and a function of (seed, index, position, attempt) alone."""

from __future__ import annotations

import numpy as np
import pytest

from paged_engine.execution.random_stream import RandomStreams, philox4x32


def streams(seeds: list[int], indices: list[int], positions: list[int]) -> RandomStreams:
    return RandomStreams(
        np.array(seeds, np.uint64), np.array(indices, np.uint64), np.array(positions, np.uint64)
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> np.ndarray:
        return np.array([[int(word, 16)] for word in text.split()], np.uint64)

    assert np.array_equal(philox4x32(words(counter), words(key)), words(expected))


def test_a_row_has_the_same_numbers_alone_and_beside_others() -> None:
    together = streams([7, 8, 2**64 - 1], [0, 3, 1], [0, 2**33 + 5, 9])
    for row in range(3):
        alone = together.select(np.array([row]))
        for attempt in range(3):
            assert alone.uniforms(attempt)[0] == together.uniforms(attempt)[row]


def test_every_part_of_the_counter_changes_the_number() -> None:
    base = (5, 0, 3)
    values = {
        streams(*[[part] for part in base]).uniforms()[0],
        streams(*[[part] for part in base]).uniforms(1)[0],
    }
    for place in range(3):
        for bit in (0, 20, 31) if place == 1 else (0, 20, 31, 32, 63):
            changed = list(base)
            changed[place] ^= 1 << bit
            values.add(streams(*[[part] for part in changed]).uniforms()[0])
    assert len(values) == 2 + 5 + 3 + 5


@pytest.mark.parametrize("varied", ["seed", "index", "position"])
def test_neighbouring_counters_are_uniform_and_uncorrelated(varied: str) -> None:
    """What users do: seeds 0, 1, 2, …, and one position after the other. 2^16 numbers, 256 cells, level 0.001."""
    num_draws, num_cells = 1 << 16, 256
    counters, zeros = list(range(num_draws)), [0] * num_draws
    parts = [counters if name == varied else zeros for name in ("seed", "index", "position")]
    drawn = streams(*parts).uniforms()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    expected = num_draws / num_cells
    for values in (drawn, np.mod(drawn * num_cells, 1), np.mod(drawn[1:] - drawn[:-1], 1)):
        counts = np.bincount((values * num_cells).astype(int), minlength=num_cells)
        assert (
            (counts - expected) ** 2 / expected
        ).sum() < 330.5  # chi-square of 255 degrees of freedom at 0.999
