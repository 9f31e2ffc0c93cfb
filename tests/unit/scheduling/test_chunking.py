"""How a step's tokens are divided: the arithmetic of chunks, without a scheduler."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from scheduling_harness import make_sequence

from paged_engine.scheduling.chunking import Chunk, ChunkLimits, chunk_length, share_equally, share_in_order

SHARES = [share_in_order, share_equally]


def chunk(num_tokens: int, start: int = 0) -> Chunk:
    return Chunk(make_sequence(num_tokens), start)


def limits(
    page_size: int = 16, max_num_tokens: int = 64, chunked: bool = True, threshold: int = 0
) -> ChunkLimits:
    return ChunkLimits(page_size, max_num_tokens, chunked, threshold)


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64])
def test_one_chunk_over_all_sizes(page_size: int) -> None:
    """The last chunk ends at the end, a truncated one at a page boundary, and the head gets something in any case."""
    lengths = sorted({1, page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1} - {0})
    for num_tokens, available in itertools.product(lengths, lengths):
        for start in range(num_tokens):
            subject = chunk(num_tokens, start)
            got = chunk_length(subject, available, limits(page_size), may_be_partial=True)
            assert 1 <= got <= min(available, num_tokens - start)
            if available >= num_tokens - start:
                assert start + got == num_tokens
            elif (start + available) // page_size > start // page_size:
                assert (start + got) % page_size == 0
                assert available - got < page_size
            else:
                assert got == available
                assert chunk_length(subject, available, limits(page_size), may_be_partial=False) == 0


@pytest.mark.parametrize("threshold", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("share", SHARES)
def test_the_threshold_caps_exactly_and_unrounded(share: Callable[..., list[int]], threshold: int) -> None:
    for start in (0, 1, 16, 31):
        [length] = share([chunk(400, start)], 64, limits(threshold=threshold))
        assert length == threshold
    [length] = share([chunk(20, 10)], 64, limits(threshold=threshold))
    assert length == min(10, threshold)


def test_a_chunk_under_the_threshold_that_the_budget_truncates_is_rounded() -> None:
    assert share_in_order([chunk(400, 8)], 30, limits(threshold=40)) == [24]


@pytest.mark.parametrize(
    ("chunks", "budget", "expected"),
    [
        ([(40, 0), (40, 0)], 64, [40, 16]),
        ([(40, 0), (40, 0)], 50, [40, 0]),
        ([(100, 0), (100, 0)], 64, [64, 0]),
        ([(100, 8), (100, 0)], 64, [56, 0]),
        ([(100, 0), (100, 0)], 10, [10, 0]),
        ([(100, 90), (100, 8), (9, 0)], 40, [10, 24, 0]),
        ([(5, 0), (6, 0), (7, 0)], 64, [5, 6, 7]),
        ([], 64, []),
    ],
)
def test_first_come_first_served(chunks: list[tuple[int, int]], budget: int, expected: list[int]) -> None:
    assert share_in_order([chunk(*each) for each in chunks], budget, limits()) == expected


@pytest.mark.parametrize(
    ("chunks", "budget", "expected"),
    [
        ([(4000, 0), (10, 0)], 64, [48, 10]),
        ([(4000, 0), (4000, 0), (10, 0)], 64, [48, 0, 10]),
        ([(4000, 0), (100, 0), (100, 0)], 64, [32, 32, 0]),
        ([(4000, 0), (10, 0)], 16, [6, 10]),
        ([(4000, 0), (10, 0)], 3, [1, 2]),
        ([(4000, 0), (10, 0)], 1, [1, 0]),
        ([(4000, 0), (1200, 0)], 64, [64, 0]),
        ([(60, 0), (10, 0)], 64, [60, 0]),
    ],
    ids=[
        "short",
        "behind-another",
        "half",
        "page",
        "three",
        "one-is-the-heads",
        "not-short",
        "head-done-in-this-step",
    ],
)
def test_short_ones_overtake_a_long_head(
    chunks: list[tuple[int, int]], budget: int, expected: list[int]
) -> None:
    assert share_in_order([chunk(*each) for each in chunks], budget, limits()) == expected


@pytest.mark.parametrize(
    ("chunks", "budget", "expected"),
    [
        ([(100, 0), (100, 0)], 64, [32, 32]),
        ([(100, 0), (100, 0), (100, 0)], 64, [32, 16, 16]),
        ([(100, 0), (100, 32), (100, 16)], 64, [32, 16, 16]),
        ([(100, 0), (30, 0), (100, 0)], 64, [32, 16, 16]),
        ([(100, 48), (100, 80), (100, 64), (100, 32)], 52, [16, 0, 16, 16]),
        ([(10, 0), (10, 0), (100, 0)], 64, [10, 10, 32]),
        ([(100, 0)] * 5, 64, [16, 16, 16, 16, 0]),
        ([(100, 5), (100, 0)], 64, [27, 32]),
        ([(100, 0), (100, 0)], 7, [7, 0]),
        ([(100, 0), (10, 0), (100, 0)], 64, [32, 10, 16]),
        ([(4000, 0), (10, 0), (4000, 0)], 16, [6, 10, 0]),
        ([], 64, []),
    ],
)
def test_equal_progress(chunks: list[tuple[int, int]], budget: int, expected: list[int]) -> None:
    assert share_equally([chunk(*each) for each in chunks], budget, limits()) == expected


@pytest.mark.parametrize("share", SHARES)
def test_unchunked_is_whole_or_waits_with_all_behind(share: Callable[..., list[int]]) -> None:
    whole = limits(chunked=False, threshold=8)
    assert share([chunk(40), chunk(20), chunk(10)], 64, whole) == [40, 20, 0]
    assert share([chunk(40), chunk(30), chunk(10)], 64, whole) == [40, 0, 0]
    assert share([chunk(64)], 63, whole) == [0]


@pytest.mark.parametrize("share", SHARES)
def test_unchunked_still_cuts_what_no_step_could_hold(share: Callable[..., list[int]]) -> None:
    """A sequence that was preempted after it had grown beyond max_num_tokens."""
    assert share([chunk(70), chunk(10)], 64, limits(chunked=False)) == [64, 0]
    assert share([chunk(70, 64), chunk(10)], 64, limits(chunked=False)) == [6, 10]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("chunked", [True, False])
def test_random_shares_keep_the_rules(share: Callable[..., list[int]], chunked: bool) -> None:
    chance = random.Random(1)
    for _ in range(3000):
        subject = limits(chance.choice([1, 2, 7, 16]), 64, chunked, chance.choice([0, 0, 1, 9, 30]))
        chunks = []
        for _ in range(chance.randrange(1, 7)):
            num_tokens = chance.choice([2, 5, 16, 17, 40, 64, 65, 300])
            chunks.append(chunk(num_tokens, chance.randrange(num_tokens)))
        budget = chance.randrange(1, 65)
        lengths = share(chunks, budget, subject)
        assert sum(lengths) <= budget
        assert all(0 <= length <= each.num_uncomputed for length, each in zip(lengths, chunks, strict=True))
        if chunked:
            assert lengths[0] > 0, "the head gets something"
            assert max(lengths) <= (subject.long_prefill_token_threshold or budget)
            full = [each.num_uncomputed <= length for length, each in zip(lengths, chunks, strict=True)]
            if subject.long_prefill_token_threshold == 0 and not all(full):
                assert budget - sum(lengths) < subject.page_size, "a page's worth of tokens is left unused"
