"""What is the plain-torch backend's own: splitting into blocks, and a layout that others rely on."""

from __future__ import annotations

import pytest
import torch
from attention_suite import BACKENDS, Case, PagedRun, history_then_step

from paged_engine.attention import torch_reference
from paged_engine.attention.torch_reference import TorchAttention, round_to


@pytest.mark.parametrize("limit", [1, 40, 700])
def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Long chunks are computed piece by piece and many decodes in several gathers; here nearly every row is alone."""
    monkeypatch.setattr(torch_reference, "_MAX_SCORES", {"cpu": limit})
    monkeypatch.setattr(torch_reference, "_MAX_GATHERED_TOKENS", {"cpu": limit})
    monkeypatch.setattr(torch_reference, "_MIN_BLOCK_ROWS", 1)
    case = Case(group_size=3, sliding_window=20, page_size=5)
    history_then_step(case, PagedRun(BACKENDS["torch"], case))


def test_decodes_of_like_length_share_one_gather() -> None:
    case = Case(ranges=((50, 1),) * 20 + ((60, 1), (200, 1), (10, 1)))
    run = PagedRun(BACKENDS["torch"], case)
    gathered = [
        group.key_places.shape
        for group in torch_reference._group_rows(
            run.batch([(i, a, a + n) for i, (a, n) in enumerate(case.ranges)]), 2
        )
    ]
    assert gathered == [(1, 11), (21, 61), (1, 201)]


def test_pages_are_nhd() -> None:
    case = Case(num_kv_heads=2, head_dim=16, page_size=4, ranges=((0, 6),))
    run = PagedRun(BACKENDS["torch"], case)
    assert run.backend.page_shape(0) == (2, 4, 2, 16)
    run.step([(0, 0, 6)])
    first, second = run.sequences[0].page_table
    _, key, value = run.dense[0][0]
    assert torch.equal(run.caches[0][first, 0], key[:4])
    assert torch.equal(run.caches[0][second, 1, :2], value[4:])
    assert run.caches[0][second, :, 2:].isnan().all()


def test_float64_is_computed_in_float64() -> None:
    case = Case(dtype=torch.float64, cache_dtype=torch.float64, ranges=((0, 12),))
    run = PagedRun(TorchAttention, case)
    output = run.step([(0, 0, 12)])[0][0]
    torch.testing.assert_close(output, run.expected(0, 0, 0, 12), atol=1e-13, rtol=1e-13)


def test_float8_pages_cut_off_what_they_cannot_hold() -> None:
    """torch alone would make it NaN, which spoils every later token of the sequence."""
    rounded = round_to(torch.float8_e4m3fn, torch.tensor([1e6, -1e6, 448.0, 0.1, float("nan")]))
    assert rounded.float()[:3].tolist() == [448, -448, 448]
    assert rounded.float()[3].item() == pytest.approx(0.1, rel=0.07)
    assert rounded.float()[4].isnan()


@pytest.mark.parametrize(("head_dim", "page_size"), [(20, 5), (7, 1), (80, 16)])
def test_int8_pages_of_any_size_lose_what_rounding_loses(head_dim: int, page_size: int) -> None:
    """Queries are not quantized here: what the pages hold is computed with as exactly as everything else."""
    case = Case(group_size=3, head_dim=head_dim, page_size=page_size, cache_dtype=torch.int8)
    run = PagedRun(BACKENDS["torch"], case)
    assert run.backend.page_shape(0) == (2, page_size, 2, head_dim + 4)
    for layer, outputs in enumerate(run.step([(i, 0, new) for i, (_, new) in enumerate(case.ranges)])):
        for i, output in enumerate(outputs):
            expected = run.expected(layer, i, 0, case.ranges[i][1])
            torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=2e-5)
