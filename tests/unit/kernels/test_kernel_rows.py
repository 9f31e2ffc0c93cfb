"""Norms, gates and reductions against their torch twins."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import DTYPES

from paged_engine.kernels import reference
from paged_engine.kernels.library import Activation
from paged_engine.kernels.native import NativeKernels

SIZES = [1, 15, 16, 17, 576, 5000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wide_residual", [False, True], ids=["", "float32 residual"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(
    kernels: NativeKernels, normal: torch.Generator, dtype: torch.dtype, wide_residual: bool, size: int
) -> None:
    for num_rows in (1, 9):
        x, residual = (3 * torch.randn(num_rows, size, generator=normal) for _ in range(2))
        x, residual = x.to(dtype), residual if wide_residual else residual.to(dtype)
        weight = torch.randn(size, generator=normal)
        for added in (x, None):
            expected_sums, expected = reference.rms_norm(added, residual, weight, 1e-5, dtype)
            sums, out = residual.clone(), torch.empty_like(x)
            kernels.rms_norm(added, sums, weight, 1e-5, out)
            assert torch.equal(sums, expected_sums)
            torch.testing.assert_close(out, expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(kernels: NativeKernels, normal: torch.Generator, dtype: torch.dtype, size: int) -> None:
    x = (4 * torch.randn(7, 2 * size, generator=normal)).to(dtype)
    x[0, :size] = torch.tensor([-200.0, 200.0, 0.0, -1e-4]).repeat(size)[:size]
    for activation, name in ((Activation.SILU, "silu"), (Activation.GELU_TANH, "gelu_tanh")):
        out = torch.empty(7, size, dtype=dtype)
        kernels.gate(x, activation, out)
        torch.testing.assert_close(
            out, reference.gate(x, name), rtol=max(1e-5, torch.finfo(dtype).eps), atol=2e-6
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_argmax(kernels: NativeKernels, normal: torch.Generator, dtype: torch.dtype) -> None:
    for size in (*SIZES, 49152):
        x = torch.randn(5, size, generator=normal).to(dtype)
        x[1] = x[1].round()  # many equal elements: the first of them
        x[2] = 0
        x[3] = -math.inf
        assert torch.equal(kernels.argmax(x), reference.argmax(x))
        assert torch.equal(reference.argmax(x), x.float().argmax(-1))
        x[4, size // 2] = math.inf
        x[0, size // 3] = math.nan
        assert torch.equal(kernels.argmax(x), reference.argmax(x))
        assert kernels.argmax(x).tolist()[0] == size // 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sum_exp(kernels: NativeKernels, normal: torch.Generator, dtype: torch.dtype) -> None:
    for size in (*SIZES, 49152):
        x = (10 * torch.randn(6, size, generator=normal)).to(dtype)
        x[1] = -math.inf
        x[2] += 300
        x[3, size // 2 :] = -math.inf
        torch.testing.assert_close(kernels.log_sum_exp(x), reference.log_sum_exp(x), rtol=2e-6, atol=2e-5)
