"""Log-probabilities of tokens as vLLM reports them: of the model's own distribution, before any control of the request.

The same for the tokens of a prompt as for those that are generated.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import islice

import torch

from paged_engine.execution.token_choice import most_likely_tokens
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


def score(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[SampledToken]:
    """How likely each row's token was, and which were the most likely ones.

    Args:
        logprobs: float32 [rows, vocab_size], the log_softmax of raw logits.
        token_ids: int64 [rows] on the same device.
        num_top: per row, how many of the most likely tokens to name; 0 names none, more than the vocabulary all.

    Returns:
        One per row. `logprob` is NaN where the row holds a NaN.
    """
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1
    top_ids = _most_likely_exactly(logprobs, min(max(num_top), logprobs.shape[1]))
    return [
        SampledToken(token_id, logprob, rank, _ranked(ids[:count], top))
        for token_id, logprob, rank, ids, top, count in zip(
            token_ids.tolist(),
            chosen[:, 0].tolist(),
            ranks.tolist(),
            top_ids.tolist(),
            logprobs.gather(1, top_ids).tolist(),
            num_top,
            strict=True,
        )
    ]


@torch.inference_mode()
def score_prompts(logits: torch.Tensor, ranges: SequenceOf[ScheduledRange]) -> list[list[SampledToken]]:
    """How likely the tokens behind the scored positions of some ranges were.

    Args:
        logits: float32 [scored positions of all ranges, vocab_size], as the model gave them.
        ranges: in the order of the rows.

    Returns:
        For each range, one token for each scored position p: the prompt's token p + 1.
    """
    if not ranges:
        return []
    token_ids = array("i")
    num_top = []
    for item in ranges:
        positions = item.scored
        token_ids += item.sequence.token_ids[positions.start + 1 : positions.stop + 1]
        num_top += [item.sequence.sampling.prompt_logprobs or 0] * len(positions)
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    scores = iter(score(logits.log_softmax(dim=-1), tokens, num_top))
    return [list(islice(scores, len(item.scored))) for item in ranges]


def _most_likely_exactly(logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [rows, count]: the most likely tokens in descending order, of equals the lower ids first and first to be in."""
    vocab_size = logprobs.shape[1]
    if count == 0:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    num_candidates = min(count + _NUM_SPARE_CANDIDATES, vocab_size)
    values, token_ids = most_likely_tokens(logprobs, num_candidates)
    top = token_ids[:, :count]
    if num_candidates < vocab_size:
        ambiguous = (values[:, count - 1] == values[:, -1]).nonzero()[:, 0]
        if len(ambiguous):
            top[ambiguous] = most_likely_tokens(logprobs[ambiguous], vocab_size)[1][:, :count]
    return top


def _ranked(token_ids: list[int], logprobs: list[float]) -> tuple[TokenLogprob, ...]:
    """Tokens in descending order with their ranks, up to the first of probability zero."""
    top: list[TokenLogprob] = []
    for position, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=False), start=1):
        if logprob == float("-inf"):
            break
        rank = top[-1].rank if top and top[-1].logprob == logprob else position
        top.append(TokenLogprob(token_id, logprob, rank))
    return tuple(top)
