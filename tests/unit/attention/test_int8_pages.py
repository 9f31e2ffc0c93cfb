"""Every attention backend that takes pages in int8, against attention by its definition over what such pages hold."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_suite import BACKENDS, Case, PagedRun, history_then_step, random_steps
from test_attention_backends import FEATURES

INT8 = torch.int8
INT8_SHAPES = list(itertools.product([1, 3, 7, 16], [16, 64, 80, 96, 128, 256], [16, 64]))

pytestmark = pytest.mark.parametrize("backend", list(BACKENDS))


@pytest.mark.parametrize("shape", INT8_SHAPES, ids=lambda shape: "group{}-dim{}-page{}".format(*shape))
def test_int8_shapes(backend: str, shape: tuple[int, int, int]) -> None:
    group_size, head_dim, page_size = shape
    index = INT8_SHAPES.index(shape)
    case = Case(
        num_kv_heads=1 + index % 2,
        group_size=group_size,
        head_dim=head_dim,
        page_size=page_size,
        dtype=(torch.float32, torch.bfloat16, torch.float16)[index % 3],
        cache_dtype=INT8,
    )
    history_then_step(case, PagedRun(BACKENDS[backend], case, seed=index))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features) or "plain")
def test_int8_features(backend: str, features: dict[str, object], dtype: torch.dtype) -> None:
    case = Case(group_size=3, head_dim=64, dtype=dtype, cache_dtype=INT8, **features)  # type: ignore[arg-type]
    history_then_step(case, PagedRun(BACKENDS[backend], case))


@pytest.mark.parametrize("seed", range(6))
def test_int8_random_batches_over_many_steps(backend: str, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 70, (6,), generator=random).tolist()
    case = Case(
        group_size=3,
        head_dim=64,
        page_size=(16, 32)[seed % 2],
        cache_dtype=INT8,
        ranges=tuple((0, n) for n in lengths),
        **FEATURES[seed],  # type: ignore[arg-type]
    )
    run = PagedRun(BACKENDS[backend], case, seed)
    for ranges in random_steps(lengths, random):
        run.check(ranges)


def test_int8_pages_of_others_are_left_alone(backend: str) -> None:
    case = Case(cache_dtype=INT8)
    run = PagedRun(BACKENDS[backend], case)
    history_then_step(case, run)
    assert run.unused_pages
    for cache in run.caches:
        assert (cache[run.unused_pages] == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_pages_hold_the_same_however_a_prompt_is_cut(backend: str, dtype: torch.dtype) -> None:
    """Bit for bit: tokens are quantized one by one, whoever is beside them."""
    case = Case(head_dim=64, group_size=3, dtype=dtype, cache_dtype=INT8, ranges=((0, 70), (0, 33)))
    whole, in_pieces = PagedRun(BACKENDS[backend], case), PagedRun(BACKENDS[backend], case)
    whole.step([(0, 0, 70), (1, 0, 33)])
    for ranges in random_steps([70, 33], torch.Generator().manual_seed(0)):
        in_pieces.step(ranges)
    for once, bit_by_bit in zip(whole.caches, in_pieces.caches, strict=True):
        assert torch.equal(once, bit_by_bit)


def test_int8_neighbours_do_not_change_a_result_beyond_rounding(backend: str) -> None:
    case = Case(group_size=3, head_dim=64, cache_dtype=INT8)
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


def test_int8_sequence_of_nan_stays_alone(backend: str) -> None:
    """Codes cannot be NaN, so that a scale must tell of it: never may such a sequence get an answer made of nothing."""
    case = Case(ranges=((9, 1), (5, 1), (6, 20)), cache_dtype=INT8)
    run = PagedRun(BACKENDS[backend], case)
    for layer in run.dense:
        for part in layer[1]:
            part.fill_(torch.nan)
    outputs = run.step([(0, 0, 9), (1, 0, 5), (2, 0, 6)])
    for healthy, spoilt, also_healthy in outputs:
        assert spoilt.isnan().all()
        assert healthy.isfinite().all() and also_healthy.isfinite().all()
    run.step([(1, 5, 6)])
    run.check([(0, 9, 10), (2, 6, 26)])


@pytest.mark.parametrize("which", ["key", "value"])
def test_int8_infinity_in_one_head_spoils_what_sees_it(backend: str, which: str) -> None:
    """From its token on, in its own query heads; the others' never."""
    case = Case(num_kv_heads=2, group_size=2, head_dim=32, cache_dtype=INT8, ranges=((0, 20),))
    run = PagedRun(BACKENDS[backend], case)
    for layer in run.dense:
        layer[0][("query", "key", "value").index(which)][12, 1, 3] = torch.inf
    for (output,) in run.step([(0, 0, 20)]):
        assert output[12:, 2:].isnan().all()
        assert output[:, :2].isfinite().all()
