"""Paged attention on the CPU by the native kernels: straight from the pages, without gathering."""

from __future__ import annotations

import torch

from paged_engine.attention.interface import AttentionSetup, BackendUnsupported
from paged_engine.execution.batch import Batch
from paged_engine.kernels.library import AttentionStep, LibraryUnavailable
from paged_engine.kernels.load import load_kernels
from paged_engine.kernels.native import NativeKernels
from paged_engine.kernels.reference import PANEL_WIDTH, SCALE_BYTES

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CpuAttention:
    """AttentionBackend on the native kernels; pages are [num_kv_heads, keys and values, page_size * head_dim], the order
    inside the last axis being the kernels' own (native/api.h). In int8, a scale for each token comes behind that.

    Any head size and page size is taken, in int8 multiples of 16; these are fast.
    """

    name = "cpu"

    def __init__(self, setup: AttentionSetup, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self.layers = [
            kernels.attention_layer(spec, setup.page_size, setup.dtype, setup.cache_dtype)
            for spec in setup.specs
        ]
        """What the kernels know of each layer."""
        self.caches: dict[int, torch.Tensor] = {}
        """By layer, the pages that are bound to it."""
        self.setup = setup
        self._planned: tuple[Batch, AttentionStep] | None = None

    @property
    def planned(self) -> tuple[Batch, AttentionStep]:
        """The batch of this step, and the same as the kernels read it."""
        if self._planned is None:
            raise RuntimeError("attention was asked for before its step was planned")
        return self._planned

    def page_shape(self, layer: int) -> tuple[int, ...]:
        """(num_kv_heads, 2, page_size, head_dim), in int8 (num_kv_heads, 2, page_size, head_dim + 4)."""
        spec = self.setup.specs[layer]
        size = spec.head_dim + (SCALE_BYTES if self.setup.cache_dtype == torch.int8 else 0)
        return spec.num_kv_heads, 2, self.setup.page_size, size

    def bind(self, layer: int, cache: torch.Tensor) -> None:
        """Keep `cache`, [num_pages, *page_shape(layer)], and ask for large memory pages under it."""
        self.kernels.library.advise_huge_pages(cache.data_ptr(), cache.nbytes)
        self.caches[layer] = cache

    def plan(self, batch: Batch) -> None:
        """Note where the step's sequences and their pages are."""
        self._planned = batch, self.kernels.attention_step(batch)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        batch, step = self.planned
        structure, cache = self.layers[layer], self.caches[layer]
        self.kernels.write_pages(structure.pages, key, value, batch.slots, cache)
        return self.kernels.attention(structure, step, query, cache, None if sinks is None else sinks.float())


def load_cpu_attention(setup: AttentionSetup) -> CpuAttention:
    """The native backend for `setup`.

    Raises:
        BackendUnsupported: not a CPU, a dtype that the kernels do not take, or no usable native library.
    """
    if setup.device.type != "cpu":
        raise BackendUnsupported(f"it computes on the CPU, the model is on {setup.device}")
    if any(spec.scale <= 0 for spec in setup.specs):
        raise BackendUnsupported("attention scales must be positive")
    if setup.dtype not in _DTYPES:
        raise BackendUnsupported(f"dtype must be float32, bfloat16 or float16, got {setup.dtype}")
    if setup.cache_dtype not in (*_DTYPES, torch.int8):
        raise BackendUnsupported(
            f"kv_cache_dtype must be float32, bfloat16, float16 or int8, got {setup.cache_dtype}"
        )
    if setup.cache_dtype == torch.int8:
        for name, size in (
            ("page_size", setup.page_size),
            *(("the head size", spec.head_dim) for spec in setup.specs),
        ):
            if size % PANEL_WIDTH:
                raise BackendUnsupported(
                    f"with kv_cache_dtype int8 it takes multiples of {PANEL_WIDTH} only, {name} is {size}"
                )
    try:
        return CpuAttention(setup, load_kernels(torch.get_num_threads()))
    except LibraryUnavailable as reason:
        raise BackendUnsupported(str(reason)) from reason
