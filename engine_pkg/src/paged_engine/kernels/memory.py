"""Memory in large pages for what is read in every step.

Reading packed weights is limited by address translation as much as by memory: with large pages (2 MiB instead of 4 KiB)
a core read them half again as fast where this was measured. The system gives large pages only to memory that asks for
them before it is first used, and only in whole large pages, so that small tensors must lie together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_LARGE_PAGE = 2 << 20
_ALIGNMENT = 4096


class HugePageArena:
    """Cuts tensors out of large blocks. A block is freed when the last of its tensors is."""

    def __init__(self, advise: Callable[[int, int], object], block_bytes: int = 64 << 20) -> None:
        """`advise(address, bytes)` asks the system for large pages."""
        self._advise = advise
        self._block_bytes = block_bytes
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor [num_elements], uninitialized, aligned to a memory page."""
        num_bytes = num_elements * dtype.itemsize
        if self._used + num_bytes > self._block.numel():
            self._block = self._new_block(max(num_bytes, self._block_bytes))
            self._used = 0
        piece = self._block[self._used : self._used + num_bytes]
        self._used = math.ceil((self._used + num_bytes) / _ALIGNMENT) * _ALIGNMENT
        return piece.view(dtype)

    def _new_block(self, num_bytes: int) -> torch.Tensor:
        num_bytes = math.ceil(num_bytes / _LARGE_PAGE) * _LARGE_PAGE
        raw = torch.empty(num_bytes + _LARGE_PAGE, dtype=torch.uint8)
        block = raw[-raw.data_ptr() % _LARGE_PAGE :][:num_bytes]
        self._advise(block.data_ptr(), num_bytes)
        return block
