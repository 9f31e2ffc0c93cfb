"""Recognises the common decoder layer of Llama's descendants in a transformers module, and packs it for the kernels.

x += attention(norm(x)); x += mlp(norm(x)), with rotary embedding and a gated MLP; optionally biases, norms of query and
key heads, and a norm at the end of each branch. It is recognised by its parts, and every parameter must be one of theirs;
what the code around them does is checked by running both (graft.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paged_engine.attention.interface import AttentionSpec
from paged_engine.kernels.library import Activation, AttentionLayer, DecoderLayer, Linear, Rotary
from paged_engine.kernels.native import NativeKernels

_NORM_NAMES = (
    ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("", "post_attention_layernorm", ""),
)
"""What architectures call the norms behind attention, before the MLP and behind it; the last without norms of branches."""


class NotRecognised(Exception):
    """The module is something else; the message completes "… because "."""


@dataclass(frozen=True)
class RotaryTable:
    """Angles of every position, as the model's own module computes them in float32."""

    cosines: torch.Tensor
    """float32 [number of positions, rotary_dim / 2]."""
    sines: torch.Tensor
    interleaved: bool
    """Whether elements 2i and 2i + 1 turn together, instead of i and i + rotary_dim / 2."""

    @classmethod
    def none(cls) -> RotaryTable:
        """For layers that turn nothing."""
        return cls(torch.empty(0, 0), torch.empty(0, 0), interleaved=False)


@dataclass(frozen=True)
class Norm:
    """An RMS norm: x / rms(x) · weight."""

    weight: torch.Tensor
    """float32; where the module multiplies by 1 + weight, that sum."""
    epsilon: float
    parameter: nn.Parameter

    @classmethod
    def read(cls, module: nn.Module) -> Norm:
        """Find out what a norm multiplies by, by trying it.

        Raises:
            NotRecognised: it is no RMS norm with a weight.
        """
        parameter = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not isinstance(parameter, nn.Parameter) or parameter.dim() != 1 or not isinstance(epsilon, float):
            raise NotRecognised(f"{type(module).__name__} is no RMS norm")
        x = torch.randn(4, parameter.shape[0], generator=torch.Generator().manual_seed(0))
        x = x.to(parameter.dtype)
        got = module(x).float()
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        # Where some weights are large the other candidate is within rounding too, as a whole: the nearer one is meant.
        weight = min(
            (parameter.detach().float(), 1 + parameter.detach().float()),
            key=lambda candidate: float((got - normed * candidate).norm()),
        )
        if (got - normed * weight).norm() > 4 * torch.finfo(x.dtype).eps * got.norm():
            raise NotRecognised(f"{type(module).__name__} is no RMS norm")
        return cls(weight, epsilon, parameter)


@dataclass(frozen=True)
class LayerParts:
    """The parts of one decoder layer."""

    input_norm: Norm
    attention_output_norm: Norm | None
    mlp_norm: Norm
    mlp_output_norm: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    qkv: tuple[nn.Linear, ...]
    attention_output: nn.Linear
    gate_and_up: tuple[nn.Linear, ...]
    down: nn.Linear
    activation: Activation
    branch_scale: float
    """What both branches are multiplied by before they are added."""


def find_parts(layer: nn.Module, spec: AttentionSpec) -> LayerParts:
    """Take a decoder layer apart.

    Raises:
        NotRecognised: names what is missing, unknown or left over.
    """
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    after_attention, before_mlp, after_mlp = next(
        (names for names in _NORM_NAMES if all(hasattr(layer, name) for name in names if name)),
        _NORM_NAMES[-1],
    )
    parts = LayerParts(
        input_norm=_norm(layer, "input_layernorm"),
        attention_output_norm=_norm(layer, after_attention) if after_attention else None,
        mlp_norm=_norm(layer, before_mlp),
        mlp_output_norm=_norm(layer, after_mlp) if after_mlp else None,
        query_norm=_norm(attention, "q_norm", spec.head_dim) if hasattr(attention, "q_norm") else None,
        key_norm=_norm(attention, "k_norm", spec.head_dim) if hasattr(attention, "k_norm") else None,
        qkv=_linears(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        attention_output=_linear(attention, "o_proj"),
        gate_and_up=_linears(mlp, "gate_up_proj", ("gate_proj", "up_proj")),
        down=_linear(mlp, "down_proj"),
        activation=find_activation(mlp),
        branch_scale=float(getattr(layer, "residual_multiplier", 1.0)),
    )
    if (parts.query_norm is None) != (parts.key_norm is None):
        raise NotRecognised("only one of query and key has a norm")
    if spec.has_sinks:
        raise NotRecognised("its attention has sinks")
    known = {id(parameter) for parameter in _parameters(parts)}
    for name, parameter in layer.named_parameters():
        if id(parameter) not in known:
            raise NotRecognised(f"{name} is not part of a known layer")
    heads = spec.num_query_heads + 2 * spec.num_kv_heads
    if sum(linear.out_features for linear in parts.qkv) != heads * spec.head_dim:
        raise NotRecognised("its projections do not fit its heads")
    return parts


def pack(
    parts: LayerParts, kernels: NativeKernels, attention: AttentionLayer, *, int8: bool
) -> tuple[DecoderLayer, list[Any]]:
    """Pack a layer's weights.

    Returns:
        The structure, still without rotary table and cache, and what must live as long as it does.

    Raises:
        NotRecognised: sizes that the kernels do not take.
    """
    owned: list[Any] = [parts.query_norm, parts.key_norm]

    def linear(
        *linears: nn.Linear,
        ends_branch: bool = False,
        normed: bool = False,
        activation: Activation = Activation.IDENTITY,
    ) -> Linear:
        weight = torch.cat([each.weight.detach() for each in linears])
        biases = [each.bias for each in linears]
        if not kernels.packs(weight, activation):
            raise NotRecognised(f"the kernels do not take a {tuple(weight.shape)} weight of {weight.dtype}")
        packed = kernels.pack_linear(
            weight,
            None if biases[0] is None else torch.cat([each.detach() for each in biases]),
            int8=int8,
            activation=activation,
            output_dtype=torch.float32 if ends_branch else None,
            accumulate=ends_branch and not normed,
            scale=parts.branch_scale if ends_branch else 1.0,
        )
        owned.append(packed)
        return packed.structure

    def norm(part: Norm | None) -> int | None:
        owned.append(part)
        return None if part is None else part.weight.data_ptr()

    structure = DecoderLayer(
        attention=attention,
        hidden_size=parts.input_norm.weight.shape[0],
        norm_epsilon=parts.input_norm.epsilon,
        input_norm=norm(parts.input_norm),
        attention_output_norm=norm(parts.attention_output_norm),
        mlp_norm=norm(parts.mlp_norm),
        mlp_output_norm=norm(parts.mlp_output_norm),
        qkv=linear(*parts.qkv),
        attention_output=linear(
            parts.attention_output, ends_branch=True, normed=parts.attention_output_norm is not None
        ),
        gate_and_up=linear(*parts.gate_and_up, activation=parts.activation),
        down=linear(parts.down, ends_branch=True, normed=parts.mlp_output_norm is not None),
    )
    return structure, owned


def rotary_structure(parts: LayerParts, table: RotaryTable) -> Rotary:
    """How a layer's kernels turn query and key heads; valid while both arguments live."""
    return Rotary(
        2 * table.cosines.shape[1],
        table.interleaved,
        table.cosines.data_ptr(),
        table.sines.data_ptr(),
        None,
        None if parts.query_norm is None else parts.query_norm.weight.data_ptr(),
        None if parts.key_norm is None else parts.key_norm.weight.data_ptr(),
        parts.query_norm.epsilon if parts.query_norm else 0.0,
    )


def _child(module: nn.Module, name: str) -> nn.Module:
    child = getattr(module, name, None)
    if not isinstance(child, nn.Module):
        raise NotRecognised(f"{type(module).__name__} has no {name}")
    return child


def _norm(module: nn.Module, name: str, size: int | None = None) -> Norm:
    norm = Norm.read(_child(module, name))
    if size is not None and norm.weight.shape[0] != size:
        raise NotRecognised(f"{name} spans more than one head")
    return norm


def _linear(module: nn.Module, name: str) -> nn.Linear:
    child = _child(module, name)
    if type(child) is not nn.Linear:
        raise NotRecognised(f"{name} is a {type(child).__name__}, not a plain linear layer")
    return child


def _linears(module: nn.Module, fused: str, separate: tuple[str, ...]) -> tuple[nn.Linear, ...]:
    if hasattr(module, fused):
        return (_linear(module, fused),)
    linears = tuple(_linear(module, name) for name in separate)
    if len({linear.bias is None for linear in linears}) > 1:
        raise NotRecognised(f"only some of {', '.join(separate)} have a bias")
    return linears


def find_activation(mlp: nn.Module) -> Activation:
    """Find out what a gated MLP does to its gate, by trying it.

    Raises:
        NotRecognised: it is nothing that the kernels know.
    """
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if function is None:
        raise NotRecognised(f"{type(mlp).__name__} has no activation")
    x = torch.linspace(-8, 8, 200)
    got = function(x)
    for activation, known in (
        (Activation.SILU, functional.silu(x)),
        (Activation.GELU_TANH, functional.gelu(x, approximate="tanh")),
    ):
        if torch.allclose(got, known, atol=1e-5, rtol=1e-5):
            return activation
    raise NotRecognised(f"its activation {type(function).__name__} is not known")


def _parameters(parts: LayerParts) -> Iterator[nn.Parameter]:
    for linear in (*parts.qkv, parts.attention_output, *parts.gate_and_up, parts.down):
        yield from linear.parameters()
    for norm in (
        parts.input_norm,
        parts.attention_output_norm,
        parts.mlp_norm,
        parts.mlp_output_norm,
        parts.query_norm,
        parts.key_norm,
    ):
        if norm is not None:
            yield norm.parameter
