"""Choosing and drawing: exact against sorted references and transformers' warpers, whatever the shape of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling_helpers import distribution_of_transformers, make_sequence

from paged_engine.execution.random_stream import RandomStreams
from paged_engine.execution.token_choice import RandomControls, draw, most_likely, most_likely_tokens


@dataclass(frozen=True)
class GivenNumbers(RandomStreams):
    """A stream whose first numbers are given, to walk through a distribution from end to end."""

    first: NDArray[np.float64]

    def uniforms(self, attempt: int = 0) -> NDArray[np.float64]:
        return self.first if attempt == 0 else super().uniforms(attempt)

    def select(self, rows: NDArray[np.int64]) -> GivenNumbers:
        rest = super().select(rows)
        return GivenNumbers(rest.seeds, rest.indices, rest.positions, self.first[rows])


def controls_of(
    first: NDArray[np.float64],
    vocab_size: int,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> RandomControls:
    num_rows = len(first)
    zeros = np.zeros(num_rows, np.uint64)
    return RandomControls(
        np.full(num_rows, temperature),
        np.full(num_rows, min_p, np.float32),
        np.full(num_rows, top_k or vocab_size, np.int64),
        np.full(num_rows, top_p),
        GivenNumbers(np.arange(num_rows, dtype=np.uint64), zeros, zeros, first),
    )


def grid(num_points: int) -> NDArray[np.float64]:
    return (np.arange(num_points) + 0.5) / num_points


def random_row(vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def check_evenly_spread(
    drawing: Callable[[torch.Tensor, RandomControls], torch.Tensor],
    vocab_size: int,
    num_points: int,
    filters: dict[str, float],
) -> None:
    """No chance in it: an interval of length p holds num_points x p points of a grid, to within one."""
    row = random_row(vocab_size, seed=vocab_size)
    expected = distribution_of_transformers(row, make_sequence(vocab_size, **filters))
    controls = controls_of(grid(num_points), vocab_size, **filters)  # type: ignore[arg-type]
    counts = drawing(row.repeat(num_points, 1), controls).bincount(minlength=vocab_size)
    assert not counts[expected == 0].any()
    assert (counts - num_points * expected).abs().max() < 1.1


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 2},
        {"top_k": 40},
        {"top_k": 10**9},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"min_p": 1e-9},
        {"top_k": 40, "top_p": 0.9},
        {"min_p": 0.01, "top_p": 0.8},
        {"min_p": 0.01, "top_p": 0.8, "top_k": 60, "temperature": 1.7},
        {"min_p": 1e-6, "top_p": 0.99, "top_k": 300, "temperature": 2.0},
    ],
)
def test_evenly_spread_numbers_bring_each_token_as_often_as_transformers_says(
    vocab_size: int, filters: dict[str, float]
) -> None:
    check_evenly_spread(draw, vocab_size, 4096, filters)


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_top_p_alone_keeps_a_token_exactly_where_transformers_does(
    scale: float, top_p: float, temperature: float
) -> None:
    """Each token in turn is what the first try draws: it comes out if and only if it is in the nucleus."""
    vocab_size = 700
    row = random_row(vocab_size, seed=5, scale=scale)
    weights = (row.double() / temperature).softmax(dim=-1)
    middles = (weights.cumsum(dim=-1) - weights / 2).numpy()
    expected = (
        distribution_of_transformers(row, make_sequence(vocab_size, top_p=top_p, temperature=temperature)) > 0
    )
    controls = controls_of(middles, vocab_size, top_p=top_p, temperature=temperature)
    drawn = draw(row.repeat(vocab_size, 1), controls)
    reached = weights > 1e-7  # lighter ones are narrower than the rounding of float32 sums
    assert torch.equal((drawn == torch.arange(vocab_size))[reached], expected[reached])
    assert expected[drawn].all()


def reference_nucleus(
    logits: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens top-p keeps (of equals the lower ids first), and which are too close to the border to tell."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp(logits[order] - logits.max())
    before = np.cumsum(weights) - weights
    share = top_p * weights.sum()
    kept, unclear = np.zeros(len(logits), bool), np.zeros(len(logits), bool)
    kept[order] = before < share
    unclear[order] = abs(before - share) < 1e-5 * weights.sum()
    return kept, unclear


@given(
    levels=st.lists(st.integers(-6, 6), min_size=1, max_size=600),
    top_p=st.floats(0.01, 0.999),
    seed=st.integers(0, 2**32),
)
@example(levels=[0] * 513, top_p=0.5, seed=0)
@settings(max_examples=60, deadline=None)
def test_top_p_among_equals_keeps_the_lower_ids(levels: list[int], top_p: float, seed: int) -> None:
    logits = np.array(levels, np.float64)
    kept, unclear = reference_nucleus(logits, top_p)
    numbers = np.random.default_rng(seed).random(64)
    drawn = draw(
        torch.tensor(levels, dtype=torch.float32).repeat(64, 1),
        controls_of(numbers, len(levels), top_p=top_p),
    )
    assert (kept | unclear)[drawn.numpy()].all()


@given(
    levels=st.lists(st.integers(-40, 40), min_size=1, max_size=120),
    top_k=st.integers(1, 130),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0]),
    temperature=st.sampled_from([0.1, 1.0, 30.0]),
    counts=st.lists(st.integers(1, 119), max_size=3, unique=True).map(sorted),
)
@settings(max_examples=200, deadline=None)
def test_a_partial_selection_draws_what_the_full_sort_draws(
    levels: list[int], top_k: int, top_p: float, min_p: float, temperature: float, counts: list[int]
) -> None:
    """With many equals, at the border of the selection too."""
    row = torch.tensor(levels, dtype=torch.float32) / 8
    controls = controls_of(
        grid(64),
        len(levels),
        temperature=temperature,
        min_p=min_p,
        top_k=min(top_k, len(levels)),
        top_p=top_p,
    )
    rows = row.repeat(64, 1)
    assert torch.equal(draw(rows, controls, tuple(counts)), draw(rows, controls, ()))


def test_all_tokens_equal_to_the_kth_stay_as_in_transformers() -> None:
    row = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0, 2.0, 0.0])
    drawn = draw(row.repeat(256, 1), controls_of(grid(256), 7, top_k=3))
    assert set(drawn.tolist()) == {1, 2, 3, 4, 5}
    expected = distribution_of_transformers(row, make_sequence(7, top_k=3))
    assert (drawn.bincount(minlength=7) - 256 * expected).abs().max() < 1.05


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [1000, 49_152])
def test_a_rows_choice_depends_on_no_other_row_and_no_number_of_threads(
    vocab_size: int, num_threads: int
) -> None:
    num_rows = 48
    generator = np.random.default_rng(3)
    rows = torch.stack([random_row(vocab_size, seed) for seed in range(num_rows)])
    controls = RandomControls(
        generator.choice([0.2, 1.0, 5.0], num_rows),
        generator.choice([0.0, 0.0, 0.1], num_rows).astype(np.float32),
        generator.choice([1, 50, 200, vocab_size, vocab_size], num_rows),
        generator.choice([0.3, 0.95, 1.0], num_rows),
        RandomStreams(*(generator.integers(0, 2**31, (3, num_rows)).astype(np.uint64))),
    )
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = draw(rows, controls)
        for row in range(num_rows):
            alone = draw(rows[row : row + 1], controls.select(np.array([row])))
            assert alone[0] == together[row]
        reordered = generator.permutation(num_rows)
        assert torch.equal(draw(rows[reordered], controls.select(reordered)), together[reordered])
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_token_without_probability_is_never_drawn_not_even_at_the_ends(filters: dict[str, float]) -> None:
    vocab_size = 600
    row = torch.full((vocab_size,), -torch.inf)
    row[[256, 300, 301, 511]] = torch.tensor([0.0, -1.0, 0.5, -200.0])
    numbers = np.array([0.0, 2.0**-53, 0.25, 0.5, 0.999999, 1 - 2.0**-53])
    drawn = draw(row.repeat(len(numbers), 1), controls_of(numbers, vocab_size, **filters))
    assert set(drawn.tolist()) <= {256, 300, 301}


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 100.0, 1e30])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.5, "top_p": 0.7}])
def test_extreme_temperatures_and_logits_stay_defined(temperature: float, filters: dict[str, float]) -> None:
    row = random_row(500, seed=1) * 1e4
    row[7] = -torch.inf
    drawn = draw(row.repeat(64, 1), controls_of(grid(64), 500, temperature=temperature, **filters))
    assert 7 not in drawn.tolist()
    if temperature <= 1e-3:
        assert set(drawn.tolist()) == {int(row.argmax())}
    elif temperature == 1e30 and "top_k" not in filters:
        assert len(set(drawn.tolist())) > 40


def test_the_most_likely_token_is_the_lowest_of_equals() -> None:
    assert most_likely(
        torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0], [-torch.inf, -torch.inf, 0.0]])
    ).tolist() == [1, 0, 2]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_most_likely_tokens_come_in_order_of_weight_then_id(count: int) -> None:
    rows = torch.randint(-5, 5, (20, 40), generator=torch.Generator().manual_seed(0)).float()
    values, token_ids = most_likely_tokens(rows, count)
    full_values, full_ids = torch.sort(rows, dim=-1, descending=True, stable=True)
    assert torch.equal(values, full_values[:, :count])
    above_the_last = values > values[:, -1:]
    assert torch.equal(token_ids[above_the_last], full_ids[:, :count][above_the_last])
    assert (token_ids.diff()[values.diff() == 0] > 0).all()


def test_a_filter_that_is_off_for_one_row_is_on_for_its_neighbour() -> None:
    """top_k of 10^9, 1, 3 and off, side by side."""
    row = random_row(100, seed=2)
    off = controls_of(np.full(4, 0.999), 100)
    drawn = draw(row.repeat(4, 1), replace(off, top_k=np.array([10**9, 1, 3, 100])))
    best = row.argsort(descending=True).tolist()
    assert drawn[0] == drawn[3]
    assert drawn[0] not in best[:3]
    assert drawn[1] == best[0]
    assert drawn[2] == best[2]
