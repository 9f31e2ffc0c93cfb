"""The native kernels as functions of tensors: shapes are checked here, and nothing is copied."""

from __future__ import annotations

from ctypes import Array
from dataclasses import dataclass

import torch

from paged_engine.attention.interface import AttentionSpec
from paged_engine.execution.batch import Batch
from paged_engine.kernels.library import (
    Activation,
    AttentionLayer,
    AttentionStep,
    DecoderLayer,
    DecoderStep,
    ElementType,
    Heads,
    Library,
    Linear,
    PageLayout,
    Rotary,
)
from paged_engine.kernels.memory import HugePageArena
from paged_engine.kernels.reference import INT8_GROUP, PANEL_WIDTH

DEPTH_MULTIPLE = 32
"""Input features that packed 16-bit and 8-bit weights must be a multiple of."""


@dataclass(frozen=True)
class PackedLinear:
    """Weights of a linear layer in the native kernels' order, and the tensors that must outlive the structure."""

    structure: Linear
    tensors: tuple[torch.Tensor, ...]

    @property
    def in_features(self) -> int:
        """Columns of x."""
        return int(self.structure.in_features)

    @property
    def out_features(self) -> int:
        """Columns of y; half the packed channels where a gate and its counterpart are packed together."""
        channels = int(self.structure.out_features)
        return channels if self.structure.activation == Activation.IDENTITY else channels // 2


class NativeKernels:
    """One variant of the library, running on `num_threads` threads.

    Rows are independent of each other: in every kernel a row's result is the same whatever rows are beside it.
    """

    def __init__(self, library: Library, variant: str, num_threads: int) -> None:
        self.library = library
        self.variant = variant
        self.num_threads = num_threads
        self._arena = HugePageArena(library.advise_huge_pages)
        self._attention = library.kernel("attention", variant)
        self._write_pages = library.kernel("write_pages", variant)
        self._rotate_and_write = library.kernel("rotate_and_write", variant)
        self._rms_norm = library.kernel("rms_norm", variant)
        self._gate = library.kernel("gate", variant)
        self._pack_linear = library.kernel("pack_linear", variant)
        self._pack_int8 = library.kernel("pack_int8", variant)
        self._linear = library.kernel("linear", variant)
        self._decode = library.kernel("decode", variant)
        self._argmax = library.kernel("argmax", variant)
        self._log_sum_exp = library.kernel("log_sum_exp", variant)

    @property
    def quantizes_activations(self) -> bool:
        """Whether int8 weights are multiplied with int8 activations. Tiles multiply them with bfloat16 ones, as bfloat16."""
        return self.variant != "amx"

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory [num_elements] for what every step reads or writes, in large pages."""
        return self._arena.allocate(num_elements, dtype)

    # ---- Attention

    def attention_layer(
        self, spec: AttentionSpec, page_size: int, query_dtype: torch.dtype, cache_dtype: torch.dtype
    ) -> AttentionLayer:
        """What the attention kernels must know of a layer.

        Args:
            query_dtype: float32, bfloat16 or float16.
            cache_dtype: one of these, or int8 where page_size and head_dim are multiples of 16.
        """
        pages = PageLayout(spec.num_kv_heads, spec.head_dim, page_size, ElementType.of(cache_dtype))
        return AttentionLayer(
            pages,
            spec.num_query_heads,
            ElementType.of(query_dtype),
            spec.sliding_window or 0,
            spec.scale,
            spec.soft_cap or 0.0,
        )

    def attention_step(self, batch: Batch) -> AttentionStep:
        """A batch as the attention kernel reads it; valid while the batch lives."""
        return AttentionStep(
            batch.num_sequences,
            self.num_threads,
            batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(),
            batch.page_indptr.data_ptr(),
            batch.page_indices.data_ptr(),
        )

    def attention(
        self,
        layer: AttentionLayer,
        step: AttentionStep,
        query: torch.Tensor,
        cache: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over pages that already hold this step's keys and values.

        Args:
            query: [num_tokens, num_query_heads, head_dim]; only the last axis must be contiguous.
            cache: [num_pages, num_kv_heads, 2, page_size, head_dim], in int8 with 4 bytes more for each token; contiguous.
            sinks: float32 [num_query_heads].

        Returns:
            [num_tokens, num_query_heads, head_dim] in query's dtype.
        """
        out = query.new_empty(query.shape)
        self._attention(layer, step, _heads(query), cache.data_ptr(), _address(sinks), out.data_ptr())
        return out

    def write_pages(
        self,
        layout: PageLayout,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Put key and value [num_tokens, num_kv_heads, head_dim] of one dtype where the slots (int64) say."""
        self._write_pages(
            layout,
            _heads(key),
            _heads(value),
            ElementType.of(key.dtype),
            slots.data_ptr(),
            slots.shape[0],
            cache.data_ptr(),
            self.num_threads,
        )

    def rotate_and_write(
        self,
        layer: AttentionLayer,
        rotary: Rotary,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> None:
        """Turn query in place; turn key and write it and value into their pages. Shapes as in `write_pages`."""
        self._rotate_and_write(
            layer,
            rotary,
            _heads(query),
            _heads(key),
            _heads(value),
            slots.data_ptr(),
            slots.shape[0],
            cache.data_ptr(),
            self.num_threads,
        )

    # ---- Rows

    def rms_norm(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        out: torch.Tensor,
    ) -> None:
        """residual += x where given; out = residual / rms(residual) * weight. Contiguous [num_rows, size] each.

        `weight` is float32; `residual` is float32 or of out's dtype, x of out's dtype.
        """
        num_rows, size = residual.shape
        self._rms_norm(
            _address(x),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            epsilon,
            ElementType.of(out.dtype),
            ElementType.of(residual.dtype),
            self.num_threads,
        )

    def gate(self, gate_and_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        """out [num_rows, size] = activation(gate) * up for contiguous rows [gate, up]."""
        num_rows, size = out.shape
        self._gate(
            gate_and_up.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            activation,
            ElementType.of(out.dtype),
            self.num_threads,
        )

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Position of each row's largest element, int64 [num_rows]; the first of equals, the first NaN if any."""
        out = torch.empty(x.shape[0], dtype=torch.int64)
        x = x.contiguous()
        self._argmax(x.data_ptr(), *x.shape, ElementType.of(x.dtype), out.data_ptr(), self.num_threads)
        return out

    def log_sum_exp(self, x: torch.Tensor) -> torch.Tensor:
        """log(sum(exp(row))) of each row, float32 [num_rows]."""
        out = torch.empty(x.shape[0], dtype=torch.float32)
        x = x.contiguous()
        self._log_sum_exp(x.data_ptr(), *x.shape, ElementType.of(x.dtype), out.data_ptr(), self.num_threads)
        return out

    # ---- Linear layers

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        int8: bool = False,
        activation: Activation = Activation.IDENTITY,
        output_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        scale: float = 1.0,
    ) -> PackedLinear:
        """Pack weight [out_features, in_features], float32 or bfloat16, once; `linear` then uses it.

        Args:
            int8: quantize a bfloat16 weight to int8 in groups of 64 inputs of a channel, see native/quantized.h. `linear` then
                quantizes x in the same way, unless `quantizes_activations` is false.
            activation: other than IDENTITY: weight (and bias) are [gate; up], and y = activation(gate) * up.
            output_dtype: float32 or bfloat16; the weight's own by default.
            accumulate: add to y instead of overwriting it.
            scale: y is multiplied by it (bias included).

        Raises:
            ValueError: sizes that the kernel does not take, see `packs`.
        """
        if not self.packs(weight, activation) or (int8 and weight.dtype != torch.bfloat16):
            raise ValueError(f"a {tuple(weight.shape)} weight of {weight.dtype} cannot be packed")
        output_dtype = output_dtype or weight.dtype
        bias = None if bias is None else bias.float()
        if activation != Activation.IDENTITY:
            weight = _alternate(weight)
            bias = None if bias is None else _alternate(bias)
        scales = None
        if scale != 1.0:
            scales = torch.full(weight.shape[:1], scale)
            bias = None if bias is None else bias * scale
        packed = self._pack(weight.contiguous(), int8=int8)
        out_features, in_features = weight.shape
        structure = Linear(
            packed.data_ptr(),
            _address(scales),
            _address(bias),
            in_features,
            out_features,
            ElementType.INT8 if int8 else ElementType.of(weight.dtype),
            ElementType.of(output_dtype),
            activation,
            accumulate,
        )
        return PackedLinear(structure, tuple(t for t in (packed, scales, bias) if t is not None))

    def _pack(self, weight: torch.Tensor, *, int8: bool) -> torch.Tensor:
        out_features, in_features = weight.shape
        num_pairs = -(-out_features // (2 * PANEL_WIDTH))
        if int8:
            group_bytes = 2 * PANEL_WIDTH * (INT8_GROUP + torch.bfloat16.itemsize)
            packed = self._arena.allocate(
                num_pairs * -(-in_features // INT8_GROUP) * group_bytes, torch.uint8
            )
        else:
            packed = self._arena.allocate(num_pairs * 2 * PANEL_WIDTH * in_features, weight.dtype)
        pack = self._pack_int8 if int8 else self._pack_linear
        element_type = ElementType.of(weight.dtype)
        pack(weight.data_ptr(), packed.data_ptr(), out_features, in_features, element_type, self.num_threads)
        return packed

    @staticmethod
    def packs(weight: torch.Tensor, activation: Activation = Activation.IDENTITY) -> bool:
        """Whether `pack_linear` takes this weight: its dtype, in_features % 32 for bfloat16, gates in whole panels."""
        fits = weight.dtype == torch.float32 or (
            weight.dtype == torch.bfloat16 and weight.shape[1] % DEPTH_MULTIPLE == 0
        )
        return fits and (activation == Activation.IDENTITY or weight.shape[0] % (2 * PANEL_WIDTH) == 0)

    def linear(self, x: torch.Tensor, layer: PackedLinear, out: torch.Tensor) -> None:
        """out [num_rows, out_features] of x [num_rows, in_features]; the last axes are contiguous.

        x is float32 for float32 weights, bfloat16 for bfloat16 and int8 weights.
        """
        self._linear(
            layer.structure,
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            out.data_ptr(),
            out.stride(0),
            self.num_threads,
        )

    # ---- Whole layers

    def decode(self, layers: Array[DecoderLayer], step: DecoderStep) -> None:
        """Run a stack of decoder layers over a step; what it works on is described at DecoderStep in api.h."""
        self._decode(layers, len(layers), step)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _heads(tensor: torch.Tensor) -> Heads:
    if tensor.stride(2) != 1:
        raise ValueError(f"the last axis of heads must be contiguous, got strides {tensor.stride()}")
    return Heads(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


def _alternate(gate_and_up: torch.Tensor) -> torch.Tensor:
    """[gate; up] along the first axis to 16 gates, their 16 ups, the next 16 gates, …"""
    gates, ups = gate_and_up.unflatten(0, (2, -1, PANEL_WIDTH))
    return torch.stack((gates, ups), 1).flatten(0, 2)
