"""Makes a model run in the native kernels, in place of transformers' modules: as a whole where it is recognised.

A model is grafted when every one of its layers is the common decoder layer (decoder_layer.py) and a trial shows that the
kernels compute what its own code computes. In the trial the original runs once, with its attention paged; what went into
and came out of every layer, the embedding and the head is then held against the kernels'. Of any other model single
modules are replaced (parts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.kernels.library import DecoderLayer, Rotary
from paged_engine.kernels.native import NativeKernels
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
from paged_engine.models.grafted_model import Buffers, Ends, GraftedModel
from paged_engine.models.hook import forward_flat
from paged_engine.models.load import LoadedModel
from paged_engine.models.parts import EXPERTS, LINEAR, drop_weights, replace_parts

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Relative error of what a layer adds to its input, and of the logits."""
_INT8_TOLERANCE = 0.1
_INT8_PAGES_TOLERANCE = 5e-3
"""The least over pages in int8: what differs by a last bit can round to the next code."""


def graft_model(
    model: LoadedModel, backend: CpuAttention, *, max_num_tokens: int, int8: bool = False
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Pack a model for the native kernels, as a whole or else module by module, and say in the log which.

    Weights that were packed are dropped: afterwards only what is returned can run the model. Caches must be bound to the
    backend anew.

    Args:
        max_num_tokens: rows of the largest step.
        int8: quantize the weights of all linear layers, which must be bfloat16, to int8.

    Returns:
        What runs the model over the step that the backend has planned; called as hook.forward_flat, without a model.
        None where the model stays as it is (with int8: where no linear layer could be packed).

    Raises:
        ConfigurationError: the model does not work with native modules.
    """
    name = type(model.module).__name__
    variant, weights = backend.kernels.variant, "int8" if int8 else str(model.dtype).removeprefix("torch.")
    try:
        grafted = _graft(model, backend, max_num_tokens, int8)
    except NotRecognised as reason:
        report = replace_parts(model, backend, int8=int8)
        _log.info(
            "%s runs as transformers' modules: %s; native (%s, %s weights) are %s",
            name, reason, variant, weights, report,
        )  # fmt: skip
        packed = report.native[LINEAR] + report.native[EXPERTS]
        return partial(forward_flat, model.module) if packed or (report.native and not int8) else None
    _log.info("%s runs in the native kernels (%s) with %s weights", name, variant, weights)
    return grafted


@torch.inference_mode()
def _graft(model: LoadedModel, backend: CpuAttention, max_num_tokens: int, int8: bool) -> GraftedModel:
    """Pack a recognised model and drop its weights layer by layer, so that it takes the memory of one layer more.

    Raises:
        NotRecognised: it is another model; it is unchanged.
    """
    if model.dtype not in _TOLERANCE:
        dtype = str(model.dtype).removeprefix("torch.")
        raise NotRecognised(f"the kernels' linear layers do not compute in {dtype}")
    tolerance = _INT8_TOLERANCE if int8 else _TOLERANCE[model.dtype]
    if backend.setup.cache_dtype == torch.int8:
        tolerance = max(tolerance, _INT8_PAGES_TOLERANCE)
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
        num_tokens = max(max_num_tokens, len(token_ids))
        buffers = Buffers(backend.kernels, backend.layers, parts, model.dtype, num_tokens)
        rotaries = []
        for index, layer_parts in enumerate(parts):
            rotary, error = _try_layer(layer_parts, tables[index], record, index, backend, buffers, int8)
            if not error <= tolerance:
                raise NotRecognised(f"layer {index} computes something else (relative error {error:.2g})")
            rotaries.append(rotary)
    structures = (DecoderLayer * len(parts))()
    owned: list[Any] = [parts, tables]
    for index, layer_parts in enumerate(parts):
        structures[index], tensors = pack(layer_parts, backend.kernels, backend.layers[index], int8=int8)
        structures[index].rotary = rotaries[index]
        owned.append(tensors)
        drop_weights(layers[index])
    embedding = model.module.get_input_embeddings()
    drop_weights(model.module, keep=embedding)
    # Memory of its own, or it alone would keep the checkpoint's whole file mapped.
    embedding.weight.data = embedding.weight.detach().clone()
    return GraftedModel(backend, structures, ends, buffers, owned)


def _find_parts(model: LoadedModel, index: int, layer: nn.Module) -> LayerParts:
    try:
        return find_parts(layer, model.layers[index].spec)
    except NotRecognised as reason:
        raise NotRecognised(f"layer {index}: {reason}") from reason


def _make_ends(model: LoadedModel, kernels: NativeKernels, norm: Norm, record: Trace, int8: bool) -> Ends:
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
    return Ends(
        embedding,
        1.0 if abs(scale - 1) < 1e-3 else scale,
        norm,
        packed,
        getattr(config, "final_logit_softcapping", None),
        kernels,
        model.dtype,
    )


def _logits_error(ends: Ends, record: Trace) -> float:
    """Relative error of the logits that the head makes of the last layer's output."""
    logits = torch.empty(record.logits.shape)
    ends.compute_logits(record.outputs[-1].float(), out=logits)
    return float((logits - record.logits.float()).norm() / record.logits.float().norm())


def _try_layer(
    parts: LayerParts,
    table: RotaryTable,
    record: Trace,
    index: int,
    backend: CpuAttention,
    buffers: Buffers,
    int8: bool,
) -> tuple[Rotary, float]:
    """Run a layer on what the original got, with its rotary table, with the same one applied to the other pairs of
    elements (where a model's code reorders the angles by itself), and with none.

    It is packed for the trial alone: until every layer has passed, the original must stay whole.

    Returns:
        What fits best, and the error of what the layer adds to its input, relative to that, without what rounding the
        original's sum costs.
    """
    given, expected = record.inputs[index].float(), record.outputs[index].float()
    rounding = 4 * torch.finfo(record.outputs[index].dtype).eps * expected.norm()
    structure, _owned = pack(parts, backend.kernels, backend.layers[index], int8=int8)
    structure.cache = backend.caches[index].data_ptr()
    best = (Rotary(), float("inf"))
    other = replace(table, interleaved=not table.interleaved)
    for candidate in (table, other, RotaryTable.none()):
        structure.rotary = rotary = rotary_structure(parts, candidate)
        residual = buffers.residual[: given.shape[0]]
        residual.copy_(given)
        backend.kernels.decode((DecoderLayer * 1)(structure), buffers.step(backend, record.positions))
        error = float(((residual - expected).norm() - rounding).clamp_min(0) / (expected - given).norm())
        best = min(best, (rotary, error), key=lambda each: each[1])
    return best
