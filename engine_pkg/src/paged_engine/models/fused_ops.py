"""What transformers' modules compute between their matrix multiplications, in FlashInfer's fused operations.

Out of the box a decoder layer is some thirty small kernels beside its matrix multiplications, each of which reads and
writes all activations: on a GPU, when few tokens are decoded, they take as long as the weights do. The classes here stand
for the `forward` of single modules; fuse.py decides which. FlashInfer's functions are called with arguments that mean the
same in flashinfer-python 0.6 and 0.7; the module itself is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class FusedNorm:
    """RMSNorm over the last axis: x / rms(x) · weight, or · (1 + weight) as Gemma's models have it."""

    def __init__(self, library: Any, weight: torch.Tensor, epsilon: float, *, one_is_added: bool) -> None:
        self._norm = library.gemma_rmsnorm if one_is_added else library.rmsnorm
        self._add_norm = library.gemma_fused_add_rmsnorm if one_is_added else library.fused_add_rmsnorm
        self._weight = weight
        self._epsilon = epsilon
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None
        """A sum, and its norm."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., size] in any shape; rows of heads that are cut out of wider rows are read in place, as [rows, heads, size]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is hidden_states:
            return ahead[1]
        shape = hidden_states.shape
        rows = hidden_states if hidden_states.dim() == 3 and not hidden_states.is_contiguous() else None
        if rows is None:
            rows = hidden_states.reshape(-1, shape[-1])
        normed: torch.Tensor = self._norm(rows, self._weight, self._epsilon)
        return normed.view(shape)

    def add(self, addend: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `addend` to `residual`, in its place, and return the norm of the sum, in the place of `addend`.

        Both are [..., size], contiguous.
        """
        size = residual.shape[-1]
        self._add_norm(addend.view(-1, size), residual.view(-1, size), self._weight, self._epsilon)
        return addend

    def add_ahead(self, addend: torch.Tensor, residual: torch.Tensor) -> None:
        """The same for whoever asks for the norm of this very `residual` next."""
        self._ahead = residual, self.add(addend, residual)


class MergedLinear:
    """Linear layers that have the same input, as one matrix multiplication.

    It owns their weights one below the other; the layers keep views of them, so that nothing is held twice.
    """

    def __init__(self, layers: Sequence[nn.Linear], sizes: Sequence[int] | None = None) -> None:
        """`sizes` are the features of each part, where one layer makes several of them."""
        self.sizes = list(sizes or (layer.out_features for layer in layers))
        self._weight = _merge([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = _merge(biases) if biases else None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., sum of out_features]."""
        return functional.linear(hidden_states, self._weight, self._bias)


class FusedMLP:
    """down(activation(gate x) · up x), gate and up in one multiplication, activation and product in one kernel."""

    def __init__(self, activation_and_product: Any, gate_up: MergedLinear, down: nn.Module) -> None:
        self._activation_and_product = activation_and_product
        self._gate_up = gate_up
        self._down = down

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., hidden_size]."""
        output: torch.Tensor = self._down(self._activation_and_product(self._gate_up(hidden_states)))
        return output


class RotaryAngles:
    """A step's rotary angles as the kernel reads them; made once for all layers that are given the same ones."""

    def __init__(self) -> None:
        self._cosines: torch.Tensor | None = None
        self._packed = (torch.empty(0), torch.empty(0))

    def pack(
        self, cosines: torch.Tensor, sines: torch.Tensor, once: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            cosines, sines: [1, num_tokens, num_angles], or more of them where each stands twice.
            once: selects each angle once.

        Returns:
            float32 [num_tokens, 2 · num_angles], cosines before sines; and the row of each token in it, int32 [num_tokens].
        """
        if cosines is not self._cosines:
            table = torch.cat((cosines[0, :, once], sines[0, :, once]), dim=-1).float()
            rows = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
            self._cosines, self._packed = cosines, (table, rows)
        return self._packed


class FusedAttention:
    """An attention module: projections in one multiplication, norms of heads, rotary embedding in place, our attention."""

    def __init__(
        self,
        library: Any,
        module: nn.Module,
        projections: MergedLinear,
        output: nn.Module,
        angles: RotaryAngles,
        *,
        head_dim: int,
        norms: tuple[FusedNorm, FusedNorm] | None,
        once: slice,
        pairs_are_halves: bool,
    ) -> None:
        """
        Args:
            library: the module flashinfer, or what behaves like it.
            module: whose `forward` this is; its `paged_attention` is called.
            projections: to queries, keys and values.
            output: the projection of what attention gives.
            angles: shared by all attention modules of the model.
            head_dim: of queries, keys and values.
            norms: of each head of queries and keys before they are rotated.
            once: see RotaryAngles.pack.
            pairs_are_halves: whether dimension i of a head is rotated with i + rotary_dim / 2, else with i + 1.
        """
        self._rotate = library.apply_rope_with_cos_sin_cache_inplace
        self._module = module
        self._projections = projections
        self._output = output
        self._angles = angles
        self._head_dim = head_dim
        self._norms = norms
        self._once = once
        self._pairs_are_halves = pairs_are_halves

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, num_tokens, hidden_size] -> the same; no attention weights."""
        projected = self._projections(hidden_states[0])
        query, key, value = (
            part.unflatten(-1, (-1, self._head_dim))
            for part in projected.split(self._projections.sizes, dim=-1)
        )
        if self._norms is not None:
            query, key = (norm(heads) for norm, heads in zip(self._norms, (query, key), strict=True))
        table, rows = self._angles.pack(*position_embeddings, self._once)
        # view, not flatten: a copy would be rotated in vain
        query_rows, key_rows = (heads.view(heads.shape[0], -1) for heads in (query, key))
        self._rotate(rows, query_rows, key_rows, self._head_dim, table, self._pairs_are_halves)
        attended = self._module.paged_attention(  # type: ignore[operator]
            self._module,
            *(heads.transpose(0, 1)[None] for heads in (query, key, value)),
            attention_mask,
            {"s_aux": getattr(self._module, "sinks", None)},
        )
        return self._output(attended.flatten(2)), None


class FusedLayer:
    """A pre-norm decoder layer, whose residual sums and the norms behind them are one kernel each.

    The sums are put where the layer's input was: nobody else may hold on to that.
    """

    def __init__(self, layer: nn.Module, norm: FusedNorm) -> None:
        """`norm` is the layer's post_attention_layernorm."""
        self._layer = layer
        self._norm = norm
        self.next_norm: FusedNorm | None = None
        """What the model calls with the layer's output, where that is known: the next layer's first norm, or its last one."""

    def __call__(
        self, hidden_states: torch.Tensor, attention_mask: None = None, **keywords: Any
    ) -> torch.Tensor:
        """[1, num_tokens, hidden_size] -> the same."""
        layer: Any = self._layer
        attended, _ = layer.self_attn(
            hidden_states=layer.input_layernorm(hidden_states), attention_mask=attention_mask, **keywords
        )
        transformed = layer.mlp(self._norm.add(attended, hidden_states))
        if isinstance(transformed, tuple):  # experts give what their router thought as well
            transformed = transformed[0]
        if self.next_norm is None:
            return hidden_states + transformed
        self.next_norm.add_ahead(transformed, hidden_states)
        return hidden_states


def _merge(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows; each parameter becomes a view of its part."""
    if len(parameters) == 1:
        return parameters[0]
    merged = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, merged.split([len(each) for each in parameters]), strict=True):
        parameter.data = part
    return merged
