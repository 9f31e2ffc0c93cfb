"""FlashInfer's kernels against attention by its definition.

Each head size, dtype and choice of features is compiled once, which takes the minutes that this takes: about one for
each of six. `-m slow` runs the whole common suite, with all of its dtypes and features, as well.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import attention_suite
import pytest
import torch
from attention_suite import Case, PagedRun, history_then_step
from on_device import flashinfer_on

from paged_engine.attention.flashinfer import load_flashinfer

BF16 = torch.bfloat16


def check(case: Case, device: torch.device, seed: int = 0) -> None:
    history_then_step(case, PagedRun(functools.partial(flashinfer_on, device), case, seed))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_shapes(device: torch.device, page_size: int, group_size: int, head_dim: int) -> None:
    """Mixed steps: fresh prompts, chunks that continue, and single tokens."""
    check(Case(page_size=page_size, group_size=group_size, head_dim=head_dim, dtype=BF16), device)


@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_decode_steps(device: torch.device, page_size: int, group_size: int) -> None:
    ranges = ((0, 1), (300, 1), (7, 1), (64, 1), (1, 1), *((99, 1),) * 9)
    check(Case(page_size=page_size, group_size=group_size, head_dim=128, dtype=BF16, ranges=ranges), device)


@pytest.mark.parametrize(
    "ranges", [attention_suite.MIXED, ((17, 1), (40, 1), (3, 1))], ids=["mixed", "decode"]
)
@pytest.mark.parametrize(
    "features",
    [
        {"has_sinks": True},
        {"sliding_window": 7},
        {"sliding_window": 1},
        {"sliding_window": 20, "soft_cap": 2.0, "has_sinks": True},
    ],
    ids=lambda features: "-".join(features),
)
def test_features(
    device: torch.device, features: dict[str, object], ranges: tuple[tuple[int, int], ...]
) -> None:
    check(Case(group_size=4, head_dim=64, dtype=BF16, ranges=ranges, **features), device)  # type: ignore[arg-type]


def test_head_sizes_between_those_of_the_kernels(device: torch.device) -> None:
    check(Case(group_size=3, head_dim=80, dtype=BF16), device)


def test_float16(device: torch.device) -> None:
    check(Case(group_size=4, head_dim=128, dtype=torch.float16), device)


@pytest.mark.parametrize(("group_size", "head_dim"), [(4, 128), (1, 64), (3, 256)])
def test_a_float8_cache(device: torch.device, group_size: int, head_dim: int) -> None:
    """Its rounding is the oracle's, too; what is left is that of the kernel."""
    case = Case(group_size=group_size, head_dim=head_dim, dtype=BF16, cache_dtype=torch.float8_e4m3fn)
    run = PagedRun(functools.partial(flashinfer_on, device), case)
    for i, (computed, new) in enumerate(case.ranges):
        expected = run.expected(0, i, 0, computed + new)
        got = run.step([(i, 0, computed + new)])[0][0]
        torch.testing.assert_close(got.double(), expected, atol=0.05, rtol=0.05)


def test_a_long_context_is_split_and_joined(device: torch.device) -> None:
    ranges = ((4000, 1), (3000, 200), (10, 1))
    check(Case(group_size=4, head_dim=128, dtype=BF16, ranges=ranges), device)


def test_pages_of_others_are_left_alone(device: torch.device) -> None:
    case = Case(page_size=5, head_dim=64, dtype=BF16)
    run = PagedRun(functools.partial(flashinfer_on, device), case)
    history_then_step(case, run)
    for cache in run.caches:
        assert cache[run.unused_pages].isnan().all()


def test_replanning_without_waiting(device: torch.device) -> None:
    """Many steps are planned while the GPU still works on the first: no plan may overwrite one that is to be copied."""
    case = Case(page_size=16, group_size=4, head_dim=128, dtype=BF16, ranges=((500, 1), (31, 1), (200, 1)))
    run = PagedRun(functools.partial(flashinfer_on, device), case)
    run.step([(0, 0, 500), (1, 0, 31), (2, 0, 200)])
    backend = run.backend._backend  # type: ignore[attr-defined]
    steps = [run.batch([(i, end - 1, end)]) for i, end in ((0, 501), (1, 32), (2, 201))]
    on_device = [replace(step, slots=step.slots.to(device)) for step in steps]
    heads = [[part[-1:].to(device) for part in run.dense[0][i]] for i in range(3)]
    with torch.cuda.device(device):
        busy = torch.randn(8192, 8192, device=device)
        torch.cuda.synchronize(device)
        for _ in range(50):
            busy = busy @ busy
        outputs = []
        for step, (query, key, value) in zip(on_device, heads, strict=True):
            backend.plan(step)
            outputs.append(backend.attend(0, query, key, value))
    for i, output in enumerate(outputs):
        end = sum(case.ranges[i])
        torch.testing.assert_close(
            output.cpu().double(), run.expected(0, i, end - 1, end), atol=0.02, rtol=0.02
        )


def test_loading_tries_it_out(device: torch.device) -> None:
    setup = replace(Case(group_size=4, head_dim=64, dtype=BF16).setup, device=device)
    assert load_flashinfer(setup).name == "flashinfer"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_common_suite(device: torch.device) -> None:
    """All its shapes, with features and dtypes dealt out over them as there; float32 is not for these kernels."""
    import test_attention_backends as suite

    for index, (group_size, head_dim, page_size) in enumerate(suite.SHAPES):
        dtype = suite.DTYPES[index % len(suite.DTYPES)]
        features = suite.FEATURES[index % len(suite.FEATURES)]
        if dtype != torch.float32:
            case = Case(1 + index % 2, group_size, head_dim, page_size, dtype=dtype, **features)  # type: ignore[arg-type]
            check(case, device, seed=index)
