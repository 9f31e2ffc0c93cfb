"""Small arrays on their way between host and device, without the host waiting for what the device computes.

A copy from ordinary memory, or into it, waits until the device has done all that was launched before. One between the device
and page-locked memory takes its turn on the device's stream instead. Torch's own cache of page-locked memory hands a piece out
again only when the copies that use it are done, so each transfer simply takes a new piece.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 8
"""Bytes: those of the largest element."""


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """Arrays as tensors of the same shapes and dtypes on `device`, all in one copy.

    On a CPU they share the arrays' memory.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    ends = np.cumsum([-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]).tolist()
    staging = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, piece in zip(tensors, _pieces(staging, tensors, ends), strict=True):
        piece.copy_(tensor)
    return _pieces(staging.to(device, non_blocking=True), tensors, ends)


def _pieces(memory: torch.Tensor, tensors: list[torch.Tensor], ends: list[int]) -> list[torch.Tensor]:
    """Views of `memory`, uint8, as tensors like the given ones; each begins where the one before it ends."""
    return [
        memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip([0, *ends], tensors, strict=False)
    ]


class HostCopies:
    """Copies of tensors in host memory: asked for at once, there after `wait`."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        device = tensors[0].device
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(self) -> list[torch.Tensor]:
        """Wait for the device to have come so far, and return the copies in order (on a CPU, the tensors themselves).

        Raises:
            RuntimeError: CUDA's own, for whatever has failed on the device up to here.
        """
        if self._done is not None:
            self._done.synchronize()
        return self._copies
