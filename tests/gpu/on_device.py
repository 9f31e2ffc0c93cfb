"""Lets a backend on a GPU take part in the common attention suite, whose tensors and pages lie on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged_engine.attention.flashinfer import FlashInferAttention, why_unsupported
from paged_engine.attention.interface import AttentionBackend, AttentionSetup
from paged_engine.execution.batch import Batch


class OnDevice:
    """Carries a step's tensors to the device and its results back, the pages included."""

    def __init__(self, backend: AttentionBackend, device: torch.device) -> None:
        self.name = backend.name
        self._backend = backend
        self._device = device
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def page_shape(self, layer: int) -> tuple[int, ...]:
        return self._backend.page_shape(layer)

    def bind(self, layer: int, cache: torch.Tensor) -> None:
        self._caches[layer] = cache, cache.to(self._device)
        self._backend.bind(layer, self._caches[layer][1])

    def plan(self, batch: Batch) -> None:
        on_device = {
            name: getattr(batch, name).to(self._device) for name in ("token_ids", "positions", "slots")
        }
        with torch.cuda.device(self._device):
            self._backend.plan(replace(batch, **on_device))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = (tensor.to(self._device) for tensor in (query, key, value))
        sinks = None if sinks is None else sinks.to(self._device)
        with torch.cuda.device(self._device):
            output = self._backend.attend(layer, query, key, value, sinks)
        shown, real = self._caches[layer]
        shown.copy_(real)
        return output.cpu()


def flashinfer_on(device: torch.device, setup: AttentionSetup) -> OnDevice:
    """The FlashInfer backend for one case of the suite; not tried out before, since the suite is what tries it."""
    import flashinfer

    setup = replace(setup, device=device)
    if reason := why_unsupported(setup):
        pytest.skip(f"FlashInfer does not take this on this GPU: {reason}")
    with torch.cuda.device(device):
        return OnDevice(FlashInferAttention(setup, flashinfer), device)
