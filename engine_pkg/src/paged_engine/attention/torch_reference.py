"""Paged attention in plain torch: the truth that every other backend is compared with, and the one that always works.

It takes any head size, group size, page size, dtype and device. Keys and values are gathered out of their pages into a
dense block, everything from the scores to the weighted sum is computed in float32 (float64 for float64 queries), and
only then rounded to the query's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paged_engine.attention.interface import AttentionSetup, AttentionSpec
from paged_engine.execution.batch import Batch
from paged_engine.kernels.reference import SCALE_BYTES, dequantize_heads, quantize_heads

_MAX_GATHERED_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 16}
"""By device type, keys gathered at once for sequences that compute one token each (padding included)."""
_MAX_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}
"""By device type, scores computed at once for a chunk, over all heads. A CPU is several times faster on blocks that stay
in its cache, a GPU on few large ones."""
_MIN_BLOCK_ROWS = 32
"""Rows of a chunk computed at once however long the context, so that gathering its keys stays the smaller part."""


class TorchAttention:
    """AttentionBackend in plain torch; pages are NHD: [keys and values, page_size, num_kv_heads, head_dim], in int8 with the
    bytes of a float32 scale behind each head's codes."""

    name = "torch"

    def __init__(self, setup: AttentionSetup) -> None:
        self._specs = setup.specs
        self._page_size = setup.page_size
        self._scale_bytes = SCALE_BYTES if setup.cache_dtype == torch.int8 else 0
        self._caches: dict[int, torch.Tensor] = {}
        self._places = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []

    def page_shape(self, layer: int) -> tuple[int, ...]:
        """(2, page_size, num_kv_heads, head_dim), in int8 with SCALE_BYTES more."""
        spec = self._specs[layer]
        return 2, self._page_size, spec.num_kv_heads, spec.head_dim + self._scale_bytes

    def bind(self, layer: int, cache: torch.Tensor) -> None:
        """Keep `cache`, [num_pages, *page_shape(layer)], as a list of places for one token each."""
        self._caches[layer] = cache.view(-1, *cache.shape[3:])

    def plan(self, batch: Batch) -> None:
        """Find out which rows can be computed together, and where their keys and values lie."""
        self._places = _key_places(batch.slots, batch.page_size)
        windows = {spec.sliding_window for spec in self._specs}
        max_heads = max(spec.num_query_heads for spec in self._specs)
        self._groups = [group.prepare(batch, windows) for group in _group_rows(batch, max_heads)]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        spec = self._specs[layer]
        cache = self._caches[layer]
        stored = storable(cache)
        stored[self._places] = storable(_to_page(cache.dtype, key))
        stored[self._places + self._page_size] = storable(_to_page(cache.dtype, value))
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in self._groups:
            shape = group.key_places.shape
            places = group.key_places.flatten()
            output[group.rows] = dense_attention(
                query[group.rows],
                _from_page(stored.index_select(0, places).view(cache.dtype)).unflatten(0, shape),
                _from_page(stored.index_select(0, places + self._page_size).view(cache.dtype)).unflatten(
                    0, shape
                ),
                group.visible[spec.sliding_window],
                spec,
                sinks,
            )
        return output


def round_to(dtype: torch.dtype, heads: torch.Tensor) -> torch.Tensor:
    """Keys or values as they are kept in pages of `dtype`; float8 has no infinity, so that larger values are cut off."""
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        heads = heads.clamp(-largest, largest)
    return heads.to(dtype)


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, float8 as bytes: torch moves these by index on any device."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _to_page(dtype: torch.dtype, heads: torch.Tensor) -> torch.Tensor:
    """Keys or values [num_tokens, num_kv_heads, head_dim] as they lie in pages of `dtype`."""
    if dtype != torch.int8:
        return round_to(dtype, heads)
    codes, scales = quantize_heads(heads)
    return torch.cat((codes, scales[..., None].view(dtype)), -1)


def _from_page(stored: torch.Tensor) -> torch.Tensor:
    """The heads that lie in pages as `stored`, in its dtype or, of int8, in float32."""
    if stored.dtype != torch.int8:
        return stored
    codes, scale_bytes = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    return dequantize_heads(codes, scale_bytes.contiguous().view(torch.float32).squeeze(-1))


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(cap(scale · q kᵀ), with sinks) v over the visible keys, by its definition.

    Args:
        query: [batch, num_queries, num_query_heads, head_dim]; consecutive heads share a key-value head.
        key: [batch, num_keys, num_kv_heads, head_dim].
        value: [batch, num_keys, num_kv_heads, value_dim]; all of it finite, also where nobody looks.
        visible: bool [batch, num_queries, num_keys], True where a query sees a key; at least one for each query.
        spec: number of heads, scale and soft cap are taken from it.
        sinks: [num_query_heads], one more logit per head that has no value: it takes its share of the softmax away.

    Returns:
        [batch, num_queries, num_query_heads, value_dim] in query's dtype.
    """
    batch, num_queries = query.shape[:2]
    group_size = spec.num_query_heads // spec.num_kv_heads
    exact = torch.promote_types(query.dtype, torch.float32)
    # [batch, kv head, head in its group and query, head_dim] against [batch, kv head, key, head_dim]; contiguous,
    # since a batched matmul would copy anything else once more.
    grouped = (
        query.to(exact).unflatten(2, (spec.num_kv_heads, group_size)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )
    key, value = (
        each.transpose(1, 2).to(exact, memory_format=torch.contiguous_format) for each in (key, value)
    )
    scores = grouped @ key.mT * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.unflatten(2, (group_size, num_queries)).masked_fill(~visible[:, None, None], -torch.inf)
    if sinks is not None:
        column = sinks.to(exact).view(1, spec.num_kv_heads, group_size, 1, 1)
        scores = torch.cat([scores, column.expand(batch, -1, -1, num_queries, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    output = weights.flatten(2, 3) @ value
    output = output.unflatten(2, (group_size, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return output.to(query.dtype)


@dataclass(frozen=True)
class _Group:
    """Rows of a step that are computed in one dense block: `num_queries` consecutive rows of each of its sequences."""

    rows: torch.Tensor
    """int64 [batch, num_queries], rows of the flat batch."""
    positions: torch.Tensor
    """int64 [batch, num_queries], their positions in their sequences."""
    key_places: torch.Tensor
    """int64 [batch, num_keys], where the keys lie; behind a sequence's last key it is that key once more, so that
    nothing is ever read that was not written by the sequence itself."""
    visible: dict[int | None, torch.Tensor]
    """By sliding window: bool [batch, num_queries, num_keys], which keys a query sees."""

    def prepare(self, batch: Batch, windows: Iterable[int | None]) -> _Group:
        """The same group on the batch's device, with what is visible under each of the model's windows."""
        device = batch.slots.device
        positions = self.positions.to(device)
        distance = positions[..., None] - torch.arange(self.key_places.shape[1], device=device)
        causal = distance >= 0
        return _Group(
            self.rows.to(device),
            positions,
            self.key_places.to(device),
            {window: causal if window is None else causal & (distance < window) for window in windows},
        )


def _group_rows(batch: Batch, max_heads: int) -> Iterator[_Group]:
    """Split a step into blocks: single tokens with others of similar context, chunks alone, long ones piece by piece."""
    device_type = batch.slots.device.type
    lengths = np.diff(batch.query_starts.numpy())
    contexts = batch.context_lens.numpy().astype(np.int64)
    single = np.flatnonzero(lengths == 1)
    single = single[np.argsort(contexts[single], kind="stable")]
    while len(single):
        # Padding at most doubles the work: a block ends where the context has doubled.
        shortest = contexts[single[0]]
        alike = int(np.searchsorted(contexts[single], 2 * shortest, side="right"))
        longest = contexts[single[alike - 1]]
        count = max(1, min(alike, int(_MAX_GATHERED_TOKENS[device_type] // longest)))
        yield _make_group(batch, single[:count], 0, 1)
        single = single[count:]
    for sequence in np.flatnonzero(lengths > 1):
        step = max(_MIN_BLOCK_ROWS, int(_MAX_SCORES[device_type] // (max_heads * contexts[sequence])))
        for first in range(0, int(lengths[sequence]), step):
            count = min(step, int(lengths[sequence]) - first)
            yield _make_group(batch, np.array([sequence]), first, count)


def _make_group(batch: Batch, sequences: NDArray[np.int64], first: int, count: int) -> _Group:
    """Rows [first, first + count) of each of `sequences`' ranges as one block."""
    starts = batch.query_starts.numpy().astype(np.int64)
    contexts = batch.context_lens.numpy().astype(np.int64)
    rows = starts[sequences, None] + first + np.arange(count)
    positions = rows + (contexts - starts[1:])[sequences, None]
    last = positions[:, -1:]
    keys = np.minimum(np.arange(last.max() + 1), last)
    pages = batch.page_indices.numpy()[batch.page_indptr.numpy()[sequences, None] + keys // batch.page_size]
    slots = torch.from_numpy(pages.astype(np.int64) * batch.page_size + keys % batch.page_size)
    return _Group(
        torch.from_numpy(rows), torch.from_numpy(positions), _key_places(slots, batch.page_size), visible={}
    )


def _key_places(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Where the keys of slots lie among the places of a cache; the values lie page_size places behind their keys."""
    return slots // page_size * (2 * page_size) + slots % page_size
