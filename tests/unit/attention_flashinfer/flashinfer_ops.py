"""The double's fused operations: norms, gated activations, rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flashinfer_kernels import demand
from torch.nn import functional


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """input / RMS(input) · weight."""
    return _normed(input, weight, eps, 0.0)


def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """input / RMS(input) · (weight + 1)."""
    return _normed(input, weight, eps, 1.0)


def fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    """residual += input; input = rmsnorm(residual)."""
    _add_normed(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> None:
    """residual += input; input = gemma_rmsnorm(residual)."""
    _add_normed(input, residual, weight, eps, 1.0)


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """silu(first half) · second half of the last axis."""
    return _activated(input, functional.silu)


def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    """The same with GELU in its tanh approximation."""
    return _activated(input, lambda gate: functional.gelu(gate, approximate="tanh"))


def gelu_and_mul(input: torch.Tensor) -> torch.Tensor:
    """The same with GELU."""
    return _activated(input, functional.gelu)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate the first rotary_dim dimensions of each head; pairs are i and i + rotary_dim / 2 (neox), or 2i and 2i + 1."""
    demand(cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous(), "the table is float32")
    demand(positions.dtype in (torch.int32, torch.int64), "positions are integers")
    rotary_dim = cos_sin_cache.shape[1]
    demand(rotary_dim <= head_size, "no more is rotated than there is")
    cosines, sines = cos_sin_cache[positions][:, None].chunk(2, dim=-1)
    for rows in (query, key):
        demand(rows.dim() == 2 and rows.stride(-1) == 1, "heads lie beside each other in a row")
        rotated = rows.view(rows.shape[0], -1, head_size)[..., :rotary_dim]
        half = rotary_dim // 2
        first, second = (
            (rotated[..., :half], rotated[..., half:]) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        )
        x, y = first.clone().float(), second.clone().float()
        first.copy_(x * cosines - y * sines)
        second.copy_(y * cosines + x * sines)


def _normed(input: torch.Tensor, weight: torch.Tensor, eps: float, added: float) -> torch.Tensor:
    demand(input.dim() in (2, 3) and input.stride(-1) == 1, "rows, or heads in rows")
    demand(weight.dtype == input.dtype and weight.shape == input.shape[-1:], "the weight is like a row")
    x = input.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight.float() + added)
    return normed.to(input.dtype).contiguous()


def _add_normed(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, added: float
) -> None:
    demand(input.dim() == 2 and input.shape == residual.shape, "input and residual are rows")
    residual.add_(input)
    input.copy_(_normed(residual, weight, eps, added))


def _activated(input: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    demand(input.is_contiguous() and input.shape[-1] % 2 == 0, "gate and up lie beside each other")
    gate, up = input.float().chunk(2, dim=-1)
    return (activation(gate) * up).to(input.dtype)
