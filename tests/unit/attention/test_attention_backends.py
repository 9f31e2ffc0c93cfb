"""Every attention backend against attention by its definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_suite import BACKENDS, Case, PagedRun, history_then_step, random_steps

FEATURES: list[dict[str, object]] = [
    {},
    {"sliding_window": 7},
    {"soft_cap": 1.5},
    {"has_sinks": True},
    {"sliding_window": 20, "soft_cap": 2.0, "has_sinks": True},
    {"sliding_window": 1},
    {"sliding_window": 1000},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = list(itertools.product([1, 3, 4, 7, 8], [16, 64, 80, 128, 256], [1, 2, 5, 16, 64]))

pytestmark = pytest.mark.parametrize("backend", list(BACKENDS))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "group{}-dim{}-page{}".format(*shape))
def test_shapes(backend: str, shape: tuple[int, int, int]) -> None:
    """All combinations of group size, head size and page size, with features and dtypes dealt out over them."""
    group_size, head_dim, page_size = shape
    index = SHAPES.index(shape)
    case = Case(
        num_kv_heads=1 + index % 2,
        group_size=group_size,
        head_dim=head_dim,
        page_size=page_size,
        dtype=DTYPES[index % len(DTYPES)],
        **FEATURES[index % len(FEATURES)],  # type: ignore[arg-type]
    )
    history_then_step(case, PagedRun(BACKENDS[backend], case, seed=index))


@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features) or "plain")
def test_features(backend: str, features: dict[str, object], dtype: torch.dtype, page_size: int) -> None:
    case = Case(group_size=3, head_dim=64, page_size=page_size, dtype=dtype, **features)  # type: ignore[arg-type]
    history_then_step(case, PagedRun(BACKENDS[backend], case))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cache_in_a_smaller_dtype_than_the_model(backend: str, cache_dtype: torch.dtype) -> None:
    case = Case(group_size=3, head_dim=64, cache_dtype=cache_dtype)
    history_then_step(case, PagedRun(BACKENDS[backend], case))


def test_cache_in_float8(backend: str) -> None:
    case = Case(group_size=3, head_dim=64, cache_dtype=torch.float8_e4m3fn)
    history_then_step(case, PagedRun(BACKENDS[backend], case))


@pytest.mark.parametrize(
    "ranges",
    [
        ((99, 1),) * 9,
        ((0, 1), (300, 1), (7, 1), (64, 1), (1, 1)),
        ((0, 200),),
        ((150, 50), (31, 1), (32, 33)),
    ],
    ids=["equal decodes", "unequal decodes", "one prompt", "long chunks"],
)
def test_kinds_of_batches(backend: str, ranges: tuple[tuple[int, int], ...]) -> None:
    case = Case(group_size=4, head_dim=64, sliding_window=40, ranges=ranges)
    history_then_step(case, PagedRun(BACKENDS[backend], case))


@pytest.mark.parametrize("seed", range(10))
def test_random_batches_over_many_steps(backend: str, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 70, (6,), generator=random).tolist()
    features = FEATURES[seed % len(FEATURES)]
    case = Case(
        group_size=3,
        head_dim=64,
        page_size=(1, 2, 5, 16, 64)[seed % 5],
        ranges=tuple((0, n) for n in lengths),
        **features,
    )
    run = PagedRun(BACKENDS[backend], case, seed)
    for ranges in random_steps(lengths, random):
        run.check(ranges)


def test_writes_to_its_own_pages_only(backend: str) -> None:
    case = Case(page_size=5)
    run = PagedRun(BACKENDS[backend], case)
    history_then_step(case, run)
    assert run.unused_pages
    for cache in run.caches:
        assert cache[run.unused_pages].isnan().all()


def test_a_sequence_of_nan_stays_alone(backend: str) -> None:
    """One sequence whose own keys and values are NaN must not reach any other, in the same step or later."""
    case = Case(page_size=4, ranges=((9, 1), (5, 1), (6, 20)))
    run = PagedRun(BACKENDS[backend], case)
    for layer in run.dense:
        for part in layer[1]:
            part.fill_(torch.nan)
    healthy = [(0, 0, 9), (2, 0, 6)]
    outputs = run.step([healthy[0], (1, 0, 5), healthy[1]])
    for index, output in enumerate(outputs):
        assert output[1].isnan().all()
        for got, (i, start, end) in zip((output[0], output[2]), healthy, strict=True):
            torch.testing.assert_close(got.double(), run.expected(index, i, start, end), atol=2e-5, rtol=2e-5)
    run.step([(1, 5, 6)])
    run.check([(0, 9, 10), (2, 6, 26)])


def test_neighbours_do_not_change_a_result_beyond_rounding(backend: str) -> None:
    case = Case(group_size=3, head_dim=64)
    together, alone = PagedRun(BACKENDS[backend], case), PagedRun(BACKENDS[backend], case)
    first = [(i, 0, computed) for i, (computed, _) in enumerate(case.ranges) if computed]
    second = [(i, computed, computed + new) for i, (computed, new) in enumerate(case.ranges)]
    together.step(first)
    in_company = together.step(second)
    for item in first:
        alone.step([item])
    for place, item in enumerate(second):
        for layer, output in enumerate(alone.step([item])):
            torch.testing.assert_close(output[0], in_company[layer][place], atol=2e-6, rtol=2e-6)
