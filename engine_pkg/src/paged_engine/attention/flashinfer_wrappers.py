"""FlashInfer's wrappers for all layers of a model that attend alike: made, planned and run.

Their calls are those that mean the same in flashinfer-python 0.6 and 0.7; the module itself is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paged_engine.attention.interface import AttentionSetup, AttentionSpec

HEAD_DIMS = (64, 128, 256)
"""Head sizes of both the attention and the append kernels."""
CUDA_CORE_GROUP_SIZES = (1, 2, 3)
"""Query heads per key-value head up to which decoding without tensor cores is the faster, and which every version has."""
MAX_CAPTURED_BATCH_SIZE = 512
_MIN_WORKSPACE_BYTES = 128 << 20
_CAPTURED_PLAN_BYTES = 1 << 20
"""A captured decode step's plan takes some 20 bytes for each of a few thousand thread blocks. Each wrapper keeps as much
pinned memory beside it, which FlashInfer's own 8 MiB would make half a gigabyte for a long ladder."""


def kv_layout(cache_dtype: torch.dtype) -> str:
    """FlashInfer's name of a page's inner order: heads outside ("HND") or tokens outside ("NHD").

    Its documentation recommends HND for 8-bit pages: the rows of a head then lie in whole cache lines. In 16 bits the two
    are equally fast, and NHD is what keys and values come in.
    """
    return "HND" if cache_dtype.itemsize == 1 else "NHD"


def kernel_head_dim(head_dim: int) -> int:
    """The smallest head size that the kernels have and that holds `head_dim`."""
    return next(size for size in HEAD_DIMS if size >= head_dim)


@dataclass(frozen=True)
class PageTable:
    """A step's sequences in CSR form, all int32; `indices` on the device, the others on the CPU."""

    query_starts: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


class LayerKind:
    """All layers that attend alike, and their wrappers: window, soft cap and scale are fixed when a wrapper is planned."""

    def __init__(
        self, library: Any, spec: AttentionSpec, setup: AttentionSetup, workspace: torch.Tensor
    ) -> None:
        self._library = library
        self._workspace = workspace
        self._layout = kv_layout(setup.cache_dtype)
        self._num_heads = (spec.num_query_heads, spec.num_kv_heads)
        self._kernel_dim = kernel_head_dim(spec.head_dim)
        self._page_size = setup.page_size
        group_size = spec.num_query_heads // spec.num_kv_heads
        # The kernel for CUDA cores reads all keys of a sequence, those that its window hides as well.
        self._on_tensor_cores = group_size not in CUDA_CORE_GROUP_SIZES or spec.sliding_window is not None
        self._options = {
            "pos_encoding_mode": "NONE",
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.soft_cap,
            "sm_scale": spec.scale,
            "q_data_type": setup.dtype,
            "kv_data_type": setup.cache_dtype,
        }
        self._prefill = library.BatchPrefillWithPagedKVCacheWrapper(workspace, self._layout, backend="fa2")
        self._decode = self._make_decode_wrapper()
        self._captured: dict[int, Any] = {}
        self._captured_workspace = workspace
        self._captured_int_workspace: torch.Tensor | None = None
        self._planned = self._decode

    def plan_prefill(self, table: PageTable) -> None:
        """Plan a step whose sequences compute any number of tokens."""
        self._prefill.plan(
            table.query_starts,
            table.indptr,
            table.indices,
            table.last_page_len,
            *self._num_heads,
            self._kernel_dim,
            self._page_size,
            causal=True,
            **self._options,
        )
        self._planned = self._prefill

    def plan_decode(self, table: PageTable) -> None:
        """Plan a step whose sequences compute one token each."""
        self._plan_decode(self._decode, table)

    def plan_captured(self, table: PageTable, indices_buffer: torch.Tensor) -> None:
        """Plan a captured decode step; the first of its size makes the wrapper that the graph will be captured with."""
        batch_size = len(table.last_page_len)
        if batch_size not in self._captured:
            self._captured[batch_size] = self._make_captured_wrapper(batch_size, indices_buffer)
        self._plan_decode(self._captured[batch_size], table)

    def start_capture(self, workspace: torch.Tensor) -> None:
        """Use this memory for captured steps from now on. Graphs that were captured before must not be replayed any more."""
        self._captured.clear()
        self._captured_workspace = workspace

    def run(self, query: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attend as planned: [num_tokens, num_query_heads, kernel head size], contiguous."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if sinks is None:
            self._planned.run(query, cache, out=output)
            return output
        _, log2_sum = self._planned.run(query, cache, out=output, return_lse=True)
        # softmax with one more logit s and no value for it: output · Σ / (Σ + eˢ), where Σ = 2^log2_sum
        kept = torch.sigmoid(log2_sum * math.log(2) - sinks.float())
        return (output * kept[..., None]).to(query.dtype)

    def _plan_decode(self, wrapper: Any, table: PageTable) -> None:
        wrapper.plan(
            table.indptr,
            table.indices,
            table.last_page_len,
            *self._num_heads,
            self._kernel_dim,
            self._page_size,
            **self._options,
        )
        self._planned = wrapper

    def _make_decode_wrapper(self, **buffers: Any) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, self._layout, use_tensor_cores=self._on_tensor_cores, backend="fa2", **buffers
        )

    def _make_captured_wrapper(self, batch_size: int, indices_buffer: torch.Tensor) -> Any:
        """A wrapper of one batch size. All sizes share the memory of their plans: each is planned before each replay."""
        if self._captured_int_workspace is None:
            self._captured_int_workspace = self._workspace.new_empty(_CAPTURED_PLAN_BYTES)
        wrapper = self._make_decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=indices_buffer.new_empty(batch_size + 1),
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=indices_buffer.new_empty(batch_size),
        )
        wrapper.reset_workspace_buffer(self._captured_workspace, self._captured_int_workspace)
        return wrapper


def make_workspace(specs: Sequence[AttentionSpec], device: torch.device) -> torch.Tensor:
    """Device memory for partial results, zeroed as decoding wants it. Steps and layers use it one after the other."""
    num_bytes = max(partial_result_bytes(spec, _num_multiprocessors(device)) for spec in specs)
    return _zeroed(max(num_bytes, _MIN_WORKSPACE_BYTES), device)


def make_captured_workspace(
    specs: Sequence[AttentionSpec], batch_size: int, workspace: torch.Tensor
) -> torch.Tensor:
    """The same for captured decode steps of up to `batch_size` sequences: `workspace` itself where it is large enough."""
    num_multiprocessors = _num_multiprocessors(workspace.device)
    num_bytes = max(captured_partial_result_bytes(spec, num_multiprocessors, batch_size) for spec in specs)
    return workspace if num_bytes <= workspace.numel() else _zeroed(num_bytes, workspace.device)


def partial_result_bytes(spec: AttentionSpec, num_multiprocessors: int) -> int:
    """The most that a plan takes for sequences whose keys are split among thread blocks.

    FlashInfer's scheduler (attention/scheduler.cuh of 0.6.0; later ones want less) wants, for each query head and each row
    of each tile, the output and its log-sum-exp in float32. It splits up to two tiles of up to 128 rows per multiprocessor
    and key-value head.
    """
    return _num_split_tiles(spec, num_multiprocessors) * 128 * _row_bytes(spec)


def captured_partial_result_bytes(spec: AttentionSpec, num_multiprocessors: int, batch_size: int) -> int:
    """The same for a captured decode step: it reserves all the tiles that so many rows could fill at worst."""
    group_size = spec.num_query_heads // spec.num_kv_heads
    tile = 16 if group_size <= 16 else 64 if group_size <= 64 else 128
    num_tiles = -(-batch_size * group_size // tile) + batch_size - 1
    return max(_num_split_tiles(spec, num_multiprocessors), num_tiles) * tile * _row_bytes(spec)


def _num_split_tiles(spec: AttentionSpec, num_multiprocessors: int) -> int:
    return 2 * num_multiprocessors // spec.num_kv_heads


def _row_bytes(spec: AttentionSpec) -> int:
    return spec.num_query_heads * (kernel_head_dim(spec.head_dim) + 1) * 4


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _zeroed(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
