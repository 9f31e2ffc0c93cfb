"""The native kernels, every variant that this machine runs, and AMX in software where it has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_variants import make_kernels

from paged_engine.kernels.native import NativeKernels


@pytest.fixture(params=["tiles", "avx512", "avx2", "generic"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return make_kernels(request.param)


@pytest.fixture
def normal() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors here are tiny; tests that are about threads say how many."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
