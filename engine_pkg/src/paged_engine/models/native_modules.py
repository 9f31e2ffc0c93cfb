"""Single modules on the native kernels, for models that do not run in them as a whole.

Each is made from the module that it stands in for, packs its weights, and is called the way that one is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from paged_engine.kernels.library import Activation
from paged_engine.kernels.native import NativeKernels, PackedLinear
from paged_engine.models.decoder_layer import Norm, NotRecognised, find_activation


class NativeLinear(nn.Module):
    """x Wᵀ + bias with packed weights."""

    def __init__(self, module: nn.Linear | Conv1D, kernels: NativeKernels, *, int8: bool = False) -> None:
        """
        Raises:
            NotRecognised: the module has more than a weight and a bias, or a weight that the kernels do not take.
        """
        super().__init__()
        _check_parameters(module, {"weight", "bias"})
        weight, bias = module.weight.detach(), module.bias
        self.dtype = weight.dtype
        self._kernels = kernels
        self._packed = _pack(
            kernels,
            weight.T if isinstance(module, Conv1D) else weight,
            None if bias is None else bias.detach(),
            int8=int8,
        )
        self.in_features = self._packed.in_features
        self.out_features = self._packed.out_features
        self.weight = weight.to("meta")
        """Without memory: models ask for its dtype before they call a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., out_features] of x [..., in_features], in the weight's dtype."""
        rows = x.to(self.dtype).reshape(-1, self.in_features).contiguous()
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        self._kernels.linear(rows, self._packed, out.view(-1, self.out_features))
        return out


class NativeRMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis."""

    def __init__(self, module: nn.Module, kernels: NativeKernels) -> None:
        """
        Raises:
            NotRecognised: the module is no RMS norm.
        """
        super().__init__()
        norm = Norm.read(module)
        _check_parameters(module, {"weight"})
        self.dtype = norm.parameter.dtype
        self._kernels = kernels
        self._weight = norm.weight
        self._epsilon = norm.epsilon
        self.size = norm.weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] of x [..., size], in the weight's dtype."""
        rows = x.to(self.dtype).reshape(-1, self.size).contiguous()
        out = rows.new_empty(x.shape)
        self._kernels.rms_norm(None, rows, self._weight, self._epsilon, out.view(rows.shape))
        return out


class NativeExperts(nn.Module):
    """The experts of a mixture: the rows of each expert run together through its packed projections.

    transformers keeps a block's experts in one weight per projection, [num_experts, out_features, in_features] or its
    transpose, and describes the layout in attributes of the module.
    """

    def __init__(self, module: nn.Module, kernels: NativeKernels, *, int8: bool = False) -> None:
        """
        Raises:
            NotRecognised: the module is laid out in another way, or has weights that the kernels do not take.
        """
        super().__init__()
        if not hasattr(module, "is_transposed") or not getattr(module, "has_gate", False):
            raise NotRecognised(f"{type(module).__name__} does not hold gated experts in the usual layout")
        biases = {"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set()
        _check_parameters(module, {"gate_up_proj", "down_proj", *biases})
        self.dtype: torch.dtype = module.down_proj.dtype  # type: ignore[assignment]
        self._kernels = kernels
        self._activation, self._gate = _read_gate(module, kernels)
        self._gate_and_up, self._down = (
            _pack_experts(module, name, kernels, int8=int8, activation=activation, output_dtype=output_dtype)
            for name, activation, output_dtype in (
                ("gate_up_proj", self._activation, None),
                ("down_proj", Activation.IDENTITY, torch.float32),
            )
        )
        self.num_experts = len(self._down)
        self.in_features = self._gate_and_up[0].in_features

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: [num_tokens, hidden_size].
            top_k_index: int64 [num_tokens, top_k]; a number that is no expert's adds nothing.
            top_k_weights: [num_tokens, top_k].

        Returns:
            [num_tokens, hidden_size] in the weights' dtype.
        """
        num_tokens, top_k = top_k_index.shape
        experts, order = top_k_index.flatten().sort(stable=True)
        ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0)[: self.num_experts].tolist()
        rows = hidden_states.to(self.dtype)[order // top_k]
        gated = self._run(self._gate_and_up, rows, ends)
        if self._gate is not None:
            gated = self._gate(gated).contiguous()
        out = self._run(self._down, gated, ends)
        out[ends[-1] :] = 0
        out *= top_k_weights.flatten()[order, None]
        by_token = torch.empty_like(out)
        by_token[order] = out
        return by_token.view(num_tokens, top_k, -1).sum(1).to(self.dtype)

    def _run(self, experts: Sequence[PackedLinear], rows: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """One projection of rows that are sorted by expert; those of expert i end before ends[i]."""
        dtype = torch.float32 if experts is self._down else self.dtype
        out = rows.new_empty(rows.shape[0], experts[0].out_features, dtype=dtype)
        start = 0
        for expert, end in zip(experts, ends, strict=True):
            if end > start:
                self._kernels.linear(rows[start:end], expert, out[start:end])
            start = end
        return out


NativeModule = NativeLinear | NativeRMSNorm | NativeExperts


def _check_parameters(module: nn.Module, known: set[str]) -> None:
    """A module with anything else inside, or with code hung onto it, computes more than its weights say."""
    name = type(module).__name__
    if left := {each for each, _ in module.named_parameters()} - known:
        raise NotRecognised(f"{name} has a parameter {min(left)}")
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise NotRecognised("it has hooks")


def _pack(
    kernels: NativeKernels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    int8: bool,
    activation: Activation = Activation.IDENTITY,
    output_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """Pack a weight [out_features, in_features]; float32 weights stay what they are with int8, too.

    Raises:
        NotRecognised: the kernels do not take it.
    """
    if not kernels.packs(weight, activation):
        dtype = str(weight.dtype).removeprefix("torch.")
        raise NotRecognised(f"the kernels take no {dtype} weight of {weight.shape[0]} x {weight.shape[1]}")
    return kernels.pack_linear(
        weight.contiguous(),
        bias,
        int8=int8 and weight.dtype == torch.bfloat16,
        activation=activation,
        output_dtype=output_dtype,
    )


def _pack_experts(
    module: nn.Module,
    name: str,
    kernels: NativeKernels,
    *,
    int8: bool,
    activation: Activation,
    output_dtype: torch.dtype | None,
) -> list[PackedLinear]:
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
    return [
        _pack(
            kernels,
            weight.T if module.is_transposed else weight,
            bias,
            int8=int8,
            activation=activation,
            output_dtype=output_dtype,
        )
        for weight, bias in zip(weights, biases, strict=True)
    ]


def _read_gate(
    module: nn.Module, kernels: NativeKernels
) -> tuple[Activation, Callable[[torch.Tensor], torch.Tensor] | None]:
    """How gate and up become one: an activation of the kernels, or else (IDENTITY and) the module's own function."""
    own: Callable[[torch.Tensor], torch.Tensor] = module._apply_gate  # type: ignore[assignment]
    # activation(gate) · up is what transformers gives to classes without a function of their own.
    if own.__module__.startswith("transformers.integrations.") and module.is_concatenated:
        try:
            activation = find_activation(module)
        except NotRecognised:
            return Activation.IDENTITY, own
        weight: torch.Tensor = module.gate_up_proj[0]  # type: ignore[index]
        if kernels.packs(weight.T if module.is_transposed else weight, activation):
            return activation, None
    return Activation.IDENTITY, own
