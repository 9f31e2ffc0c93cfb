"""Linear layers with packed weights against their torch twin."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paged_engine.kernels import reference
from paged_engine.kernels.library import Activation
from paged_engine.kernels.native import NativeKernels

KINDS = [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["float32", "bfloat16", "int8"])


def weights(normal: torch.Generator, out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(out_features, in_features, generator=normal) / in_features**0.5).to(dtype)


def twin(
    kernels: NativeKernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, int8: bool
) -> torch.Tensor:
    if not int8:
        return reference.linear(x, weight, bias, torch.float32)
    quantizes = kernels.quantizes_activations
    return reference.int8_linear(x, weight, bias, torch.float32, quantizes_activations=quantizes)


@kinds
@pytest.mark.parametrize("shape", [(16, 32), (100, 64), (200, 576), (72, 96), (33, 1536)], ids=str)
def test_any_number_of_rows(
    kernels: NativeKernels, normal: torch.Generator, shape: tuple[int, int], kind: tuple[torch.dtype, bool]
) -> None:
    dtype, int8 = kind
    weight, bias = weights(normal, *shape, dtype), torch.randn(shape[0], generator=normal)
    packed = kernels.pack_linear(weight, bias, int8=int8, output_dtype=torch.float32)
    for num_rows in (1, 2, 3, 6, 7, 8, 12, 13, 16, 17, 31, 33, 48, 65, 100, 200):
        x = torch.randn(num_rows, shape[1] + 32, generator=normal).to(dtype)[:, 32:]
        out = torch.full((num_rows, shape[0] + 3), 7.0)
        kernels.linear(x, packed, out[:, : shape[0]])
        torch.testing.assert_close(
            out[:, : shape[0]], twin(kernels, x, weight, bias, int8), rtol=1e-5, atol=1e-5
        )
        assert (out[:, shape[0] :] == 7).all()


@kinds
def test_a_row_does_not_depend_on_the_others(
    kernels: NativeKernels, normal: torch.Generator, kind: tuple[torch.dtype, bool]
) -> None:
    dtype, int8 = kind
    packed = kernels.pack_linear(weights(normal, 80, 320, dtype), int8=int8)
    x = torch.randn(150, 320, generator=normal).to(dtype)
    together = torch.empty(150, 80, dtype=dtype)
    kernels.linear(x, packed, together)
    for start, end in ((0, 1), (5, 9), (10, 17), (20, 33), (40, 80), (20, 140)):
        for num_threads in (1, 3):
            kernels.num_threads = num_threads
            apart = torch.empty(end - start, 80, dtype=dtype)
            kernels.linear(x[start:end], packed, apart)
            assert torch.equal(apart, together[start:end])


@kinds
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
def test_gate_and_up_in_one(
    kernels: NativeKernels, normal: torch.Generator, activation: Activation, kind: tuple[torch.dtype, bool]
) -> None:
    dtype, int8 = kind
    weight, bias = weights(normal, 2 * 80, 64, dtype), torch.randn(160, generator=normal)
    packed = kernels.pack_linear(weight, bias, int8=int8, activation=activation, output_dtype=torch.float32)
    assert (packed.in_features, packed.out_features) == (64, 80)
    for num_rows in (1, 5, 40):
        x = torch.randn(num_rows, 64, generator=normal).to(dtype)
        out = torch.empty(num_rows, 80)
        kernels.linear(x, packed, out)
        name = "silu" if activation == Activation.SILU else "gelu_tanh"
        expected = reference.gate(twin(kernels, x, weight, bias, int8), name)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@kinds
def test_accumulates(kernels: NativeKernels, normal: torch.Generator, kind: tuple[torch.dtype, bool]) -> None:
    dtype, int8 = kind
    weight = weights(normal, 48, 64, dtype)
    packed = kernels.pack_linear(weight, int8=int8, output_dtype=torch.float32, accumulate=True)
    x, start = torch.randn(9, 64, generator=normal).to(dtype), torch.randn(9, 48, generator=normal)
    out = start.clone()
    kernels.linear(x, packed, out)
    torch.testing.assert_close(out, start + twin(kernels, x, weight, None, int8), rtol=1e-5, atol=1e-5)


def test_output_is_rounded_once(kernels: NativeKernels, normal: torch.Generator) -> None:
    weight, x = weights(normal, 64, 256, torch.bfloat16), torch.randn(10, 256, generator=normal).bfloat16()
    narrow, wide = torch.empty(10, 64, dtype=torch.bfloat16), torch.empty(10, 64)
    kernels.linear(x, kernels.pack_linear(weight), narrow)
    kernels.linear(x, kernels.pack_linear(weight, output_dtype=torch.float32), wide)
    assert torch.equal(narrow, wide.bfloat16())


def test_int8_loses_little(kernels: NativeKernels, normal: torch.Generator) -> None:
    weight, x = weights(normal, 128, 512, torch.bfloat16), torch.randn(20, 512, generator=normal)
    x[10:, ::64] *= 100  # a single large value in each group, which must not cost the others their precision
    x = x.bfloat16()
    out = torch.empty(20, 128)
    kernels.linear(x, kernels.pack_linear(weight, int8=True, output_dtype=torch.float32), out)
    exact = F.linear(x.float(), weight.float())
    assert (out - exact).norm() / exact.norm() < 0.01
    assert ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.015


def test_the_transform_is_an_orthogonal_one_of_signs() -> None:
    rows = reference.hadamard(torch.eye(128))
    assert torch.equal(rows[:64, 0].abs(), torch.full((64, 64), 0.125)) and not rows[:64, 1].any()
    assert torch.equal(rows[64:, 1], rows[:64, 0]) and not rows[64:, 0].any()
    assert torch.equal(reference.hadamard(rows.flatten(-2)).flatten(-2), torch.eye(128))


def sign_rows(size: int) -> torch.Tensor:
    """bfloat16 [size, size] of 1, -1 and 0; row i is transformed to 8 at i and zeros, which int8 represents without loss."""
    return (8 * reference.hadamard(torch.eye(size)).flatten(-2)).bfloat16()


def read_back(kernels: NativeKernels, weight: torch.Tensor) -> torch.Tensor:
    """What the kernels keep of a transformed weight in int8."""
    out = torch.empty(weight.shape[1], weight.shape[0])
    packed = kernels.pack_linear(weight, int8=True, output_dtype=torch.float32)
    kernels.linear(sign_rows(weight.shape[1]), packed, out)
    return out.T / 8


@pytest.mark.parametrize("shape", [(5, 64), (40, 128), (100, 576)], ids=str)
def test_weights_are_quantized_like_the_twin_s(
    kernels: NativeKernels, normal: torch.Generator, shape: tuple[int, int]
) -> None:
    weight = weights(normal, *shape, torch.bfloat16) * torch.logspace(-6, 3, shape[0])[:, None].bfloat16()
    weight[-1] = 0  # no scale of its own
    weight[0, :-1] = 0
    expected = reference.dequantize_int8(*reference.quantize_int8(weight, torch.bfloat16))
    if not kernels.quantizes_activations:
        expected = expected.bfloat16().float()
    torch.testing.assert_close(read_back(kernels, weight), expected, rtol=3e-7, atol=0)


def test_every_int8_code_survives(kernels: NativeKernels) -> None:
    """Weights that are transformed to a group of 127, a code from -127 to 127, and zeros, read back."""
    codes = torch.zeros(255, 64)
    codes[torch.arange(255), 1 + torch.arange(255) % 63] = torch.arange(-127.0, 128)
    codes[:, 0] = 127  # the scale is one
    weight = reference.hadamard(codes).flatten(-2)
    assert torch.equal(weight.bfloat16().float(), weight)
    assert torch.equal(read_back(kernels, weight.bfloat16()), codes)


def test_activations_are_quantized_like_the_twin_s(kernels: NativeKernels, normal: torch.Generator) -> None:
    """Weights of a single code 127 with scale eight read the activations back; groups do not touch each other."""
    x = torch.randn(40, 256, generator=normal) * torch.logspace(-6, 6, 40)[:, None]
    x[3, 40] = 1e4
    x[5] = 0
    x = x.bfloat16()
    out = torch.empty(40, 256)
    kernels.linear(x, kernels.pack_linear(127 * sign_rows(256), int8=True, output_dtype=torch.float32), out)
    out /= 8 * 127
    exact = reference.hadamard(x).flatten(-2)
    expected = exact.bfloat16().float()
    if kernels.quantizes_activations:
        expected = reference.dequantize_int8(*reference.quantize_int8(x))
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)
    assert (out[3, 64:] - exact[3, 64:]).abs().max() < 0.02


@pytest.mark.parametrize("size", [1e-39, 1e-37, 1e-33])
def test_numbers_too_small_to_divide_by_count_as_zero(
    kernels: NativeKernels, normal: torch.Generator, size: float
) -> None:
    tiny = (torch.randn(32, 64, generator=normal) * size).bfloat16()
    usual = torch.randn(32, 64, generator=normal).bfloat16()
    for x, weight in ((tiny, usual), (usual, tiny), (tiny, tiny)):
        out = torch.empty(32, 32)
        kernels.linear(x, kernels.pack_linear(weight, int8=True, output_dtype=torch.float32), out)
        assert out.abs().max() <= 1000 * size


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_does_not_become_a_number(
    kernels: NativeKernels, normal: torch.Generator, value: float
) -> None:
    x = torch.randn(3, 64, generator=normal).bfloat16()
    x[1, 7] = value
    out = torch.empty(3, 32)
    packed = kernels.pack_linear(
        weights(normal, 32, 64, torch.bfloat16), int8=True, output_dtype=torch.float32
    )
    kernels.linear(x, packed, out)
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_what_cannot_be_packed_is_said(kernels: NativeKernels) -> None:
    assert not kernels.packs(torch.zeros(16, 33, dtype=torch.bfloat16))
    assert not kernels.packs(torch.zeros(16, 32, dtype=torch.float16))
    assert not kernels.packs(torch.zeros(48, 32), Activation.SILU)
    with pytest.raises(ValueError, match="cannot be packed"):
        kernels.pack_linear(torch.zeros(16, 33, dtype=torch.bfloat16))
