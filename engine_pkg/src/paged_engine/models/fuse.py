"""Lets FlashInfer's fused operations compute modules of a model on a GPU, where a trial shows that they compute the same.

The model stays what it is, a tree of transformers' modules; single ones get another `forward` (fused_ops.py). Each of
them is held against its own code before, on what it gets in a small step of random tokens and on random rows of very
different sizes, so that an epsilon or a factor that nobody thought of shows. In the end the whole model is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paged_engine.attention.interface import AttentionSpec
from paged_engine.models.fuse_trial import (
    Call,
    largest_error,
    mixture,
    own_value,
    row_errors,
    run_model,
    trial_attention,
)
from paged_engine.models.fused_ops import (
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    MergedLinear,
    RotaryAngles,
)
from paged_engine.models.load import LoadedModel

_log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
"""Relative error of a row that a module computes. Rounding errors are a third of it."""
_WHOLE_MODEL = 10
"""The whole model's logits may be so many times the tolerance apart: rounding errors of its layers add up."""
_ACTIVATIONS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("silu_and_mul", functional.silu),
    ("gelu_tanh_and_mul", lambda x: functional.gelu(x, approximate="tanh")),
    ("gelu_and_mul", functional.gelu),
)
"""FlashInfer's functions of gate and up, and what they do with the gate."""

Fused = Callable[..., Any]
"""What can stand for a module's `forward`."""


class _Fuser:
    """The fusing of one model: what its modules are called with, and which are replaced."""

    def __init__(self, model: LoadedModel, library: Any) -> None:
        self._model = model
        self._library = library
        self._specs = {layer.module: layer.spec for layer in model.layers}
        self._angles = RotaryAngles()
        self._tolerance = _TOLERANCE[model.dtype]
        self._calls: dict[nn.Module, Call] = {}
        self.replaced: dict[str, list[nn.Module]] = {}
        self.reasons: list[str] = []
        """Why something that might have been fused was not."""

    def fuse(self) -> None:
        """Replace what can be."""
        kinds: tuple[tuple[str, Callable[[nn.Module], Iterator[Fused]]], ...] = (
            ("norms", self._norms),
            ("gated MLPs", self._mlps),
            ("attention modules", self._attentions),
            ("residual sums", self._layers),
        )
        try:
            with trial_attention(self._model, own_value):
                before = run_model(self._model, self._calls)
            with trial_attention(self._model, mixture):
                for kind, candidates in kinds:
                    self._replace(kind, candidates)
        except Exception as failure:  # a model's own code; it may well run in its real surroundings
            self.reasons.append(f"the trial of the model failed: {type(failure).__name__}: {failure}")
            self._undo()
            return
        if not self._is_the_same(before, "the model as a whole"):
            self._undo()
            return
        self._join_layers()
        if not self._is_the_same(before, "the model with its layers joined"):
            self._part_layers()

    def _is_the_same(self, before: torch.Tensor, what: str) -> bool:
        """Whether the model as it is now computes these logits; if not, that is a reason."""
        try:
            with trial_attention(self._model, own_value):
                # The median: what is to be found is in all rows, and rounding errors of many layers can add up in one.
                error = float(row_errors(run_model(self._model), before).median())
        except Exception as failure:
            self.reasons.append(f"the trial of {what} failed: {type(failure).__name__}: {failure}")
            return False
        if not error <= _WHOLE_MODEL * self._tolerance:
            self.reasons.append(f"{what} differed by {error:.2g}")
            return False
        return True

    def _undo(self) -> None:
        for modules in self.replaced.values():
            for module in modules:
                del module.forward
        self.replaced.clear()

    def _join_layers(self) -> None:
        """Let each fused layer compute the norm of its output, too: the next layer's first, or the one behind all layers."""
        layers = self.replaced.get("residual sums", [])
        inside = {module for layer in layers for module in layer.modules()}
        behind: FusedLayer | None = None
        for module in self._calls:  # in the order of their first calls
            forward = module.forward
            if isinstance(forward, FusedLayer):
                norm = module.input_layernorm.forward  # type: ignore[union-attr]
            elif isinstance(forward, FusedNorm) and module not in inside:
                norm = forward
            else:
                continue
            if behind is not None and isinstance(norm, FusedNorm):
                behind.next_norm = norm
            behind = forward if isinstance(forward, FusedLayer) else None

    def _part_layers(self) -> None:
        for layer in self.replaced.get("residual sums", []):
            assert isinstance(layer.forward, FusedLayer), "the kind says so"
            layer.forward.next_norm = None

    def _replace(self, kind: str, candidates: Callable[[nn.Module], Iterator[Fused]]) -> None:
        """Replace every module of a kind that one of its candidates computes the same as, with the nearest of them: beside
        a few large weights, a norm by w and one by 1 + w are the same to within rounding.

        An operation that fails is not tried on the next module: it may have been compiling for a minute.
        """
        for module in self._calls:
            try:
                errors = [
                    (largest_error(module, candidate, self._calls[module]), candidate)
                    for candidate in candidates(module)
                ]
            except Exception as error:  # no compiler, an unsupported size, …: the module stays
                self.reasons.append(f"{kind} failed: {type(error).__name__}: {error}")
                return
            if not errors:
                continue
            least, nearest = min(errors, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
            if least <= self._tolerance:
                module.forward = nearest
                self.replaced.setdefault(kind, []).append(module)
            else:
                self.reasons.append(f"a {type(module).__name__} differed by {least:.2g}")

    def _norms(self, module: nn.Module) -> Iterator[Fused]:
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or epsilon is None:
            return
        if isinstance(weight, torch.Tensor) and weight.dim() == 1 and weight.dtype == self._model.dtype:
            for one_is_added in (False, True):
                yield FusedNorm(self._library, weight, epsilon, one_is_added=one_is_added)

    def _mlps(self, module: nn.Module) -> Iterator[Fused]:
        gate_up = self._linears(module, "gate_proj", "up_proj") or self._linears(module, "gate_up_proj")
        down = self._linears(module, "down_proj")
        activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
        if not gate_up or not down or activation is None:
            return
        probe = torch.linspace(-6, 6, 101, device=self._model.device)
        for name, function in _ACTIVATIONS:
            if torch.allclose(activation(probe), function(probe), atol=1e-6):
                yield FusedMLP(getattr(self._library, name), MergedLinear(gate_up), down[0])

    def _attentions(self, module: nn.Module) -> Iterator[Fused]:
        spec, angles = self._specs.get(module), self._calls[module].keywords.get("position_embeddings")
        if spec is None or angles is None:
            return
        projections = self._linears(module, "q_proj", "k_proj", "v_proj") or self._linears(module, "qkv_proj")
        output = self._linears(module, "o_proj")
        norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        fused_norms = tuple(norm.forward for norm in norms if norm is not None)
        if not projections or not output or not all(isinstance(norm, FusedNorm) for norm in fused_norms):
            return
        sizes = _part_sizes(spec)
        if sum(sizes) != sum(layer.out_features for layer in projections):
            return
        merged = MergedLinear(projections, sizes)
        for pairs_are_halves in (True, False):
            yield FusedAttention(
                self._library,
                module,
                merged,
                output[0],
                self._angles,
                head_dim=spec.head_dim,
                norms=(fused_norms[0], fused_norms[1]) if fused_norms else None,
                once=_each_angle_once(*angles),
                pairs_are_halves=pairs_are_halves,
            )

    def _layers(self, module: nn.Module) -> Iterator[Fused]:
        parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
        others = [name for name, _ in module.named_children() if name.endswith("norm") and name not in parts]
        if all(hasattr(module, part) for part in parts) and not others:
            norm = module.post_attention_layernorm.forward  # type: ignore[union-attr]
            if isinstance(norm, FusedNorm):
                yield FusedLayer(module, norm)

    def _linears(self, module: nn.Module, *names: str) -> list[nn.Linear] | None:
        """The linear layers of these names; None where one is missing, or is not a plain one."""
        layers = [getattr(module, name, None) for name in names]
        plain = [
            layer for layer in layers if type(layer) is nn.Linear and layer.weight.dtype == self._model.dtype
        ]
        with_bias = [layer for layer in plain if layer.bias is not None]
        return plain if len(plain) == len(names) and len(with_bias) in (0, len(names)) else None


@torch.no_grad()
def fuse_modules(model: LoadedModel, library: Any) -> dict[str, int]:
    """Give modules of `model` a fused `forward` where it computes the same; one line in the log says how many.

    Args:
        model: in float16 or bfloat16 on a GPU.
        library: the module flashinfer, or what behaves like it.

    Returns:
        By kind, how many modules were replaced.
    """
    fuser = _Fuser(model, library)
    fuser.fuse()
    counts = {kind: len(modules) for kind, modules in fuser.replaced.items()}
    fused = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing"
    left = f"; {len(fuser.reasons)} were not, for one: {fuser.reasons[-1]}" if fuser.reasons else ""
    _log.log(
        logging.INFO if counts else logging.WARNING,
        "in %s, FlashInfer's fused operations compute %s%s",
        type(model.module).__name__, fused, left,
    )  # fmt: skip
    return counts


def _part_sizes(spec: AttentionSpec) -> tuple[int, int, int]:
    """Features of queries, keys and values."""
    kv_size = spec.num_kv_heads * spec.head_dim
    return spec.num_query_heads * spec.head_dim, kv_size, kv_size


def _each_angle_once(cosines: torch.Tensor, sines: torch.Tensor) -> slice:
    """Where each angle stands once: many models lay them out twice, one half like the other or side by side."""
    size = cosines.shape[-1]
    for once, again in (
        (slice(0, size // 2), slice(size // 2, size)),
        (slice(0, size, 2), slice(1, size, 2)),
    ):
        if all(torch.equal(each[..., once], each[..., again]) for each in (cosines, sines)):
            return once
    return slice(0, size)
