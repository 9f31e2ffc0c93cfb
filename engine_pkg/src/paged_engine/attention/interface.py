"""The attention contract: what a backend is told about a layer, and the two calls it answers.

The shape follows FlashInfer's plan/run pair: everything that is the same for all layers of a step is prepared once in
`plan`, and `attend` is called once per layer. A backend also says how it lays a page out in memory, so that the cache
can be allocated for it; pages are plain numbers to everyone else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from paged_engine.execution.batch import Batch


@dataclass(frozen=True)
class AttentionSpec:
    """What attention computes in one layer: softmax(cap(scale · q kᵀ) + causal/window mask, with sinks) v."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    """A query at position p sees keys at positions > p - sliding_window (its own included); None sees all."""
    soft_cap: float | None = None
    """Scores become soft_cap · tanh(score / soft_cap); None leaves them."""
    has_sinks: bool = False
    """Whether `attend` gets one extra logit per query head that takes part in the softmax without a value."""


@dataclass(frozen=True)
class AttentionSetup:
    """What a backend is made for: one model on one device."""

    specs: tuple[AttentionSpec, ...]
    """One per layer, in the order in which the model runs them."""
    page_size: int
    device: torch.device
    dtype: torch.dtype
    """Of queries, keys, values and outputs: the model's."""
    cache_dtype: torch.dtype
    """Of what lies in the pages."""


class BackendUnsupported(Exception):
    """A backend cannot serve a setup; the message completes "the attention backend X cannot be used: "."""


class AttentionBackend(Protocol):
    """Paged attention over one step's flat batch. Made for one model: it knows every layer's spec from the start."""

    name: str

    def page_shape(self, layer: int) -> tuple[int, ...]:
        """Shape of one page of this layer's cache, keys and values together, without the leading page axis."""

    def bind(self, layer: int, cache: torch.Tensor) -> None:
        """Give the backend its memory: `cache` is [num_pages, *page_shape(layer)] in the cache's dtype."""

    def plan(self, batch: Batch) -> None:
        """Prepare a step; called once before the layers run."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values into their pages, then attend.

        Args:
            layer: index of the layer.
            query: [num_tokens, num_query_heads, head_dim], rotary embedding applied.
            key, value: [num_tokens, num_kv_heads, head_dim].
            sinks: [num_query_heads] logits where the layer's spec has sinks.

        Returns:
            [num_tokens, num_query_heads, head_dim] in query's dtype.
        """
