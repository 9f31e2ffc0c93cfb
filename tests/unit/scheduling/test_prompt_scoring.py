"""Sequences whose prompt is scored: the logits of each prompt position are wanted once, whatever happens on the way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from scheduling_harness import Harness, make_sequence

from paged_engine.request import SamplingParams
from paged_engine.scheduling import chunking
from paged_engine.scheduling.sequence import ScheduledRange, Sequence


def scored(item: ScheduledRange) -> list[int]:
    return list(item.scored)


def test_the_scored_positions_are_those_of_the_prompt_but_its_last() -> None:
    sequence = make_sequence(10, scores_prompt=True)
    assert scored(ScheduledRange(sequence, 0, 4)) == [0, 1, 2, 3]
    assert scored(ScheduledRange(sequence, 4, 10)) == [4, 5, 6, 7, 8]
    sequence.num_scored = 6
    assert scored(ScheduledRange(sequence, 0, 4)) == []
    assert scored(ScheduledRange(sequence, 4, 10)) == [6, 7, 8]
    sequence.num_scored = 9
    assert scored(ScheduledRange(sequence, 0, 10)) == []
    assert scored(ScheduledRange(make_sequence(10), 0, 10)) == []
    assert scored(ScheduledRange(make_sequence(1, scores_prompt=True), 0, 1)) == []


def test_the_first_sequence_of_a_request_scores_for_all() -> None:
    sampling = SamplingParams(prompt_logprobs=3, n=2)
    assert [Sequence("r", [1, 2], sampling, max_num_tokens=4, index=i).scores_prompt for i in range(2)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("threshold", [0, 1, 5])
def test_each_position_is_scored_once_in_chunks_of_any_size(threshold: int) -> None:
    harness = Harness(
        page_size=4, max_num_tokens=17, max_batch_size=4, long_prefill_token_threshold=threshold
    )
    sequences = [
        make_sequence(length, name=f"{length}", scores_prompt=length % 2 == 0) for length in (2, 31, 40, 8, 1)
    ]
    harness.add(*sequences)
    harness.run()  # the harness checks the rest


def test_pages_from_the_cache_have_no_logits_so_none_are_taken_but_others_may_take_its_own() -> None:
    harness = Harness(page_size=4, num_pages=64)
    prompt = list(range(20))
    harness.add(make_sequence(prompt, name="a"))
    harness.run()
    scoring = make_sequence(prompt, name="b", scores_prompt=True, salt="other")
    again = make_sequence(prompt, name="c", scores_prompt=True)
    harness.add(scoring, again)
    harness.run()
    assert (scoring.num_cached, again.num_cached) == (0, 0)
    plain = make_sequence(prompt, name="d", salt="other")
    harness.add(plain)
    harness.run()
    assert plain.num_cached == 16


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 6])
def test_preempted_it_goes_on_where_it_was(num_steps: int) -> None:
    """What is scored may come from the cache when it resumes, the rest may not; nothing is scored twice."""
    harness = Harness(page_size=4, num_pages=64, long_prefill_token_threshold=6)
    sequence = make_sequence(23, max_tokens=6, scores_prompt=True)
    harness.add(sequence)
    for _ in range(num_steps):
        harness.step()
    done = sequence.num_computed
    harness.scheduler.preempt_last()
    [item] = harness.step().ranges
    assert item.start == min(done, sequence.num_tokens - 1) // 4 * 4
    harness.run()


def test_with_the_cache_off_it_is_computed_again_and_scored_no_more() -> None:
    harness = Harness(page_size=4, long_prefill_token_threshold=6, enable_prefix_caching=False)
    sequence = make_sequence(23, scores_prompt=True)
    harness.add(sequence)
    harness.step()
    harness.step()
    harness.scheduler.preempt_last()
    assert [scored(item) for item in harness.step().ranges] == [[]]
    harness.run()


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
def test_a_step_scores_a_bounded_number_of_positions(chunked: bool, policy: str) -> None:
    harness = Harness(
        page_size=16,
        num_pages=512,
        max_num_tokens=2048,
        max_batch_size=16,
        enable_chunked_prefill=chunked,
        chunking_policy=policy,
    )
    long = [make_sequence(900, name=f"long {i}", scores_prompt=True) for i in range(3)]
    plain = make_sequence(1000, name="plain")
    short = make_sequence(10, name="short", scores_prompt=True)
    harness.add(*long, plain, short)
    totals = [0]
    while harness.scheduler.has_work:
        harness.step()
        totals.append(sum(map(len, harness.scored.values())))
    most = max(after - before for before, after in pairwise(totals))
    assert totals[-1] == 3 * 899 + 9
    assert chunking.MAX_SCORED_POSITIONS // 2 <= most <= chunking.MAX_SCORED_POSITIONS
    assert harness.first_token_step[plain] <= 3
    assert harness.first_token_step[short] < harness.first_token_step[long[0]]
