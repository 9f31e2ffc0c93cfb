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
"""Elements along the depth of a linear layer that share an int8 scale."""


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
    pair = 2 if dtype == torch.bfloat16 else 1
    panel, column = token // PANEL_WIDTH, token % PANEL_WIDTH
    keys = ((panel * (head_dim // pair) + dim // pair) * PANEL_WIDTH + column) * pair + dim % pair
    values = (token // pair * head_dim + dim) * pair + token % pair
    return keys, values


def read_pages(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of [num_pages, num_kv_heads, 2, page_size, head_dim] as [num_pages, page_size, num_kv_heads, head_dim]."""
    key_offsets, value_offsets = page_offsets(cache.shape[3], cache.shape[4], cache.dtype)
    halves = cache.flatten(3)
    return halves[:, :, 0][..., key_offsets].transpose(1, 2), halves[:, :, 1][..., value_offsets].transpose(
        1, 2
    )


def write_pages(cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Put key and value [num_tokens, num_kv_heads, head_dim] where the slots (int64 [num_tokens]) say."""
    page_size = cache.shape[3]
    key_offsets, value_offsets = page_offsets(page_size, cache.shape[4], cache.dtype)
    halves = cache.view(*cache.shape[:3], -1)
    page, offset = (slots // page_size)[:, None, None], slots % page_size
    head = torch.arange(cache.shape[1])[None, :, None]
    halves[page, head, 0, key_offsets[offset][:, None]] = key.to(cache.dtype)
    halves[page, head, 1, value_offsets[offset][:, None]] = value.to(cache.dtype)


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
    """Attention of query [num_tokens, num_query_heads, head_dim] over the pages of its sequences; same shape and dtype."""
    keys, values = read_pages(cache)
    group = spec.num_query_heads // spec.num_kv_heads
    rows = []
    for i in range(batch.num_sequences):
        pages = batch.page_indices[batch.page_indptr[i] : batch.page_indptr[i + 1]].long()
        context_len = int(batch.context_lens[i])
        key = keys[pages].flatten(0, 1)[:context_len].float().repeat_interleave(group, 1)
        value = values[pages].flatten(0, 1)[:context_len].float().repeat_interleave(group, 1)
        q = query[batch.query_starts[i] : batch.query_starts[i + 1]].float()
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


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [num_rows, size], float32, times the orthonormal Hadamard matrix of 64 in each group of 64 along a row.

    Applied twice it gives x again; the product of two rows stays what it is.

    Returns:
        float32 [num_rows, num_groups, 64]; zeros fill up the last group.
    """
    padded = F.pad(x.float(), (0, -x.shape[-1] % INT8_GROUP))
    groups = padded.unflatten(-1, (-1, INT8_GROUP)) / math.sqrt(INT8_GROUP)
    distance = INT8_GROUP // 2
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
    groups = hadamard(x)
    largest = groups.abs().amax(-1, keepdim=True)
    scales = (largest / 127).to(scale_dtype).float()
    steps = (
        groups / scales
        if scale_dtype == torch.bfloat16
        else groups * (torch.full_like(largest, 127) / largest)
    )
    codes = torch.where(largest > 1e-30, steps, 0).nan_to_num().round().to(torch.int8)
    return codes, scales.squeeze(-1)


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [num_rows, num_groups * 64] of what `quantize_int8` returns: `hadamard` of x, nearly."""
    return (codes.float() * scales[..., None]).flatten(-2)


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
