"""Log-probabilities of tokens as vLLM reports them: of the model's own distribution, before any control of the request.

The same for the tokens of a prompt as for those that are generated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from paged_engine.execution.token_choice import most_likely_tokens
from paged_engine.execution.transfer import HostCopies, to_device
from paged_engine.scheduling.sequence import ScheduledRange

_NUM_SPARE_CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One of the most likely tokens of a position."""

    token_id: int
    logprob: float
    """Natural logarithm of the softmax of the raw logits."""
    rank: int
    """1 + the number of tokens that are more likely; equals share a rank."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of a sequence, chosen or given in its prompt, and how likely it was where the sequence asked for that."""

    token_id: int
    logprob: float | None = None
    """As TokenLogprob's; None where the sequence did not ask."""
    rank: int | None = None
    top: tuple[TokenLogprob, ...] = ()
    """As many of the most likely tokens as the sequence asked for, best first, of equals the lower ids first; tokens of
    probability zero are left out."""


class PendingScores:
    """How likely some tokens were, as asked of the device; `result` waits for it."""

    def __init__(self, logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> None:
        """Launch it.

        Args:
            logprobs: float32 [rows, vocab_size], the log_softmax of raw logits.
            token_ids: int64 [rows] on the same device.
            num_top: per row, how many of the most likely tokens to name; 0 names none, more than the vocabulary all.
        """
        self._logprobs = logprobs
        self._num_top = num_top
        self._most = min(max(num_top), logprobs.shape[1])
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1
        values, candidates = logprobs[:, :0], token_ids[:, None][:, :0]
        if self._most:
            num_candidates = min(self._most + _NUM_SPARE_CANDIDATES, logprobs.shape[1])
            values, candidates = most_likely_tokens(logprobs, num_candidates)
        self._copies = HostCopies(token_ids, chosen[:, 0], ranks, values, candidates)

    @torch.inference_mode()
    def result(self) -> list[SampledToken]:
        """One for each row. `logprob` is NaN where the row holds a NaN.

        The most likely tokens are in descending order, of equals the lower ids first and first to be in.
        """
        token_ids, chosen, ranks, values, candidates = self._copies.wait()
        vocab_size = self._logprobs.shape[1]
        if 0 < values.shape[1] < vocab_size:
            ambiguous = (values[:, self._most - 1] == values[:, -1]).nonzero()[:, 0]
            if len(ambiguous):  # equals at the end of the list, of which some may be no candidates
                rows = self._logprobs[ambiguous.to(self._logprobs.device)]
                whole_rows = most_likely_tokens(rows, vocab_size)
                values[ambiguous], candidates[ambiguous] = (
                    part[:, : values.shape[1]].cpu() for part in whole_rows
                )
        return [
            SampledToken(token_id, logprob, rank, _ranked(ids[:count], top))
            for token_id, logprob, rank, ids, top, count in zip(
                token_ids.tolist(),
                chosen.tolist(),
                ranks.tolist(),
                candidates.tolist(),
                values.tolist(),
                (min(count, self._most) for count in self._num_top),
                strict=True,
            )
        ]


class PendingPromptScores:
    """How likely the tokens behind the scored positions of some ranges were; `result` waits for the device."""

    @torch.inference_mode()
    def __init__(self, logits: torch.Tensor, ranges: SequenceOf[ScheduledRange]) -> None:
        """Launch it.

        Args:
            logits: float32 [scored positions of all ranges, vocab_size], as the model gave them.
            ranges: in the order of the rows.
        """
        self._lengths = [len(item.scored) for item in ranges]
        self._scores = None
        if not ranges:
            return
        token_ids = array("i")
        num_top = []
        for item in ranges:
            positions = item.scored
            token_ids += item.sequence.token_ids[positions.start + 1 : positions.stop + 1]
            num_top += [item.sequence.sampling.prompt_logprobs or 0] * len(positions)
        (tokens,) = to_device(logits.device, np.array(token_ids, np.int64))
        self._scores = PendingScores(logits.log_softmax(dim=-1), tokens, num_top)

    def result(self) -> list[list[SampledToken]]:
        """For each range, one token for each scored position p: the prompt's token p + 1."""
        tokens = iter(() if self._scores is None else self._scores.result())
        return [list(islice(tokens, length)) for length in self._lengths]


def _ranked(token_ids: list[int], logprobs: list[float]) -> tuple[TokenLogprob, ...]:
    """Tokens in descending order with their ranks, up to the first of probability zero."""
    top: list[TokenLogprob] = []
    for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=False), start=1):
        if logprob == float("-inf"):
            break
        rank = top[-1].rank if top and top[-1].logprob == logprob else position
        top.append(TokenLogprob(token_id, logprob, rank))
    return tuple(top)
