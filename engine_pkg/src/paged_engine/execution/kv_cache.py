"""The memory of the paged KV cache: how many pages there are, and one tensor of pages per layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paged_engine.attention.interface import AttentionBackend
from paged_engine.config import EngineConfig
from paged_engine.errors import ConfigurationError
from paged_engine.execution.memory import available_cpu_memory

_log = logging.getLogger(__name__)

_GPU_FRACTION = 0.9
_CPU_FRACTION = 0.5
_MIN_TOKENS = 2
"""The shortest sequence that yields a token: one of prompt, one generated."""


@dataclass(frozen=True)
class KVCache:
    """What was allocated; the backend that reads and writes the pages holds the tensors."""

    num_pages: int
    page_size: int
    num_bytes: int
    max_seq_len: int
    """Tokens of the longest sequence that the model can do and the pool can hold."""

    @property
    def num_tokens(self) -> int:
        """Tokens that fit."""
        return self.num_pages * self.page_size

    def __str__(self) -> str:
        return f"{self.num_pages} pages of {self.page_size} tokens = {self.num_tokens} tokens, {self.num_bytes / 2**20:.1f} MiB"


def cache_dtype(config: EngineConfig, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values in the pages (kv_cache_dtype; auto is the model's)."""
    if config.kv_cache_dtype == "auto":
        return model_dtype
    dtype: torch.dtype = getattr(torch, config.kv_cache_dtype)
    return dtype


def create_kv_cache(
    config: EngineConfig,
    backend: AttentionBackend,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    max_seq_len: int,
    measure_step: Callable[[], int],
    num_spare_pages: int = 0,
) -> KVCache:
    """Size the pool, allocate it and give it to the backend.

    The memory is left as it comes: on a CPU the system hands it out piece by piece as tokens arrive. So a slot that was
    not written holds anything, NaN included, and backends must not read it.

    Args:
        config: num_pages, page_size, kv_cache_memory_fraction and max_batch_size are used.
        backend: says how large a page is, and gets the tensors.
        num_layers: attention layers of the model.
        dtype: of keys and values.
        device: where the pages lie.
        max_seq_len: tokens of the longest sequence that the model can do.
        measure_step: runs the largest step and returns the bytes of GPU memory that it takes besides weights and
            pages. Called on a GPU alone, with one page bound to every layer.
        num_spare_pages: pages to allocate besides the pool's, numbered on from these, which no sequence is given.

    Raises:
        ConfigurationError: there is no room for the requested or the smallest possible pool.
    """
    page_bytes = sum(math.prod(backend.page_shape(layer)) for layer in range(num_layers)) * dtype.itemsize
    num_pages = config.num_pages
    if num_pages == 0:
        if device.type == "cpu":
            usable = int(available_cpu_memory() * (config.kv_cache_memory_fraction or _CPU_FRACTION))
            wanted = config.max_batch_size * math.ceil(max_seq_len / config.page_size)
            num_pages = min(wanted, usable // page_bytes - num_spare_pages)
        else:
            _allocate(backend, num_layers, 1, dtype, device)
            step_bytes = measure_step()
            free_bytes, _ = torch.cuda.mem_get_info(device)
            usable = int((free_bytes - step_bytes) * (config.kv_cache_memory_fraction or _GPU_FRACTION))
            num_pages = max(0, usable // page_bytes - num_spare_pages)
    num_tokens = num_pages * config.page_size
    if num_tokens < _MIN_TOKENS:
        raise ConfigurationError(
            f"the KV cache must hold at least {_MIN_TOKENS} tokens, but there is room for {num_pages} pages of "
            f"{config.page_size} tokens ({page_bytes} bytes each): raise num_pages or kv_cache_memory_fraction, lower "
            "page_size or max_num_tokens, or give the server more memory"
        )
    try:
        _allocate(backend, num_layers, num_pages + num_spare_pages, dtype, device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigurationError(
            f"the KV cache of {num_pages} pages ({num_pages * page_bytes} bytes) does not fit on {device}: lower "
            f"num_pages or kv_cache_memory_fraction ({error})"
        ) from error
    if num_tokens < max_seq_len:
        _log.warning(
            "max_seq_len is lowered from %d to %d: the KV cache holds no more", max_seq_len, num_tokens
        )
    return KVCache(num_pages, config.page_size, num_pages * page_bytes, min(max_seq_len, num_tokens))


def _allocate(
    backend: AttentionBackend, num_layers: int, num_pages: int, dtype: torch.dtype, device: torch.device
) -> None:
    for layer in range(num_layers):
        backend.bind(layer, torch.empty(num_pages, *backend.page_shape(layer), dtype=dtype, device=device))
