"""What the machine and the model allow at most, measured in the run that is judged by it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from loads import Load
from safetensors import safe_open


@dataclass(frozen=True)
class Limits:
    """Bytes read and operations per second, and the weights that every step has to go through."""

    bandwidth: float
    matmul_rate: float
    num_weights: int
    weight_bytes: int

    @classmethod
    def measure(cls, checkpoint: Path, dtype: torch.dtype) -> Limits:
        """Measure the machine, and count the weights of a checkpoint folder as if they were of `dtype`, which may be int8."""
        num_weights = count_weights(checkpoint)
        return cls(copy_bandwidth(), matmul_rate(dtype), num_weights, num_weights * dtype.itemsize)

    def seconds(self, load: Load) -> float:
        """The least time a load can take: each step reads the weights once, each token multiplies them once."""
        per_token = 2 * self.num_weights / self.matmul_rate
        prefill = load.num_requests * load.num_prompt_tokens * per_token
        step = max(self.weight_bytes / self.bandwidth, load.num_requests * per_token)
        return prefill + load.num_output_tokens * step

    def __str__(self) -> str:
        return (
            f"{self.num_weights / 1e6:.0f} M weights, {self.bandwidth / 1e9:.0f} GB/s, "
            f"{self.matmul_rate / 1e12:.2f} TOP/s"
        )


def copy_bandwidth() -> float:
    """Bytes read per second while summing 256 MiB, which no cache holds; the best of five."""
    block = torch.ones(64 << 20)
    return block.nbytes / min(_seconds(block.sum) for _ in range(5))


def matmul_rate(dtype: torch.dtype) -> float:
    """Operations per second of a 1024 x 2048 x 2048 matmul; the best of five."""
    left, right = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    multiply = torch._int_mm if dtype == torch.int8 else torch.matmul
    return 2 * 1024 * 2048 * 2048 / min(_seconds(lambda: multiply(left, right)) for _ in range(5))


def count_weights(checkpoint: Path) -> int:
    """Numbers in a checkpoint folder; the loaded model's own modules are empty once the kernels have packed them."""
    count = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
