"""Choosing tokens on a GPU: the same distributions as on a CPU, by torch's operations and by FlashInfer's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling_helpers import distribution_of_transformers, make_sequence
from test_device_choice import mixed_controls
from test_token_choice import check_evenly_spread, controls_of, grid, random_row
from tiny_checkpoint import save_tiny_checkpoint

from paged_engine.config import EngineConfig
from paged_engine.errors import RequestError
from paged_engine.execution.flashinfer_draw import FlashInferDraw, load_flashinfer_draw
from paged_engine.execution.sampling import SampledToken, Sampler
from paged_engine.execution.token_choice import draw
from paged_engine.loading import load_engine

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.02},
    {"min_p": 0.01, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 300, "top_p": 0.99, "min_p": 1e-6, "temperature": 2.0},
]
NUM_DRAWS = 10_000
LEVEL = 1e-4


@pytest.mark.parametrize("vocab_size", [257, 151_936])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_evenly_spread_numbers_bring_each_token_as_often_as_transformers_says(
    device: torch.device, vocab_size: int, filters: dict[str, float]
) -> None:
    check_evenly_spread(
        lambda rows, controls: draw(rows.to(device), controls).cpu(), vocab_size, 512, filters
    )


@pytest.mark.parametrize("vocab_size", [1000, 151_936])
def test_a_rows_choice_depends_on_no_other_row(device: torch.device, vocab_size: int) -> None:
    num_rows = 48
    rows = torch.stack([random_row(vocab_size, seed) for seed in range(num_rows)]).to(device)
    controls = mixed_controls(num_rows, vocab_size, seed=3)
    together = draw(rows, controls)
    for row in range(num_rows):
        assert draw(rows[row : row + 1], controls.select(np.array([row])))[0] == together[row]


def test_a_seed_brings_what_it_brings_on_a_cpu_unless_top_p_is_alone(device: torch.device) -> None:
    """Up to rows whose number falls on the border of two tokens, which exp() rounds otherwise there."""
    num_rows, vocab_size = 200, 1000
    rows = torch.stack([random_row(vocab_size, seed) for seed in range(num_rows)])
    controls = mixed_controls(num_rows, vocab_size, seed=1)
    alone = (controls.min_p == 0) & (controls.top_k == vocab_size) & (controls.top_p < 1)
    same = draw(rows.to(device), controls).cpu() == draw(rows, controls)
    assert same[torch.from_numpy(~alone)].float().mean() > 0.98


@pytest.fixture(scope="module")
def flashinfer_draw(device: torch.device) -> FlashInferDraw:
    import flashinfer

    made = load_flashinfer_draw(flashinfer, 1000, device)
    assert made is not None
    return made


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_flashinfer_draws_from_the_filtered_distribution(
    device: torch.device, flashinfer_draw: FlashInferDraw, filters: dict[str, Any]
) -> None:
    """A chi-square test over steps of 100 rows."""
    vocab_size = 1000
    row = random_row(vocab_size, seed=2)
    expected = distribution_of_transformers(row, make_sequence(vocab_size, **filters)) * NUM_DRAWS
    sampler = Sampler(vocab_size, flashinfer_draw)
    counts = torch.zeros(vocab_size)
    for step in range(NUM_DRAWS // 100):
        sequences = [make_sequence(vocab_size, seed=100 * step + i, **filters) for i in range(100)]
        results = sampler.sample(row.to(device).repeat(100, 1), sequences)
        tokens = [result.token_id for result in results if isinstance(result, SampledToken)]
        counts += torch.tensor(tokens).bincount(minlength=vocab_size)
    assert counts.sum() == NUM_DRAWS
    assert not counts[expected == 0].any()
    used = expected >= 5
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    degrees = torch.tensor(float(max(int(used.sum()) - 1, 1)))
    assert torch.special.gammaincc(degrees / 2, statistic.float() / 2) > LEVEL


@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
@pytest.mark.parametrize("num_rows", [1, 64])
def test_flashinfer_passes_its_trial_with_large_vocabularies(
    device: torch.device, vocab_size: int, num_rows: int
) -> None:
    """And top-k keeps what it should in rows that several thread blocks share."""
    import flashinfer

    made = load_flashinfer_draw(flashinfer, vocab_size, device)
    assert made is not None
    rows = torch.stack([random_row(vocab_size, seed) for seed in range(num_rows)])
    drawn = made(rows.to(device), controls_of(grid(num_rows), vocab_size, top_k=50)).cpu()
    assert (rows.gather(1, drawn[:, None]) >= rows.topk(50).values[:, -1:]).all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}], ids=str)
def test_rows_that_are_not_finite_hurt_no_other(
    device: torch.device, flashinfer_draw: FlashInferDraw, filters: dict[str, Any]
) -> None:
    rows = torch.stack([random_row(1000, seed) for seed in range(4)])
    rows[0, 7], rows[1, 7], rows[3] = torch.nan, torch.inf, -torch.inf
    sequences = [make_sequence(1000, seed=seed, **filters) for seed in range(4)]
    pending = Sampler(1000, flashinfer_draw).launch(rows.to(device), sequences)
    assert 0 <= pending.tokens.min() <= pending.tokens.max() < 1000
    kinds = [type(result) for result in pending.result()]
    assert kinds == [RequestError, RequestError, SampledToken, RequestError]


def test_an_engine_on_a_gpu_draws_with_it(device: torch.device, tmp_path: Path) -> None:
    checkpoint = str(save_tiny_checkpoint(tmp_path))
    parameters = {"model": checkpoint, "device": str(device), "dtype": "bfloat16", "num_pages": "50"}
    engine = load_engine(EngineConfig.from_parameters(parameters))
    assert isinstance(engine._sampler._draw_unseeded, FlashInferDraw)
