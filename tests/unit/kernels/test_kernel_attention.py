"""The attention kernel against its torch twin, and what it must not depend on."""

from __future__ import annotations

import random

import pytest
import torch
from kernel_cases import DTYPE_PAIRS, DTYPES, INT8_HEAD_DIMS, Context, random_ranges, random_spec

from paged_engine.attention.interface import AttentionSpec
from paged_engine.kernels import reference
from paged_engine.kernels.native import NativeKernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
INT8_TOLERANCE = {**TOLERANCE, torch.float32: 3e-4}
"""Over pages in int8, whose values meet weights of 15 bits."""


def attend(kernels: NativeKernels, context: Context, ranges: list[tuple[int, int, int]]) -> torch.Tensor:
    batch, query = context.step(ranges)
    layer = kernels.attention_layer(context.spec, context.page_size, query.dtype, context.cache.dtype)
    return kernels.attention(layer, kernels.attention_step(batch), query, context.cache, context.sinks)


def expected(context: Context, ranges: list[tuple[int, int, int]]) -> torch.Tensor:
    """By the twin, which over pages in int8 quantizes the queries, too."""
    batch, query = context.step(ranges)
    return reference.attention(query, context.cache.nan_to_num(0), context.spec, batch, context.sinks)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_steps(kernels: NativeKernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    choose = random.Random(DTYPES.index(dtype) * 3 + DTYPES.index(cache_dtype))
    for seed in range(12):
        lengths = [choose.randint(1, choose.choice([20, 300, 600])) for _ in range(choose.randint(1, 4))]
        page_size = choose.choice([1, 2, 7, 16, 32, 48, 64])
        context = Context(random_spec(choose), lengths, page_size, dtype, cache_dtype, seed)
        ranges = random_ranges(choose, lengths)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            attend(kernels, context, ranges),
            expected(context, ranges),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, where=(context.spec, page_size, ranges): f"{where}: {text}",
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_steps_over_int8_pages(kernels: NativeKernels, dtype: torch.dtype) -> None:
    choose = random.Random(DTYPES.index(dtype))
    for seed in range(16):
        lengths = [choose.randint(1, choose.choice([20, 300, 600])) for _ in range(choose.randint(1, 4))]
        page_size = choose.choice([16, 32, 48, 64])
        context = Context(random_spec(choose, INT8_HEAD_DIMS), lengths, page_size, dtype, torch.int8, seed)
        ranges = random_ranges(choose, lengths)
        torch.testing.assert_close(
            attend(kernels, context, ranges),
            expected(context, ranges),
            atol=INT8_TOLERANCE[dtype],
            rtol=INT8_TOLERANCE[dtype],
            msg=lambda text, where=(context.spec, page_size, ranges): f"{where}: {text}",
        )


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_long_contexts_that_several_threads_share(
    kernels: NativeKernels, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    context = Context(AttentionSpec(3, 1, 64, 0.125, has_sinks=True), [3000], 16, *dtypes)
    tolerance = (INT8_TOLERANCE if dtypes[1] == torch.int8 else TOLERANCE)[dtypes[0]]
    for ranges in ([(0, 2999, 3000)], [(0, 2990, 3000)]):
        torch.testing.assert_close(
            attend(kernels, context, ranges),
            expected(context, ranges),
            atol=tolerance,
            rtol=tolerance,
        )


@pytest.mark.parametrize("dtypes", DTYPE_PAIRS, ids=str)
def test_number_of_threads_changes_nothing(
    kernels: NativeKernels, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Few sequences with long contexts are split between threads, many are not: the same bits all the same."""
    context = Context(AttentionSpec(6, 2, 64, 0.125), [1500, 700, 20], 16, *dtypes)
    ranges = [(0, 1499, 1500), (1, 650, 700), (2, 0, 20)]
    outputs = []
    for num_threads in (1, 2, 3, 8):
        kernels.num_threads = num_threads
        outputs.append(attend(kernels, context, ranges))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("window", [None, 290])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "page_sizes"),
    [
        (torch.float32, torch.float32, (16, 64, 1, 7)),
        (torch.float32, torch.int8, (16, 64, 32)),
        (torch.bfloat16, torch.int8, (16, 64, 32)),
    ],
    ids=["float32", "float32 over int8", "bfloat16 over int8"],
)
def test_chunks_neighbours_and_pages_change_nothing(
    kernels: NativeKernels,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    page_sizes: tuple[int, ...],
    window: int | None,
) -> None:
    """Every row of a whole prompt is bit for bit what it is in any chunk, beside anyone, in pages of any size."""
    spec = AttentionSpec(6, 2, 32, 0.17, sliding_window=window, soft_cap=5.0)
    whole: torch.Tensor | None = None
    for page_size in page_sizes:
        context = Context(spec, [610, 33], page_size, dtype, cache_dtype)
        alone = attend(kernels, context, [(0, 0, 610)])
        whole = alone if whole is None else whole
        assert torch.equal(alone, whole)
        for start, end in ((0, 1), (1, 16), (16, 50), (300, 301), (301, 512), (512, 610), (609, 610)):
            in_company = attend(kernels, context, [(1, 10, 33), (0, start, end)])
            assert torch.equal(in_company[23:], whole[start:end])


def test_heads_may_lie_in_a_wider_tensor(kernels: NativeKernels) -> None:
    """Queries are read with their strides, as views of a fused projection have them."""
    context = Context(AttentionSpec(6, 2, 32, 0.17), [40], 16)
    batch, query = context.step([(0, 0, 40)])
    layer = kernels.attention_layer(context.spec, 16, torch.float32, torch.float32)
    wide = torch.full((40, 10, 32), torch.nan)
    wide[:, 2:8] = query
    transposed = query.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (wide[:, 2:8], transposed):
        output = kernels.attention(layer, kernels.attention_step(batch), view, context.cache)
        assert torch.equal(output, attend(kernels, context, [(0, 0, 40)]))
    with pytest.raises(ValueError, match="last axis of heads must be contiguous"):
        kernels.attention(layer, kernels.attention_step(batch), query.transpose(1, 2), context.cache)


def test_nan_in_int8_pages_or_queries_shows(kernels: NativeKernels) -> None:
    """Codes cannot be NaN: scales are, and whoever looks at them becomes so, and nobody else."""
    context = Context(AttentionSpec(4, 2, 32, 0.2), [50, 20], 16, cache_dtype=torch.int8)
    ranges = [(0, 30, 50), (1, 19, 20)]
    healthy = attend(kernels, context, ranges)
    spoilt = torch.full((1, 2, 32), torch.nan)
    slot = torch.tensor([context.sequences[0].page_table[2] * 16 + 8])  # position 40
    reference.write_pages(context.cache, spoilt, spoilt, slot)
    output = attend(kernels, context, ranges)
    assert output[10:20].isnan().all()
    assert torch.equal(output[20:], healthy[20:])
    context.queries[1][19, 3, 5] = torch.inf
    output = attend(kernels, context, ranges)
    assert output[20, 3].isnan().all()
    assert torch.equal(output[20, :3], healthy[20, :3])


@pytest.mark.parametrize("magnitude", [0.0, 1e-38])
def test_a_query_of_nothing_sees_all_keys_alike_over_int8_pages(
    kernels: NativeKernels, magnitude: float
) -> None:
    """Its scale is none, and what is hidden stays hidden: behind the last token, and before a window."""
    context = Context(AttentionSpec(4, 2, 32, 0.2, sliding_window=20), [45], 16, cache_dtype=torch.int8)
    context.queries[0].fill_(magnitude)
    batch, query = context.step([(0, 0, 45)])
    expected = reference.attention(query, context.cache, context.spec, batch)
    torch.testing.assert_close(attend(kernels, context, [(0, 0, 45)]), expected, rtol=0, atol=3e-4)
