"""Puts paged attention in the place of a transformers model's own attention.

transformers lets every decoder look its attention function up by name (its AttentionInterface). One function stands
under our name there; it hands each call to the small object that hangs on the calling attention module as
`paged_attention`. The model is called flat: all tokens of a step in one row, without Cache object and without mask,
because where a token's neighbours are is the attention backend's business alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from paged_engine.attention.interface import AttentionBackend, AttentionSpec

ATTENTION_NAME = "paged_engine"
"""Our name in the AttentionInterface. The mask registry must not know it: that keeps models from building masks."""
PROBE_NAME = "paged_engine_probe"
"""The same function under a name for which masks are described, so that the load can check them (probe.py)."""

NO_ATTENTION_INTERFACE = "it does not take its attention from transformers' AttentionInterface"
"""Why a model is refused whose attention cannot be exchanged, wherever that shows."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a loaded model, in the order in which the model runs them."""

    module: nn.Module
    spec: AttentionSpec


class PagedAttention:
    """One layer's attention over the paged cache."""

    def __init__(self, backend: AttentionBackend, layer: int, spec: AttentionSpec) -> None:
        self._backend = backend
        self._layer = layer
        self._head_dim = spec.head_dim
        self._has_sinks = spec.has_sinks

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """Attend over the sequences of the planned batch.

        Args:
            module: the calling attention module.
            query: [1, num_query_heads, num_tokens, query_dim].
            key: [1, num_kv_heads, num_tokens, query_dim].
            value: [1, num_kv_heads, num_tokens, value_dim]; where the two dims differ (multi-head latent attention),
                the shorter one is padded with zeros to the spec's head_dim, which changes no score and no output.
            attention_mask: always None, checked at load.
            arguments: what else the model passes; all but the sinks are constants that are in the layer's spec.

        Returns:
            [1, num_tokens, num_query_heads, value_dim], contiguous.
        """
        value_dim = value.shape[-1]
        query, key, value = (
            functional.pad(heads, (0, self._head_dim - heads.shape[-1]))
            if heads.shape[-1] < self._head_dim
            else heads
            for heads in (query, key, value)
        )
        output = self._backend.attend(
            self._layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            arguments["s_aux"] if self._has_sinks else None,
        )
        return output[None, ..., :value_dim].contiguous()


def attach(layers: Sequence[AttentionLayer], backend: AttentionBackend) -> None:
    """Hang `backend` on every attention module, under the index that it knows the layer by."""
    for index, layer in enumerate(layers):
        layer.module.paged_attention = PagedAttention(backend, index, layer.spec)  # type: ignore[assignment]


def register() -> None:
    """Make our names known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _call_paged_attention)
    AttentionInterface.register(PROBE_NAME, _call_paged_attention)
    AttentionMaskInterface.register(PROBE_NAME, _describe_mask)


def forward_flat(
    model: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    """Run `model` over the tokens of many sequences laid end to end.

    Args:
        model: a causal language model whose attention is ours.
        token_ids: int64 [num_tokens].
        positions: int64 [num_tokens], of each token in its sequence; None leaves the numbering to the model.
        rows: int64 [num_rows]: the tokens whose logits are wanted, in any order.

    Returns:
        [num_rows, vocab_size] in the model's dtype.
    """
    output = model(
        input_ids=token_ids[None],
        position_ids=None if positions is None else positions[None],
        use_cache=False,
        return_dict=True,
        logits_to_keep=rows,
    )
    logits: torch.Tensor = output.logits[0]
    return logits if _selects_rows(type(model).forward) else logits[rows]


@lru_cache
def _selects_rows(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward knows logits_to_keep; a few of transformers' do not and compute the logits of all rows."""
    return "logits_to_keep" in inspect.signature(forward).parameters


def _call_paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The function in the AttentionInterface; the second result would be the attention weights."""
    attention: Callable[..., torch.Tensor] = module.paged_attention  # type: ignore[assignment]
    return attention(module, query, key, value, attention_mask, arguments), None


def _describe_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], device: torch.device, **_: Any
) -> torch.Tensor:
    """Build the mask of the probe's few rows, and let it carry the rule that it was built by.

    Returns:
        bool [1, 1, q_length, kv_length], True where a query sees a key, with the attribute `mask_function`.
    """
    zero = torch.zeros((), dtype=torch.int64, device=device)
    queries = torch.arange(q_length, device=device)
    keys = torch.arange(kv_length, device=device)
    mask = mask_function(zero, zero, queries[:, None], keys[None, :])[None, None]
    mask.mask_function = mask_function  # type: ignore[attr-defined]
    return mask
