"""Runs a recognised model's whole forward pass in the native kernels, in place of transformers' modules.

A model is grafted when every one of its layers is the common decoder layer (decoder_layer.py) and a trial shows that the
kernels compute what its own code computes. In the trial the original runs once, with its attention paged; what went into
and came out of every layer, the embedding and the head is then held against the kernels'. Any other model stays as it is.
"""

from __future__ import annotations

import logging
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.kernels.library import DecoderLayer, DecoderStep, Rotary
from paged_engine.kernels.native import NativeKernels, PackedLinear
from paged_engine.models.decoder_layer import (
    LayerParts,
    Norm,
    NotRecognised,
    RotaryTable,
    find_parts,
    pack,
    rotary_structure,
)
from paged_engine.models.graft_trial import Trace, small_cache, trace
from paged_engine.models.load import LoadedModel

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Relative error of what a layer adds to its input, and of the logits."""
_INT8_TOLERANCE = 0.1


@dataclass(frozen=True)
class _Ends:
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


class _Buffers:
    """What the layers of a step work on; made once for the largest step."""

    def __init__(
        self, kernels: NativeKernels, layer: DecoderLayer, dtype: torch.dtype, num_tokens: int
    ) -> None:
        heads = layer.attention.num_query_heads
        all_heads = heads + 2 * layer.attention.pages.num_kv_heads
        head_dim = layer.attention.pages.head_dim

        def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
            return kernels.allocate(num_tokens * width, dtype).view(num_tokens, width)

        self.residual = rows(layer.hidden_size, torch.float32)
        self._others = {
            "normed": rows(layer.hidden_size, dtype),
            "qkv": rows(all_heads * head_dim, dtype),
            "attended": rows(heads * head_dim, dtype),
            "gated": rows(layer.down.in_features, dtype),
            "projected": rows(layer.hidden_size, torch.float32),
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
        ends: _Ends,
        buffers: _Buffers,
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


def graft_model(
    model: LoadedModel, backend: CpuAttention, *, max_num_tokens: int, int8: bool = False
) -> GraftedModel | None:
    """Pack a model for the native kernels; or say in the log why it stays as it is, and return None.

    The original's layers and head lose their weights: afterwards only the returned object can run the model. Caches
    must be bound to the backend anew.

    Args:
        max_num_tokens: rows of the largest step.
        int8: quantize the weights of all linear layers to int8.
    """
    name = type(model.module).__name__
    try:
        grafted = _graft(model, backend, max_num_tokens, int8)
    except NotRecognised as reason:
        _log.info("%s runs as transformers' modules: %s", name, reason)
        return None
    kept = {id(parameter) for parameter in model.module.get_input_embeddings().parameters()}
    for parameter in model.module.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.new_empty(0)
    weights = "int8" if int8 else str(model.dtype).removeprefix("torch.")
    _log.info("%s runs in the native kernels (%s) with %s weights", name, backend.kernels.variant, weights)
    return grafted


@torch.inference_mode()
def _graft(model: LoadedModel, backend: CpuAttention, max_num_tokens: int, int8: bool) -> GraftedModel:
    if model.dtype not in _TOLERANCE:
        raise NotRecognised(f"the kernels' linear layers do not compute in {model.dtype}")
    tolerance = _INT8_TOLERANCE if int8 else _TOLERANCE[model.dtype]
    decoder = model.module.get_decoder()
    layers, final_norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(final_norm, nn.Module):
        raise NotRecognised(f"{type(decoder).__name__} is no stack of layers with a norm at its end")
    if [getattr(layer, "self_attn", None) for layer in layers] != [layer.module for layer in model.layers]:
        raise NotRecognised("its attention is not its layers' own")
    parts = [_find_parts(model, index, layer) for index, layer in enumerate(layers)]
    with small_cache(model, backend) as (token_ids, positions):
        record = trace(model, backend, layers, token_ids, positions)
        ends = _make_ends(model, backend.kernels, Norm.read(final_norm), record, int8)
        if not (error := _logits_error(ends, record)) <= tolerance:
            raise NotRecognised(f"what follows its last layer is unknown (relative error {error:.2g})")
        tables = record.rotary_tables(model.max_seq_len)
        structures = (DecoderLayer * len(parts))()
        owned: list[Any] = [parts, tables]
        for index, layer_parts in enumerate(parts):
            structures[index], tensors = pack(layer_parts, backend.kernels, backend.layers[index], int8=int8)
            owned.append(tensors)
        buffers = _Buffers(backend.kernels, structures[0], model.dtype, max(max_num_tokens, len(token_ids)))
        for index, layer_parts in enumerate(parts):
            structures[index].cache = backend.caches[index].data_ptr()
            error = _fit_layer(structures[index], layer_parts, tables[index], record, index, backend, buffers)
            if not error <= tolerance:
                raise NotRecognised(f"layer {index} computes something else (relative error {error:.2g})")
    return GraftedModel(backend, structures, ends, buffers, owned)


def _find_parts(model: LoadedModel, index: int, layer: nn.Module) -> LayerParts:
    try:
        return find_parts(layer, model.layers[index].spec)
    except NotRecognised as reason:
        raise NotRecognised(f"layer {index}: {reason}") from reason


def _make_ends(model: LoadedModel, kernels: NativeKernels, norm: Norm, record: Trace, int8: bool) -> _Ends:
    """Embedding and head; the factors that the model's code puts beside them are read off the trial."""
    embedding, head = model.module.get_input_embeddings(), model.module.get_output_embeddings()
    if type(head) is not nn.Linear or not kernels.packs(head.weight):
        raise NotRecognised("its head is no linear layer that the kernels take")
    config = model.hf_config.get_text_config()
    embedded = embedding(record.token_ids).float()
    first = record.inputs[0].float()
    scale = float((first * embedded).sum() / embedded.square().sum())
    if not (first - embedded * scale).norm() <= 4 * torch.finfo(model.dtype).eps * first.norm():
        raise NotRecognised("its layers do not begin with the embedding")
    packed = kernels.pack_linear(
        head.weight.detach(),
        None if head.bias is None else head.bias.detach(),
        int8=int8,
        output_dtype=torch.float32,
        scale=getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0),
    )
    return _Ends(
        embedding,
        1.0 if abs(scale - 1) < 1e-3 else scale,
        norm,
        packed,
        getattr(config, "final_logit_softcapping", None),
        kernels,
        model.dtype,
    )


def _logits_error(ends: _Ends, record: Trace) -> float:
    """Relative error of the logits that the head makes of the last layer's output."""
    logits = torch.empty(record.logits.shape)
    ends.compute_logits(record.outputs[-1].float(), out=logits)
    return float((logits - record.logits.float()).norm() / record.logits.float().norm())


def _fit_layer(
    structure: DecoderLayer,
    parts: LayerParts,
    table: RotaryTable,
    record: Trace,
    index: int,
    backend: CpuAttention,
    buffers: _Buffers,
) -> float:
    """Run a layer on what the original got, with its rotary table or (layers without positions) none; the table that
    fits stays in the structure.

    Returns:
        The error of what the layer adds to its input, relative to that, without what rounding the original's sum costs.
    """
    given, expected = record.inputs[index].float(), record.outputs[index].float()
    rounding = 4 * torch.finfo(record.outputs[index].dtype).eps * expected.norm()
    best = (float("inf"), Rotary())
    for rotary in (rotary_structure(parts, table), rotary_structure(parts, RotaryTable.none())):
        structure.rotary = rotary
        residual = buffers.residual[: given.shape[0]]
        residual.copy_(given)
        backend.kernels.decode((DecoderLayer * 1)(structure), buffers.step(backend, record.positions))
        error = float(((residual - expected).norm() - rounding).clamp_min(0) / (expected - given).norm())
        best = min(best, (error, rotary), key=lambda each: each[0])
    structure.rotary = best[1]
    return best[0]
