"""What FlashInfer documents, in plain torch: the functions and wrappers that the backend uses, and no more of them.

Names, parameters and defaults are those of flashinfer-python (test_flashinfer_signatures.py holds them against the real
ones); what the real kernels demand is demanded here, too, and everything that they read from device memory is read when
they run, so that a captured step which kept something in Python is found out. Only float32 is taken besides: the common
suite's narrow tolerances want it.
"""

from __future__ import annotations

import torch
from flashinfer_kernels import append, attend, demand
from flashinfer_ops import (
    apply_rope_with_cos_sin_cache_inplace,
    fused_add_rmsnorm,
    gelu_and_mul,
    gelu_tanh_and_mul,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    silu_and_mul,
)
from flashinfer_sampling import top_k_top_p_sampling_from_probs, top_p_sampling_from_probs

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "rmsnorm",
    "silu_and_mul",
    "top_k_top_p_sampling_from_probs",
    "top_p_sampling_from_probs",
]

HEAD_DIMS = (64, 128, 256, 512)
CUDA_CORE_GROUP_SIZES = (1, 2, 3, 4, 8)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write each row into the page and place that its sequence's page table has for its position."""
    k_cache, v_cache = _unpacked(paged_kv_cache, kv_layout)
    for indices in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        demand(indices.dtype == torch.int32 and indices.is_contiguous(), "indices are contiguous int32")
    demand(len(kv_indptr) == len(kv_last_page_len) + 1, "indptr has one entry more than there are sequences")
    demand(len(batch_indices) == len(positions) == len(append_key), "one index for each row")
    for heads in (append_key, append_value):
        demand(heads.shape[1:] == k_cache.shape[2:], "rows have the cache's heads")
        # The kernel takes the rows' memory for the cache's dtype without looking.
        demand(
            heads.dtype == k_cache.dtype and heads.stride(-1) == 1,
            "rows have the cache's dtype, heads contiguous",
        )
    append(append_key, append_value, batch_indices, positions, k_cache, v_cache, kv_indices, kv_indptr)


class _Wrapper:
    """What the two wrappers have in common."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str) -> None:
        demand(kv_layout in ("NHD", "HND"), "the layout is NHD or HND")
        demand(backend == "fa2", "the backend is fa2; others choose kernels by machine and version")
        self._layout = kv_layout
        self._workspace = float_workspace_buffer
        self._plan_memory = torch.empty(8 << 20, dtype=torch.uint8, device=float_workspace_buffer.device)
        self._is_planned = False

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Use other memory from the next plan on."""
        self._workspace = float_workspace_buffer
        self._plan_memory = int_workspace_buffer

    def _plan(
        self,
        query_starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        causal: bool,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        dtypes: tuple[torch.dtype | str, torch.dtype | str],
    ) -> None:
        for tensor in (query_starts, indptr, last_page_len):
            demand(tensor.dtype == torch.int32 and tensor.device.type == "cpu", "plan takes int32 on the CPU")
        demand(indices.dtype == torch.int32, "page numbers are int32")
        demand(
            bool((last_page_len >= 1).all() and (last_page_len <= page_size).all()),
            "1 <= last_page_len <= page_size",
        )
        demand(
            int(indptr[-1]) == len(indices) and len(indptr) == len(last_page_len) + 1, "the page table is CSR"
        )
        demand(bool((indptr.diff() >= 1).all() and (query_starts.diff() >= 1).all()), "no sequence is empty")
        demand(head_dim in HEAD_DIMS, f"the head size is one of {HEAD_DIMS}")
        demand(num_heads[0] % num_heads[1] == 0, "query heads are a multiple of key-value heads")
        demand(pos_encoding_mode == "NONE", "positions are encoded outside")
        demand(dtypes[0] in QUERY_DTYPES, "queries are in 16 bits")
        self._num_heads, self._head_dim, self._page_size = num_heads, head_dim, page_size
        self._dtypes = dtypes
        self._causal, self._window_left = causal, window_left
        self._soft_cap = logits_soft_cap or 0.0
        self._scale = head_dim**-0.5 if sm_scale is None else sm_scale
        kv_lens = (indptr.diff() - 1) * page_size + last_page_len
        self._plan_memory[: 4 * len(kv_lens)].view(torch.int32).copy_(kv_lens)
        self._num_rows = int(query_starts[-1])
        self._is_planned = True

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        out: torch.Tensor | None,
        return_lse: bool,
        query_starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        demand(self._is_planned, "run comes after plan")
        k_cache, v_cache = _unpacked(paged_kv_cache, self._layout)
        demand((q.dtype, k_cache.dtype) == self._dtypes, "dtypes are the planned ones")
        demand(
            q.shape == (self._num_rows, self._num_heads[0], self._head_dim), "queries have the planned shape"
        )
        demand(
            k_cache.shape[1:] == (self._page_size, self._num_heads[1], self._head_dim), "and so has the cache"
        )
        demand(q.stride(-1) == 1, "a head's values lie beside each other")
        out = torch.empty_like(q) if out is None else out
        demand(
            out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous(), "out is like q, contiguous"
        )
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        attend(
            q, k_cache, v_cache, query_starts, indptr, indices, last_page_len, self._plan_memory, out, lse,
            self._causal, self._window_left, self._soft_cap, self._scale,
        )  # fmt: skip
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """Sequences that compute any number of tokens, the last of what each has in the cache."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto"
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
    ) -> None:
        """Prepare any number of runs over the same sequences."""
        self._tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(
            *self._tables, (num_qo_heads, num_kv_heads), head_dim_qk, page_size, causal, pos_encoding_mode, window_left,
            logits_soft_cap, sm_scale, (q_data_type, kv_data_type or q_data_type),
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend; the log-sum-exp is in base 2."""
        return self._run(q, paged_kv_cache, out, return_lse, *self._tables)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """Sequences that compute one token each. With use_cuda_graph the tables lie in the given buffers for good."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        demand(not bool(float_workspace_buffer[: 1 << 20].any()), "the workspace is zeroed for decoding")
        self._use_tensor_cores = use_tensor_cores
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            indptr, indices, last_page_len = (buffer for buffer in buffers if buffer is not None)
            demand(len(indptr) == len(last_page_len) + 1, "the buffers are for one batch size")
            self._buffers = indptr, indices, last_page_len

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype | str | None = "float16",
        kv_data_type: torch.dtype | str | None = None,
        sm_scale: float | None = None,
    ) -> None:
        """Prepare any number of runs over the same sequences; with buffers, of replays of what was captured."""
        group_size = num_qo_heads // num_kv_heads
        demand(
            self._use_tensor_cores or group_size in CUDA_CORE_GROUP_SIZES,
            f"no decode kernel for groups of {group_size}",
        )
        counts = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(
            counts, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads), head_dim, page_size, False,
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, (q_data_type or "", kv_data_type or q_data_type or ""),
        )  # fmt: skip
        self._tables = (counts, indptr, indices, last_page_len)
        if self._buffers is not None:
            demand(len(last_page_len) == len(self._buffers[2]), "the batch size is the captured one")
            demand(len(indices) <= len(self._buffers[1]), "the page numbers fit their buffer")
            self._buffers[0].copy_(indptr)
            self._buffers[1][: len(indices)].copy_(indices)
            self._buffers[2].copy_(last_page_len)
            self._tables = (counts, *self._buffers)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend; the log-sum-exp is in base 2."""
        return self._run(q, paged_kv_cache, out, return_lse, *self._tables)


def _unpacked(paged_kv_cache: torch.Tensor, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, [num_pages, page_size, num_kv_heads, head_dim] in either layout."""
    demand(paged_kv_cache.dim() == 5 and paged_kv_cache.shape[1] == 2, "the cache is 5-D, keys before values")
    k_cache, v_cache = paged_kv_cache.unbind(1)
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return k_cache, v_cache
