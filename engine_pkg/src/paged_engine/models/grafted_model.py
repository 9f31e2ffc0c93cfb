"""A model's forward pass in the native kernels: what graft.py makes of a recognised model."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.kernels.library import AttentionLayer, DecoderLayer, DecoderStep
from paged_engine.kernels.native import NativeKernels, PackedLinear
from paged_engine.models.decoder_layer import LayerParts, Norm


@dataclass(frozen=True)
class Ends:
    """What comes before the layers and after them."""

    embedding: nn.Module
    embedding_scale: float
    norm: Norm
    head: PackedLinear
    soft_cap: float | None
    kernels: NativeKernels
    dtype: torch.dtype

    def embed(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """The layers' float32 input [num_tokens, hidden_size]."""
        out.copy_(self.embedding(token_ids))
        if self.embedding_scale != 1.0:
            out.mul_(self.embedding_scale)

    def compute_logits(self, residual: torch.Tensor, out: torch.Tensor) -> None:
        """float32 logits [num_rows, vocab_size] of the last layer's output, float32 [num_rows, hidden_size]."""
        normed = residual.new_empty(residual.shape, dtype=self.dtype)
        self.kernels.rms_norm(None, residual, self.norm.weight, self.norm.epsilon, normed)
        self.kernels.linear(normed, self.head, out)
        if self.soft_cap is not None:
            out.div_(self.soft_cap).tanh_().mul_(self.soft_cap)


class Buffers:
    """What the layers of a step work on; made once for the largest step and the largest layer."""

    def __init__(
        self,
        kernels: NativeKernels,
        attention: Sequence[AttentionLayer],
        parts: Sequence[LayerParts],
        dtype: torch.dtype,
        num_tokens: int,
    ) -> None:
        hidden_size = parts[0].input_norm.weight.shape[0]

        def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
            return kernels.allocate(num_tokens * width, dtype).view(num_tokens, width)

        self.residual = rows(hidden_size, torch.float32)
        self._others = {
            "normed": rows(hidden_size, dtype),
            "qkv": rows(max(sum(linear.out_features for linear in each.qkv) for each in parts), dtype),
            "attended": rows(max(layer.num_query_heads * layer.pages.head_dim for layer in attention), dtype),
            "gated": rows(max(each.down.in_features for each in parts), dtype),
            "projected": rows(hidden_size, torch.float32),
        }

    def step(self, backend: CpuAttention, positions: torch.Tensor) -> DecoderStep:
        """The planned step over these buffers; valid while `positions` and the planned batch live."""
        batch, attention = backend.planned
        return DecoderStep(
            attention=attention,
            num_tokens=positions.shape[0],
            positions=positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            residual=self.residual.data_ptr(),
            **{name: buffer.data_ptr() for name, buffer in self._others.items()},
        )


class GraftedModel:
    """A model's forward pass over the step that its attention backend has planned."""

    def __init__(
        self,
        backend: CpuAttention,
        layers: Array[DecoderLayer],
        ends: Ends,
        buffers: Buffers,
        owned: list[Any],
    ) -> None:
        """`owned` is whatever the layers' structures point to."""
        self._backend = backend
        self._layers = layers
        self._ends = ends
        self._buffers = buffers
        self._owned = owned
        self._logits = torch.empty(0, ends.head.out_features)

    @torch.inference_mode()
    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The logits of `rows`; arguments as in hook.forward_flat.

        Returns:
            float32 [num_rows, vocab_size], valid until the next call.
        """
        residual = self._buffers.residual[: token_ids.shape[0]]
        self._ends.embed(token_ids, out=residual)
        for index, cache in self._backend.caches.items():
            self._layers[index].cache = cache.data_ptr()
        self._backend.kernels.decode(self._layers, self._buffers.step(self._backend, positions))
        if self._logits.shape[0] < rows.shape[0]:
            self._logits = torch.empty(rows.shape[0], self._ends.head.out_features)
        logits = self._logits[: rows.shape[0]]
        self._ends.compute_logits(residual[rows], out=logits)
        return logits
