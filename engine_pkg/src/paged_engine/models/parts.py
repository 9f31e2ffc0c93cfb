"""Puts native modules into a model that the kernels cannot run as a whole: linear layers, RMS norms, blocks of experts.

Each is held against the module that it replaces on random input first; one that computes something else, that the kernels
do not take, or that a trial run of the model does not call, stays as it is. A replaced module's weights go as soon as
nothing else holds them (a tied embedding does), so that packing needs the memory of one module more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.errors import ConfigurationError
from paged_engine.kernels.native import NativeKernels
from paged_engine.models.decoder_layer import NotRecognised
from paged_engine.models.graft_trial import run_modules, small_cache
from paged_engine.models.load import LoadedModel
from paged_engine.models.native_modules import NativeExperts, NativeLinear, NativeModule, NativeRMSNorm

LINEAR, NORM, EXPERTS = "linear layers", "norms", "blocks of experts"

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Largest relative error of a row, by the dtype that a module computes in."""
_INT8_TOLERANCE = 0.05
_GARBAGE = 0.5
"""Relative error that most rows of the logits must stay below. Modules are compared one by one; this is about those that
the model uses in another way than by calling them."""
_NUM_ROWS = 9


@dataclass
class PartsReport:
    """What became of the modules of each kind."""

    total: Counter[str] = field(default_factory=Counter)
    native: Counter[str] = field(default_factory=Counter)
    stayed: Counter[str] = field(default_factory=Counter)
    """By the reason, of any kind."""

    def __str__(self) -> str:
        counts = ", ".join(f"{self.native[kind]} of {self.total[kind]} {kind}" for kind in self.total)
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.stayed.most_common())
        return f"{counts or 'nothing'}{f' (the others stay: {reasons})' if reasons else ''}"


@torch.inference_mode()
def replace_parts(model: LoadedModel, backend: CpuAttention, *, int8: bool) -> PartsReport:
    """Replace what can be replaced in the model's tree of modules.

    Args:
        int8: quantize the bfloat16 weights of linear layers and experts to int8.

    Raises:
        ConfigurationError: the model does not run with its new parts.
    """
    report = PartsReport()
    with small_cache(model, backend) as (token_ids, positions):
        places = _find_places(model.module)
        with ExitStack() as hooks:
            usual: set[int] = set()
            for module in places:
                hooks.callback(_note_usual_calls(module, usual))
            expected = run_modules(model, backend, token_ids, positions)
        while places:
            module = next(iter(places))
            kind = _kind(module)
            report.total[kind] += 1
            try:
                if id(module) not in usual:
                    raise NotRecognised("the trial does not call it, or not in its weights' dtype")
                native = _make(module, backend.kernels, int8=int8)
            except NotRecognised as reason:
                report.stayed[str(reason)] += 1
            else:
                report.native[kind] += 1
                for parent, name in places[module]:
                    setattr(parent, name, native)
                if isinstance(native, NativeExperts):  # which may keep the module for its function
                    drop_weights(module)
            del places[module], module
        _check_whole(model, backend, token_ids, positions, expected)
    return report


def drop_weights(module: nn.Module, keep: nn.Module | None = None) -> None:
    """Empty a module's parameters, whoever else holds them; but not those of `keep`."""
    kept = set() if keep is None else {id(parameter) for parameter in keep.parameters()}
    for parameter in module.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.new_empty(0)


def _kind(module: nn.Module) -> str:
    """What it is called in the report; empty for what is never replaced."""
    name = type(module).__name__
    if isinstance(module, nn.Linear | Conv1D):
        return LINEAR
    if name.endswith("Experts"):
        return EXPERTS
    return NORM if "Norm" in name else ""


def _find_places(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """By module that could be replaced, the parents that it hangs on and its names there."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None and _kind(child):
                places.setdefault(child, []).append((parent, name))
    return places


def _note_usual_calls(module: nn.Module, usual: set[int]) -> Callable[[], None]:
    """Add the module's id to `usual` when it makes a tensor of a tensor, both in its weights' dtype; returns what ends
    the watch."""
    dtypes = {parameter.dtype for parameter in module.parameters()}

    def note(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tensors = (*arguments[:1], output)
        if len(tensors) == 2 and len({getattr(each, "dtype", None) for each in tensors} | dtypes) == 1:
            usual.add(id(module))

    return module.register_forward_hook(note).remove


def _make(module: nn.Module, kernels: NativeKernels, *, int8: bool) -> NativeModule:
    """The native twin of a module, checked against it.

    Raises:
        NotRecognised: there is none, or it computes something else.
    """
    random = torch.Generator().manual_seed(0)

    def rows(size: int) -> torch.Tensor:
        """Large ones for limits inside the module, small ones for what keeps it from dividing by zero."""
        scale = torch.logspace(-3, 1.5, _NUM_ROWS)[:, None]
        return (torch.randn(_NUM_ROWS, size, generator=random) * scale).to(native.dtype)

    native: NativeModule
    arguments: tuple[torch.Tensor, ...]
    if isinstance(module, nn.Linear | Conv1D):
        native = NativeLinear(module, kernels, int8=int8)
        arguments = (rows(native.in_features),)
    elif _kind(module) == EXPERTS:
        native = NativeExperts(module, kernels, int8=int8)
        top_k = min(2, native.num_experts)
        scores = torch.rand(_NUM_ROWS, native.num_experts, generator=random)
        weights, index = scores.softmax(-1).topk(top_k)
        arguments = (rows(native.in_features), index, weights.to(native.dtype))
    else:
        native = NativeRMSNorm(module, kernels)
        arguments = (rows(native.size),)
    expected = module(*arguments)
    error = float(_row_errors(native(*arguments), expected).max())
    tolerance = (
        _INT8_TOLERANCE if int8 and not isinstance(native, NativeRMSNorm) else _TOLERANCE[native.dtype]
    )
    if not error <= tolerance:  # unlike "error > tolerance" true for NaN
        raise NotRecognised(f"{type(module).__name__} computes something else (relative error {error:.2g})")
    return native


def _row_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The error of each row, relative to what is expected."""
    return (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)


def _check_whole(
    model: LoadedModel,
    backend: CpuAttention,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """Run the model once more; what it computes must still be near `expected`."""
    name = type(model.module).__name__
    try:
        error = _row_errors(run_modules(model, backend, token_ids, positions), expected).median()
    except Exception as reason:  # whatever the model's code raises when a module is not what it used to be
        raise ConfigurationError(
            f"{name} does not run with native modules ({type(reason).__name__}: {reason}): set graft to false"
        ) from reason
    if not error <= _GARBAGE:
        raise ConfigurationError(
            f"{name} computes something else with native modules (relative error {error:.2g}): set graft to false"
        )
