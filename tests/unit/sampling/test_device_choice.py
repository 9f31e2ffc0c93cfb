"""Drawing where the host may not look at what the device has computed: on a device that is late (deferred_device.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from deferred_device import DeferredDevice
from test_token_choice import check_evenly_spread, controls_of, grid, random_row

from paged_engine.execution import token_choice
from paged_engine.execution.random_stream import RandomStreams
from paged_engine.execution.token_choice import RandomControls, draw


def draw_late(rows: torch.Tensor, controls: RandomControls) -> torch.Tensor:
    """What a device chooses that has computed nothing yet when the last operation is launched."""
    device = DeferredDevice()
    with device:
        chosen = draw(rows.to("meta", non_blocking=True), controls).to("cpu", non_blocking=True)
    assert device.num_done == 0
    assert device.waits == []
    device.run_until(device.num_noted)
    return chosen


@pytest.mark.parametrize("vocab_size", [1, 257, 1000])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.3, "temperature": 2.0},
        {"top_p": 1e-6},
        {"min_p": 0.02},
        {"min_p": 1e-9},
        {"min_p": 0.01, "top_p": 0.8},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 300, "top_p": 0.99, "min_p": 1e-6, "temperature": 2.0},
    ],
    ids=str,
)
def test_evenly_spread_numbers_bring_each_token_as_often_as_transformers_says(
    vocab_size: int, filters: dict[str, float]
) -> None:
    check_evenly_spread(draw_late, vocab_size, 4096, filters)


def mixed_controls(num_rows: int, vocab_size: int, seed: int) -> RandomControls:
    generator = np.random.default_rng(seed)
    return RandomControls(
        generator.choice([0.2, 1.0, 5.0], num_rows),
        generator.choice([0.0, 0.0, 0.1], num_rows).astype(np.float32),
        generator.choice([2, 50, 200, vocab_size, vocab_size, vocab_size], num_rows),
        generator.choice([0.3, 0.95, 1.0], num_rows),
        RandomStreams(*(generator.integers(0, 2**31, (3, num_rows)).astype(np.uint64))),
    )


@pytest.mark.parametrize("most_sorted", [1, 2500, None])
def test_a_rows_choice_depends_on_no_other_row(
    monkeypatch: pytest.MonkeyPatch, most_sorted: int | None
) -> None:
    """However many rows are sorted at once."""
    if most_sorted is not None:
        monkeypatch.setattr(token_choice, "_SORTED_CHUNK_SIZE", most_sorted)
    num_rows, vocab_size = 32, 1000
    rows = torch.stack([random_row(vocab_size, seed) for seed in range(num_rows)])
    controls = mixed_controls(num_rows, vocab_size, seed=3)
    together = draw_late(rows, controls)
    monkeypatch.undo()
    for row in range(num_rows):
        assert draw_late(rows[row : row + 1], controls.select(np.array([row])))[0] == together[row]


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_brings_what_it_brings_on_a_cpu_unless_top_p_is_alone(seed: int) -> None:
    num_rows, vocab_size = 64, 1000
    rows = torch.stack([random_row(vocab_size, seed) for seed in range(num_rows)])
    controls = mixed_controls(num_rows, vocab_size, seed)
    alone = (controls.min_p == 0) & (controls.top_k == vocab_size) & (controls.top_p < 1)
    same = draw_late(rows, controls) == draw(rows, controls)
    assert same[torch.from_numpy(~alone)].all()
    assert alone.any()


@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"min_p": 0.1}, {}])
def test_a_token_without_probability_is_never_drawn_not_even_at_the_ends(filters: dict[str, Any]) -> None:
    row = torch.full((600,), -torch.inf)
    row[[256, 300, 301, 511]] = torch.tensor([0.0, -1.0, 0.5, -200.0])
    numbers = np.array([0.0, 2.0**-53, 0.25, 0.5, 0.999999, 1 - 2.0**-53])
    drawn = draw_late(row.repeat(len(numbers), 1), controls_of(numbers, 600, **filters))
    assert set(drawn.tolist()) <= {256, 300, 301}


def test_rows_that_are_not_finite_get_some_token_and_spoil_no_other() -> None:
    """It is fed to the next step before anybody knows, so it must be one of the vocabulary."""
    rows = torch.stack([random_row(300, seed) for seed in range(8)])
    broken = rows.clone()
    broken[1, 7], broken[3, 7], broken[5] = torch.nan, torch.inf, -torch.inf
    for filters in ({}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 5}):
        controls = controls_of(grid(8), 300, **filters)  # type: ignore[arg-type]
        got, expected = draw_late(broken, controls), draw_late(rows, controls)
        assert got.min() >= 0
        assert got.max() < 300
        assert torch.equal(got[[0, 2, 4, 6, 7]], expected[[0, 2, 4, 6, 7]])


def test_top_p_among_equals_keeps_the_lower_ids() -> None:
    drawn = draw_late(torch.zeros(64, 200), replace(controls_of(grid(64), 200), top_p=np.full(64, 0.25)))
    assert set(drawn.tolist()) <= set(range(50))
    assert len(set(drawn.tolist())) == 50
