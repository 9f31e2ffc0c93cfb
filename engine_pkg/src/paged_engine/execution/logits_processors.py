"""What a request's controls do to its logits before a token is chosen, for all rows of a step at once.

The order is that of vLLM's v1 sampler (vllm/v1/sample/sampler.py, `Sampler.apply_logits_processors`): grammars, allowed tokens,
bad words, min_tokens and logit_bias, then the repetition, frequency and presence penalties. transformers' generate has the same
order where it has the control (sequence bias before the repetition penalty; what bans tokens commutes with everything else).
Temperature and the filters that keep a greedy choice as it is (min-p, top-k, top-p) follow in token_choice.py.

Every function changes `logits` in place and touches only the entries its controls name, so a row without controls costs
nothing and cannot be changed by its neighbours. What a row needs is read from the sequence's own tokens at every step: there is
no state of a slot or a batch that could go stale when sequences are preempted, resumed or replaced. Penalties count a token
that is pending, too, which only the device knows.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_engine.errors import RequestError
from paged_engine.execution.transfer import to_device
from paged_engine.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from paged_engine.execution.sampling import PendingTokens

_BANNED = float("-inf")
_LARGEST = torch.finfo(torch.float32).max


def apply_grammars(logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, RequestError]:
    """Ban what the grammar of a guided sequence does not allow next.

    Args:
        logits: float32 [rows, vocab_size], changed in place.
        sequences: one per row.

    Returns:
        By row, the error of a sequence whose grammar cannot be followed; its row is left as it was.
    """
    guided = [(row, item, item.grammar) for row, item in enumerate(sequences) if item.grammar is not None]
    rows, allowed, errors = [], [], {}
    for row, sequence, grammar in guided:
        try:
            allowed.append(grammar.next_tokens(_tokens_of(sequence)[sequence.num_prompt_tokens :]))
            rows.append(row)
        except RequestError as error:
            errors[row] = error
    if rows:
        bits = np.unpackbits(np.stack(allowed), axis=1, count=logits.shape[1], bitorder="little").view(bool)
        guided_rows, may_come = to_device(logits.device, np.array(rows), bits)
        logits[guided_rows] = logits[guided_rows].masked_fill(may_come.logical_not_(), _BANNED)
    return errors


def apply_constraints(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """Apply allowed_token_ids, bad_words, min_tokens and logit_bias.

    Args:
        logits: float32 [rows, vocab_size], changed in place.
        sequences: one per row.
    """
    constrained = [
        (row, item, item.constraints) for row, item in enumerate(sequences) if item.constraints is not None
    ]
    if not constrained:
        return
    allowed = [(row, item.allowed) for row, _, item in constrained if item.allowed is not None]
    banned = [
        (row, item.banned_next(sequence.token_ids, sequence.num_output_tokens))
        for row, sequence, item in constrained
    ]
    biased = [(row, item.bias_ids) for row, _, item in constrained]
    biases = np.concatenate([item.bias_values for _, _, item in constrained])
    restricted, *entries, to_add = to_device(
        logits.device,
        np.array([row for row, _ in allowed], np.int64),
        *map(_entries, (allowed, banned, biased)),
        biases,
    )
    (kept_rows, kept_tokens), (banned_rows, banned_tokens), (biased_rows, biased_tokens) = entries
    if allowed:
        kept = logits[kept_rows, kept_tokens]
        logits.index_fill_(0, restricted, _BANNED)
        logits[kept_rows, kept_tokens] = kept
    # Not the number itself, which torch would put into a tensor on the host and copy, waiting for the device.
    logits[banned_rows, banned_tokens] = logits.new_full((), _BANNED)
    logits[biased_rows, biased_tokens] += to_add


def apply_penalties(
    logits: torch.Tensor, sequences: list[Sequence], pending: PendingTokens | None = None
) -> None:
    """Apply the repetition penalty (over prompt and output), then the frequency and presence penalties (over the output).

    Repetition divides a positive logit by the penalty and multiplies a negative one (transformers'
    RepetitionPenaltyLogitsProcessor, after Keskar et al., "CTRL", 2019). Frequency subtracts penalty x count and presence
    subtracts the penalty once (OpenAI's definition, as in vLLM's apply_penalties).

    Args:
        logits: float32 [rows, vocab_size], changed in place.
        sequences: one per row.
        pending: where the pending tokens of the sequences are.
    """
    numbered = list(enumerate(sequences))
    _penalize_repetition(
        logits, [(row, item) for row, item in numbered if item.sampling.repetition_penalty != 1], pending
    )
    _penalize_output(
        logits,
        [
            (row, item)
            for row, item in numbered
            if item.num_output_tokens and (item.sampling.frequency_penalty or item.sampling.presence_penalty)
        ],
        pending,
    )


def _penalize_repetition(
    logits: torch.Tensor, penalized: list[tuple[int, Sequence]], pending: PendingTokens | None
) -> None:
    if not penalized:
        return
    tokens_of_rows = [(row, _with_pending(item, _tokens_of(item), 0)) for row, item in penalized]
    lengths = [item.num_tokens for _, item in penalized]
    (rows, tokens), penalties = to_device(
        logits.device,
        _entries(tokens_of_rows),
        np.repeat(np.array([item.sampling.repetition_penalty for _, item in penalized]), lengths),
    )
    if pending is not None:
        _feed(tokens, penalized, lengths, pending)
    # A token that occurs twice is read before either write and written twice with one value.
    values = logits[rows, tokens].double()
    values = torch.where(values < 0, values * penalties, values / penalties)
    logits[rows, tokens] = values.clamp_(max=_LARGEST).float()


def _penalize_output(
    logits: torch.Tensor, penalized: list[tuple[int, Sequence]], pending: PendingTokens | None
) -> None:
    if not penalized:
        return
    outputs = [
        np.unique(_tokens_of(item)[item.num_prompt_tokens :], return_counts=True) for _, item in penalized
    ]
    counted = [
        (row, _with_pending(item, tokens, 0), _with_pending(item, counts, 1))
        for (row, item), (tokens, counts) in zip(penalized, outputs, strict=True)
    ]
    lengths = [len(tokens) for _, tokens, _ in counted]
    (rows, tokens), counts, frequency, presence = to_device(
        logits.device,
        _entries([(row, tokens) for row, tokens, _ in counted]),
        np.concatenate([counts for _, _, counts in counted]).astype(np.float64),
        np.repeat(np.array([item.sampling.frequency_penalty for _, item in penalized]), lengths),
        np.repeat(np.array([item.sampling.presence_penalty for _, item in penalized]), lengths),
    )
    if pending is not None:
        _feed(tokens, penalized, lengths, pending)
        # A pending token may be among the known ones: both entries get the sum, and are written twice with one value.
        (shares_with,) = to_device(logits.device, _pending_entry_of_each(penalized, lengths))
        is_same = tokens == tokens[shares_with]
        sums = torch.zeros_like(counts).index_add_(0, shares_with, counts * is_same)
        counts = torch.where(is_same, sums[shares_with], counts)
    logits[rows, tokens] -= (frequency * counts + presence).float()


def _with_pending(sequence: Sequence, values: NDArray[Any], value: int) -> NDArray[Any]:
    """Values of a sequence's known tokens, and behind them that of its pending one where there is one."""
    return np.append(values, value) if sequence.num_pending else values


def _feed(
    tokens: torch.Tensor, penalized: list[tuple[int, Sequence]], lengths: list[int], pending: PendingTokens
) -> None:
    """Put the pending tokens into their entries, each the last of its row's."""
    fed = [
        (end - 1, pending.row_of[item])
        for (_, item), end in zip(penalized, accumulate(lengths), strict=True)
        if item.num_pending
    ]
    entries, rows = to_device(tokens.device, *np.array(fed, np.int64).reshape(-1, 2).T)
    tokens[entries] = pending.tokens[rows]


def _pending_entry_of_each(penalized: list[tuple[int, Sequence]], lengths: list[int]) -> NDArray[np.int64]:
    """For each entry, that of its row's pending token; itself where the row has none."""
    ends = np.repeat(np.cumsum(lengths), lengths)
    has_pending = np.repeat([item.num_pending > 0 for _, item in penalized], lengths)
    return np.where(has_pending, ends - 1, np.arange(len(ends)))


def _entries(tokens_of_rows: Collection[tuple[int, NDArray[np.integer[Any]]]]) -> NDArray[np.int64]:
    """(row, tokens of the row) pairs as indices, int64 [2, number of tokens]: the rows, and the tokens."""
    if not tokens_of_rows:
        return np.empty((2, 0), np.int64)
    rows, tokens = zip(*tokens_of_rows, strict=True)
    return np.stack((np.repeat(rows, [len(ids) for ids in tokens]), np.concatenate(tokens))).astype(np.int64)


def _tokens_of(sequence: Sequence) -> NDArray[np.int32]:
    """Prompt and output as a view; it must not outlive the step, since an array with a view cannot grow."""
    return np.frombuffer(sequence.token_ids, np.int32)
