"""Plain torch twins of the native kernels: what each must compute, checked against it by tests and at load.

Everything is computed in float32 from the operands as stored, and rounded once at the end.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from paged_engine.attention.interface import AttentionSpec
from paged_engine.execution.batch import Batch

PANEL_WIDTH = 16
"""Tokens, or output channels, that the native kernels keep together."""
INT8_GROUP = 64
"""Elements along the depth of a linear layer that share an int8 scale; the most that are transformed together."""
SCALE_BYTES = 4
"""What a page in int8 has besides the codes, for each token's keys and for its values in each head: a float32 scale."""

_PAIRS = {torch.bfloat16: (2, 2), torch.int8: (4, 2)}
"""By dtype, neighbouring elements of a key and neighbouring tokens' values that lie together in a panel; others: 1, 1."""
_SIGNS = (-128, 0)
"""Codes of keys lie in their pages as unsigned bytes, 128 higher, which turns their highest bit over; values as they are."""


def page_offsets(page_size: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where element d of the token at offset t lies in a page's keys, and in its values (see native/api.h).

    Returns:
        Two int64 [page_size, head_dim], offsets in elements into a half page of page_size * head_dim elements.
    """
    token = torch.arange(page_size)[:, None]
    dim = torch.arange(head_dim)[None, :]
    if page_size % PANEL_WIDTH or head_dim % PANEL_WIDTH:
        plain = token * head_dim + dim
        return plain, plain
    of_keys, of_values = _PAIRS.get(dtype, (1, 1))
    panel, column = token // PANEL_WIDTH, token % PANEL_WIDTH
    keys = ((panel * (head_dim // of_keys) + dim // of_keys) * PANEL_WIDTH + column) * of_keys + dim % of_keys
    values = (token // of_values * head_dim + dim) * of_values + token % of_values
    return keys, values


def read_pages(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache, each [num_pages, page_size, num_kv_heads, head_dim].

    Args:
        cache: [num_pages, num_kv_heads, 2, page_size, head_dim]; in int8 [.., head_dim + SCALE_BYTES], a half page being
            the codes and behind them the scales of its tokens, which are read as the float32 that they stand for.
    """
    page_size, head_dim = cache.shape[3], _head_dim(cache)
    halves = cache.flatten(3)
    both = []
    for half, offsets in enumerate(page_offsets(page_size, head_dim, cache.dtype)):
        heads = halves[:, :, half][..., offsets]
        if cache.dtype == torch.int8:
            scales = halves[:, :, half, page_size * head_dim :].contiguous().view(torch.float32)
            heads = dequantize_heads(heads ^ _SIGNS[half], scales)
        both.append(heads.transpose(1, 2))
    return both[0], both[1]


def write_pages(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Put key and value [num_tokens, num_kv_heads, head_dim] where the slots (int64 [num_tokens]) say."""
    page_size, head_dim = cache.shape[3], _head_dim(cache)
    halves = cache.view(*cache.shape[:3], -1)
    page, offset = (slots // page_size)[:, None, None], slots % page_size
    head = torch.arange(cache.shape[1])[None, :, None]
    both_offsets = page_offsets(page_size, head_dim, cache.dtype)
    for half, (heads, offsets) in enumerate(zip((key, value), both_offsets, strict=True)):
        if cache.dtype == torch.int8:
            codes, scales = quantize_heads(heads)
            heads = codes ^ _SIGNS[half]
            scale_places = SCALE_BYTES * offset[:, None, None] + torch.arange(SCALE_BYTES)
            halves[page, head, half, page_size * head_dim + scale_places] = scales[..., None].view(torch.int8)
        halves[page, head, half, offsets[offset][:, None]] = heads.to(cache.dtype)


def _head_dim(cache: torch.Tensor) -> int:
    return cache.shape[4] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def rotate(
    heads: torch.Tensor,
    positions: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    *,
    interleaved: bool = False,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Rotary embedding of [num_tokens, num_heads, head_dim] by the angles of positions [num_tokens].

    cosines and sines are [number of positions, rotary_dim / 2]; elements beyond rotary_dim stay. With `norm`
    ([head_dim]) each head is first divided by its root mean square and multiplied by it.
    """
    x = heads.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * norm
    half = cosines.shape[-1]
    cosines, sines = cosines[positions, None], sines[positions, None]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    pair = (first * cosines - second * sines, second * cosines + first * sines)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1).to(heads.dtype)


def attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    spec: AttentionSpec,
    batch: Batch,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query [num_tokens, num_query_heads, head_dim] over the pages of its sequences; same shape and dtype.

    Over pages in int8 the queries are quantized like the keys.
    """
    keys, values = read_pages(cache)
    group = spec.num_query_heads // spec.num_kv_heads
    rows = []
    for i in range(batch.num_sequences):
        pages = batch.page_indices[batch.page_indptr[i] : batch.page_indptr[i + 1]].long()
        context_len = int(batch.context_lens[i])
        key = keys[pages].flatten(0, 1)[:context_len].float().repeat_interleave(group, 1)
        value = values[pages].flatten(0, 1)[:context_len].float().repeat_interleave(group, 1)
        q = query[batch.query_starts[i] : batch.query_starts[i + 1]].float()
        if cache.dtype == torch.int8:
            q = dequantize_heads(*quantize_heads(q))
        scores = torch.einsum("qhd,khd->hqk", q, key) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        position = torch.arange(context_len - q.shape[0], context_len)[:, None]
        distance = position - torch.arange(context_len)[None, :]
        hidden = distance < 0
        if spec.sliding_window is not None:
            hidden |= distance >= spec.sliding_window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, q.shape[0], 1)), -1)
        weights = scores.softmax(-1)[..., :context_len]
        rows.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(rows).to(query.dtype)


def rms_norm(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + x (rounded to residual's dtype), and its RMS norm times weight in `dtype`; rows of [num_rows, size]."""
    if x is not None:
        residual = (residual.float() + x.float()).to(residual.dtype)
    sums = residual.float()
    normalized = sums * torch.rsqrt(sums.square().mean(-1, keepdim=True) + epsilon) * weight.float()
    return residual, normalized.to(dtype)


def gate(gate_and_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up for [num_rows, 2 * size] rows of gate and up; activation is "silu" or "gelu_tanh"."""
    gates, ups = gate_and_up.float().chunk(2, -1)
    activated = F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")
    return (activated * ups).to(gate_and_up.dtype)


def hadamard(x: torch.Tensor, group_size: int = INT8_GROUP) -> torch.Tensor:
    """x [..., size], in float32, times the orthonormal Hadamard matrix in each group of group_size (a power of 2) of a row.

    Applied twice it gives x again; the product of two rows stays what it is.

    Returns:
        float32 [..., num_groups, group_size]; zeros fill up the last group.
    """
    padded = F.pad(x.float(), (0, -x.shape[-1] % group_size))
    groups = padded.unflatten(-1, (-1, group_size)) * group_size**-0.5
    distance = group_size // 2
    while distance:
        low, high = groups.unflatten(-1, (-1, 2, distance)).unbind(-2)
        groups = torch.stack((low + high, low - high), -2).flatten(-3)
        distance //= 2
    return groups


def quantize_int8(
    x: torch.Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 codes of `hadamard` of x [num_rows, size].

    Args:
        scale_dtype: what the scales are rounded to: bfloat16 for weights, float32 for activations.

    Returns:
        int8 [num_rows, num_groups, 64], and float32 [num_rows, num_groups]: what the code 1 stands for in each group. The codes
        of a group that holds nothing above 1e-30 are zero.
    """
    return _quantize(hadamard(x), scale_dtype)


def _quantize(
    rows: torch.Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [..., size] and float32 scales [...] of rows [..., size]."""
    largest = rows.abs().amax(-1, keepdim=True)
    scales = (largest / 127).to(scale_dtype).float()
    steps = (
        rows / scales if scale_dtype == torch.bfloat16 else rows * (torch.full_like(largest, 127) / largest)
    )
    codes = torch.where(largest > 1e-30, steps, 0).nan_to_num().round().to(torch.int8)
    return codes, scales.squeeze(-1)


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [num_rows, num_groups * 64] of what `quantize_int8` returns: `hadamard` of x, nearly."""
    return (codes.float() * scales[..., None]).flatten(-2)


def quantize_heads(heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 codes of keys, values or queries [..., head_dim], each head with one scale.

    Heads are first transformed by `hadamard`, within groups of the largest power of 2 that divides head_dim, at most 64. A
    head of keys often has a few elements far larger than the others, which so cost those no precision.

    Returns:
        int8 [..., head_dim] and float32 [...]: what the code 1 stands for in each head. The codes are zero in a head that
        holds nothing above 1e-30, and in one with NaN or infinity, whose scale makes whatever is computed of it NaN.
    """
    return _quantize(_transform_heads(heads))


def dequantize_heads(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., head_dim] of what `quantize_heads` returns: the heads, nearly."""
    return _transform_heads(codes.float() * scales[..., None])


def _transform_heads(heads: torch.Tensor) -> torch.Tensor:
    """float32 [..., head_dim]; its own inverse."""
    return hadamard(heads, math.gcd(heads.shape[-1], INT8_GROUP)).flatten(-2)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x weightᵀ + bias in float32, rounded to `dtype` (x's by default)."""
    y = x.float() @ weight.float().T
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype or x.dtype)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    quantizes_activations: bool = True,
) -> torch.Tensor:
    """The same with the weight in int8, and x too or else both transformed and in x's dtype."""
    weight = dequantize_int8(*quantize_int8(weight, torch.bfloat16))
    if quantizes_activations:
        return linear(dequantize_int8(*quantize_int8(x)), weight, bias, dtype or x.dtype)
    return linear(hadamard(x).flatten(-2).to(x.dtype), weight.to(x.dtype), bias, dtype)


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Position of each row's largest element (the first of equals; the first NaN where there is one), int64 [num_rows]."""
    wide = x.float()
    wide = torch.where(wide.isnan().any(-1, keepdim=True), wide.isnan().float(), wide)
    return (wide == wide.amax(-1, keepdim=True)).int().argmax(-1)


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(row))) of each row, float32 [num_rows]."""
    return x.float().logsumexp(-1)
