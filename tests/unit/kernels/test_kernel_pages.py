"""Rotary embedding and writing into pages against their torch twins."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPE_PAIRS, DTYPES, INT8_HEAD_DIMS, unwritten_cache

from paged_engine.attention.interface import AttentionSpec
from paged_engine.kernels import reference
from paged_engine.kernels.library import Rotary
from paged_engine.kernels.native import NativeKernels

NUM_PAGES, NUM_QUERY_HEADS, NUM_KV_HEADS = 7, 6, 2
SHAPES = [(16, 64), (64, 48), (32, 256), (16, 20), (5, 64), (1, 32), (2, 33)]


def slots_of(num_tokens: int, page_size: int, normal: torch.Generator) -> torch.Tensor:
    return torch.randperm(NUM_PAGES * page_size, generator=normal)[:num_tokens]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "page{}-dim{}".format(*shape))
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_pages(
    kernels: NativeKernels,
    normal: torch.Generator,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    shape: tuple[int, int],
) -> None:
    page_size, head_dim = shape
    cache = unwritten_cache(NUM_PAGES, NUM_KV_HEADS, page_size, head_dim, cache_dtype)
    expected = cache.clone()
    layout = kernels.attention_layer(
        AttentionSpec(NUM_QUERY_HEADS, NUM_KV_HEADS, head_dim, 1.0), page_size, dtype, cache_dtype
    ).pages
    slots = slots_of(40, page_size, normal)
    fused = torch.randn(len(slots), 2 * NUM_KV_HEADS, head_dim, generator=normal).to(dtype)
    key, value = fused[:, :NUM_KV_HEADS], fused[:, NUM_KV_HEADS:]
    kernels.write_pages(layout, key, value, slots, cache)
    reference.write_pages(expected, key, value, slots)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
    for read, written in zip(reference.read_pages(cache), (key, value), strict=True):
        tokens = read[slots // page_size, slots % page_size]
        assert torch.equal(tokens, written.to(cache_dtype))


def assert_same_int8_pages(
    cache: torch.Tensor, expected: torch.Tensor, head_dim: int, differing: float = 1e-3
) -> None:
    """Codes are the same, but for a share of them that a last bit moves to the next one; and so are the scales."""
    num_codes = cache.shape[3] * head_dim
    both = [each.flatten(3)[..., :num_codes].view(torch.uint8).int() for each in (cache, expected)]
    distance = (both[0] - both[1]).abs()
    assert distance.max() <= 1
    assert (distance > 0).float().mean() <= differing
    scales = [
        each.flatten(3)[..., num_codes:].contiguous().view(torch.float32).nan_to_num(-1, -1, -1)
        for each in (cache, expected)
    ]
    torch.testing.assert_close(*scales, rtol=1e-6 if differing < 0.01 else 1e-2, atol=0)


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("head_dim", INT8_HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_int8_pages(
    kernels: NativeKernels, normal: torch.Generator, dtype: torch.dtype, head_dim: int, page_size: int
) -> None:
    """Among the heads one of zeros, one with a large element, and some with what is no number."""
    cache = unwritten_cache(NUM_PAGES, NUM_KV_HEADS, page_size, head_dim, torch.int8)
    expected = cache.clone()
    spec = AttentionSpec(NUM_QUERY_HEADS, NUM_KV_HEADS, head_dim, 1.0)
    layout = kernels.attention_layer(spec, page_size, dtype, torch.int8).pages
    slots = slots_of(40, page_size, normal)
    fused = torch.randn(len(slots), 2 * NUM_KV_HEADS, head_dim, generator=normal)
    fused[3, 1], fused[4, 2] = 0, 0
    fused[5, :, 7] = 100
    fused[6, 0, 1], fused[7, 3, head_dim - 1], fused[8, 2, 0] = torch.nan, torch.inf, -torch.inf
    key, value = fused.to(dtype).split(NUM_KV_HEADS, 1)
    kernels.write_pages(layout, key, value, slots, cache)
    reference.write_pages(expected, key, value, slots)
    assert_same_int8_pages(cache, expected, head_dim)
    unwritten = torch.ones(NUM_PAGES * page_size, dtype=torch.bool).index_fill(0, slots, False)
    for read, written in zip(reference.read_pages(cache), (key, value), strict=True):
        assert read.flatten(0, 1)[unwritten].isnan().all()
        tokens = read[slots // page_size, slots % page_size]
        healthy = written.isfinite().all(-1)
        assert tokens[~healthy].isnan().all()
        assert (tokens - written)[healthy].norm() <= 0.02 * written[healthy].norm()


@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        (shape, dtypes)
        for shape in [(16, 64, 64), (16, 80, 40), (32, 96, 32), (5, 64, 64), (16, 20, 10), (4, 32, 8)]
        for dtypes in DTYPE_PAIRS
        if dtypes[1] != torch.int8 or shape[0] % 16 == shape[1] % 16 == 0
    ],
    ids=str,
)
def test_rotate_and_write(
    kernels: NativeKernels,
    normal: torch.Generator,
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    interleaved: bool,
    norms: bool,
) -> None:
    dtype, cache_dtype = dtypes
    page_size, head_dim, rotary_dim = shape
    slots = slots_of(30, page_size, normal)
    fused = torch.randn(len(slots), NUM_QUERY_HEADS + 2 * NUM_KV_HEADS, head_dim, generator=normal).to(dtype)
    query, key, value = fused.split((NUM_QUERY_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), 1)
    positions = torch.randint(0, 100, (len(slots),), generator=normal)
    angles = torch.randn(100, rotary_dim // 2, generator=normal)
    cosines, sines = angles.cos(), angles.sin()
    query_norm, key_norm = (torch.rand(head_dim, generator=normal) + 0.5 if norms else None for _ in range(2))
    cache = unwritten_cache(NUM_PAGES, NUM_KV_HEADS, page_size, head_dim, cache_dtype)
    expected_cache = cache.clone()
    expected_query, expected_key = (
        reference.rotate(heads, positions, cosines, sines, interleaved=interleaved, norm=norm, epsilon=1e-5)
        for heads, norm in ((query, query_norm), (key, key_norm))
    )
    reference.write_pages(expected_cache, expected_key, value, slots)
    rotary = Rotary(
        rotary_dim,
        interleaved,
        cosines.data_ptr(),
        sines.data_ptr(),
        positions.data_ptr(),
        None if query_norm is None else query_norm.data_ptr(),
        None if key_norm is None else key_norm.data_ptr(),
        1e-5,
    )
    layer = kernels.attention_layer(
        AttentionSpec(NUM_QUERY_HEADS, NUM_KV_HEADS, head_dim, 1.0), page_size, dtype, cache_dtype
    )
    kernels.rotate_and_write(layer, rotary, query, key, value, slots, cache)
    # One unit in the last place: the products of a rotation may be fused or not.
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(query, expected_query, **tolerance)
    if cache_dtype == torch.int8:
        # A unit in the last place of 16 bits is a tenth of a step between two codes.
        assert_same_int8_pages(cache, expected_cache, head_dim, 1e-3 if dtype == torch.float32 else 0.2)
    else:
        torch.testing.assert_close(cache, expected_cache, equal_nan=True, **tolerance)
