"""Chooses one token of each row: the most likely one, or one drawn after temperature, min-p, top-k and top-p.

The filters are those of vLLM's v1 sampler, in its order: temperature, min-p, top-k, then top-p over what is left. Weights are
relative to the row's best token, exp((logit - best) / temperature), which makes min-p a plain threshold. As in transformers'
warpers, top-k keeps every token equal to the k-th; top-p keeps the fewest most likely tokens that reach top_p, of equals the
lower ids.

No row of a vocabulary is sorted where less will do. Where top-k or min-p leave few tokens, those are selected, and filtered and
drawn in order of their weight. Where only top-p filters, a token is drawn from the whole row and kept if the tokens before it
weigh less than top_p; otherwise it and all after it are out, and the next is drawn from the tokens before it. The first try
succeeds with a probability of at least top_p, and what comes out has exactly the filtered distribution.

A GPU is not asked what it has computed, since that is to wait for it: where top-k does not say how many tokens are enough, it
sorts the whole row.

Rows are independent down to the rounding: sums run along one row, in an order that no other row and no number of threads
changes, so that a row's choice is the same alone and in any batch. On a GPU a seed may bring another token than on a CPU where
top-p is the only filter, as the two draw in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paged_engine.execution.random_stream import RandomStreams
from paged_engine.execution.transfer import to_device

CANDIDATE_COUNTS = (128, 4096)
"""How many of a row's most likely tokens are looked at, in turn, before the whole row is sorted."""
_BLOCK_SIZE = 256
"""Tokens whose weights are first summed to one; that sum is in float32, all others are in float64."""
_CPU_CHUNK_SIZE = 1 << 21
"""Weights computed at once on a CPU: larger tensors are mapped anew by the C library each time, which costs more than the
arithmetic."""
_SORTED_CHUNK_SIZE = 1 << 22
"""Tokens of whole rows that a GPU sorts at once, which takes some 60 bytes of its memory for each."""


@dataclass(frozen=True)
class RandomControls:
    """How each row is drawn: arrays [rows]."""

    temperature: NDArray[np.float64]
    """Above 0."""
    min_p: NDArray[np.float32]
    """In [0, 1]; 0 is off."""
    top_k: NDArray[np.int64]
    """1 or more; the vocabulary's size and more is off."""
    top_p: NDArray[np.float64]
    """In (0, 1]; 1 is off."""
    streams: RandomStreams

    def select(self, rows: NDArray[np.int64]) -> RandomControls:
        """The controls of some rows."""
        return RandomControls(
            self.temperature[rows],
            self.min_p[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.streams.select(rows),
        )

    def on(self, device: torch.device) -> _Controls:
        """The same on the device, with the first random number of each row."""
        inverse_temperature = (1 / self.temperature).astype(np.float32)
        return _Controls(
            *to_device(
                device, inverse_temperature, self.min_p, self.top_k, self.top_p, self.streams.uniforms()
            )
        )


@dataclass(frozen=True)
class _Controls:
    """RandomControls as the device reads them: tensors [rows]."""

    inverse_temperature: torch.Tensor
    """float32."""
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniforms: torch.Tensor
    """float64 in [0, 1)."""


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: where each row's largest logit stands, the lowest id of equals; a NaN counts as largest.

    Args:
        logits: float32 [rows, vocab_size].
    """
    if logits.device.type == "cpu":
        # Over a vocabulary numpy's argmax, which is vectorised, takes a tenth of the time of torch's.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def most_likely_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row and their ids, in descending order, of equals the lower ids first.

    Of the tokens that equal the last one returned, any may have been left out, unless `count` is the whole row.

    Args:
        logits: float32 [rows, vocab_size], without NaN.
        count: 1 to vocab_size.

    Returns:
        float32 and int64 [rows, count].
    """
    if count == logits.shape[1]:
        values, token_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, token_ids
    token_ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, token_ids), dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def relative_weights(
    logits: torch.Tensor, inverse_temperature: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """exp((logit - best) / temperature), best being the row's largest logit: float32 like `logits`, from 0 to 1."""
    best = logits.amax(dim=-1, keepdim=True)
    return torch.sub(logits, best, out=out).mul_(inverse_temperature[:, None]).exp_()


def draw(
    logits: torch.Tensor, controls: RandomControls, candidate_counts: tuple[int, ...] = CANDIDATE_COUNTS
) -> torch.Tensor:
    """Draw a token for each row.

    Args:
        logits: float32 [rows, vocab_size]; -inf is never drawn. A row whose largest logit is not finite gets any token.
        controls: of the same rows.
        candidate_counts: ascending; they change how long it takes, never the result.

    Returns:
        int64 [rows].
    """
    vocab_size = logits.shape[1]
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    bounded = (controls.top_k < vocab_size) | (controls.min_p > 0)
    if not _may_look(logits):
        bounded |= controls.top_p < 1
    for rows in _chunks(np.flatnonzero(~bounded), vocab_size, _CPU_CHUNK_SIZE if _may_look(logits) else None):
        drawn = _draw_from_whole_rows(_select(logits, rows), controls.select(rows))
        _put(token_ids, rows, drawn)
    rows = np.flatnonzero(bounded)
    if len(rows):
        counts = (*(count for count in candidate_counts if count < vocab_size), vocab_size)
        _put(token_ids, rows, _draw_from_candidates(_select(logits, rows), controls.select(rows), counts))
    return token_ids


def _may_look(logits: torch.Tensor) -> bool:
    """Whether the host may decide by what has been computed; on other devices it would have to wait for that."""
    return logits.device.type == "cpu"


def _draw_from_candidates(
    logits: torch.Tensor, controls: RandomControls, counts: tuple[int, ...]
) -> torch.Tensor:
    """Draw from each row's most likely tokens, from as many of them as it takes to have all that the filters keep.

    Where top_k says how many that is, a GPU is not asked whether it is so: if more tokens equal the k-th than there is room
    for among the candidates, those left out cannot be drawn.
    """
    vocab_size = logits.shape[1]
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    remaining = np.ones(len(logits), bool)
    may_look = _may_look(logits)
    for count in counts:
        is_whole = count == vocab_size
        promising = (controls.top_k < count) | (may_look & (controls.top_k >= vocab_size)) | is_whole
        most = None if may_look or not is_whole else _SORTED_CHUNK_SIZE
        for rows in _chunks(np.flatnonzero(remaining & promising), vocab_size, most):
            values, candidates = most_likely_tokens(_select(logits, rows), count)
            on_device = controls.select(rows).on(logits.device)
            weights, complete = _filter(values, on_device, vocab_size)
            picked = _inverse_cumulative(weights.cumsum(dim=-1), on_device.uniforms)
            _put(token_ids, rows, candidates.gather(1, picked[:, None])[:, 0])
            remaining[rows] = ~complete.numpy() if may_look else False
    return token_ids


def _filter(values: torch.Tensor, controls: _Controls, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply temperature, min-p, top-k and top-p to a row's most likely tokens.

    Args:
        values: float32 [rows, count], logits in descending order.
        controls: of the same rows.
        vocab_size: how many tokens the whole row has.

    Returns:
        The weights, float64 [rows, count], 0 where a filter removed the token; and bool [rows], whether these are all the
        tokens that min-p and top-k keep: that is so when they removed the last candidate, or when there are no others.
    """
    count = values.shape[1]
    weights = relative_weights(values, controls.inverse_temperature)
    weights = weights.masked_fill(weights < controls.min_p[:, None], 0).double()
    kth = values.gather(1, (controls.top_k.clamp(max=count) - 1)[:, None])
    weights.masked_fill_((values < kth) & (controls.top_k < vocab_size)[:, None], 0)
    complete = (weights[:, -1] == 0) | (count == vocab_size)

    cumulative = weights.cumsum(dim=-1)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    share = controls.top_p[:, None] * cumulative[:, -1:]
    weights.masked_fill_((before >= share) & (controls.top_p < 1)[:, None], 0)
    return weights, complete


def _draw_from_whole_rows(logits: torch.Tensor, controls: RandomControls) -> torch.Tensor:
    """Draw where at most top-p filters, and on a GPU nothing; a token that top-p removes is drawn again from those before it."""
    on_device = controls.on(logits.device)
    blocks = _weights_in_blocks(logits, on_device.inverse_temperature)
    token_ids = _draw_from_blocks(blocks, on_device.uniforms)
    rows = np.flatnonzero(controls.top_p < 1)
    if not len(rows):
        return token_ids
    blocks = _select(blocks, rows)
    shares = _select(on_device.top_p, rows) * _mass(blocks)
    attempt = 0
    while len(rows):
        blocks = _tokens_before(blocks, _select(token_ids, rows))
        outside = (_mass(blocks) >= shares).nonzero()[:, 0].numpy()
        blocks, shares, rows = _select(blocks, outside), _select(shares, outside), rows[outside]
        attempt += 1
        if len(rows):
            uniforms = torch.from_numpy(controls.streams.select(rows).uniforms(attempt))
            _put(token_ids, rows, _draw_from_blocks(blocks, uniforms))
    return token_ids


def _draw_from_blocks(blocks: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: tokens drawn by weight, in the order of their ids: first a block of them, then one of the block.

    Args:
        blocks: float32 [rows, blocks, block size].
        fractions: float64 [rows], the random numbers.
    """
    masses = blocks.sum(dim=-1).double()
    cumulative = masses.cumsum(dim=-1)
    every_row = torch.arange(len(blocks), device=blocks.device)
    block = _inverse_cumulative(cumulative, fractions)
    mass, end = masses[every_row, block], cumulative[every_row, block]
    inside = (fractions * cumulative[:, -1] - (end - mass)) / mass
    offset = _inverse_cumulative(blocks[every_row, block].double().cumsum(dim=-1), inside.clamp_(0, 1))
    return block * _BLOCK_SIZE + offset


def _tokens_before(blocks: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The weights of the tokens that come before a row's token in the order of top-p, zeros elsewhere.

    Before it are the heavier tokens, and of equal ones those of lower ids.

    Args:
        blocks: float32 [rows, blocks, block size].
        token_ids: int64 [rows].
    """
    every_row = torch.arange(len(blocks), device=blocks.device)
    block, offset = token_ids // _BLOCK_SIZE, token_ids % _BLOCK_SIZE
    weight = blocks[every_row, block, offset][:, None]
    heavier = torch.nextafter(weight, torch.full_like(weight, torch.inf))
    is_earlier = torch.arange(blocks.shape[1], device=blocks.device) < block[:, None]
    before = torch.where(blocks >= torch.where(is_earlier, weight, heavier)[:, :, None], blocks, 0)
    is_earlier = torch.arange(_BLOCK_SIZE, device=blocks.device) < offset[:, None]
    own = blocks[every_row, block]
    before[every_row, block] = torch.where(own >= torch.where(is_earlier, weight, heavier), own, 0)
    return before


def _weights_in_blocks(logits: torch.Tensor, inverse_temperature: torch.Tensor) -> torch.Tensor:
    """The weights of whole rows as float32 [rows, blocks, block size], zeros after the last token."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK_SIZE)
    padded = logits.new_empty(num_rows, num_blocks * _BLOCK_SIZE)
    padded[:, vocab_size:] = 0
    relative_weights(logits, inverse_temperature, out=padded[:, :vocab_size])
    return padded.view(num_rows, num_blocks, _BLOCK_SIZE)


def _mass(blocks: torch.Tensor) -> torch.Tensor:
    """float64 [rows]: the sum of each row's weights."""
    return blocks.sum(dim=-1).double().cumsum(dim=-1)[:, -1]


def _inverse_cumulative(cumulative: torch.Tensor, fractions: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: where the cumulative weights, float64 [rows, count], first exceed `fractions` [rows] of the last one.

    That is never an entry of weight zero, since it does not exceed what the one before it does not; and the bound stays below
    the last cumulative weight even where the product rounds up to it.
    """
    total = cumulative[:, -1:]
    bound = torch.minimum(fractions[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > bound).to(torch.uint8).argmax(dim=-1)


def _chunks(rows: NDArray[np.int64], vocab_size: int, most: int | None) -> list[NDArray[np.int64]]:
    """`rows` in parts, none of them empty, of at most so many tokens (None: of any number), or of one row."""
    size = len(rows) if most is None else most // vocab_size
    return [rows[start : start + max(1, size)] for start in range(0, len(rows), max(1, size))]


def _select(tensor: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """Some rows of a tensor in ascending order, without a copy when it is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[to_device(tensor.device, rows)[0]]


def _put(tensor: torch.Tensor, rows: NDArray[np.int64], values: torch.Tensor) -> None:
    """Set some rows of a tensor, given in ascending order."""
    if len(rows) == len(tensor):
        tensor.copy_(values)
    else:
        tensor[to_device(tensor.device, rows)[0]] = values
