"""The two kernels behind the double's wrappers, and how it says that a rule of theirs is broken.

They are operators, so that whoever records operators sees each as one and repeats it on what its tensors hold then.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def demand(condition: bool, rule: str) -> None:
    """ValueError where a condition that the real package has does not hold."""
    if not condition:
        raise ValueError(f"FlashInfer's rule is broken: {rule}")


@torch.library.custom_op("flashinfer_double::append", mutates_args=("k_cache", "v_cache"))
def append(
    key: torch.Tensor,
    value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    """See append_paged_kv_cache; the caches are [num_pages, page_size, num_kv_heads, head_dim]."""
    page_size = k_cache.shape[1]
    pages = kv_indices[kv_indptr[batch_indices] + positions // page_size]
    k_cache[pages, positions % page_size] = key
    v_cache[pages, positions % page_size] = value


@torch.library.custom_op("flashinfer_double::attend", mutates_args=("out", "lse"))
def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_starts: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    plan_memory: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    window_left: int,
    soft_cap: float,
    scale: float,
) -> None:
    """Attention of each sequence by its definition, in float64, into `out` and (base 2) `lse`."""
    page_size, num_kv_heads = k_cache.shape[1:3]
    planned = plan_memory[: 4 * len(last_page_len)].view(torch.int32).tolist()
    starts, pages_from, tail = query_starts.tolist(), indptr.tolist(), last_page_len.tolist()
    for i, (start, end) in enumerate(pairwise(starts)):
        kv_len = (pages_from[i + 1] - pages_from[i] - 1) * page_size + tail[i]
        demand(kv_len == planned[i], "a plan serves the runs up to the next plan in the same memory")
        pages = indices[pages_from[i] : pages_from[i + 1]]
        key, value = (
            cache[pages].flatten(0, 1)[:kv_len].double().repeat_interleave(q.shape[1] // num_kv_heads, dim=1)
            for cache in (k_cache, v_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end].double(), key) * scale
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = (kv_len - (end - start) + torch.arange(end - start))[:, None] - torch.arange(kv_len)
        hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        if window_left >= 0:
            hidden |= distance > window_left
        scores = scores.masked_fill(hidden, -torch.inf)
        out[start:end] = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), value).to(out.dtype)
        lse[start:end] = torch.logsumexp(scores, dim=-1).T / math.log(2)
