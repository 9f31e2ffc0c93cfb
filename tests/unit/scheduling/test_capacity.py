"""A pool that is too small for everyone: who waits, who gives way, and that all come to their ends."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling_harness import Harness, make_sequence

from paged_engine.scheduling.sequence import Sequence, SequenceStatus


def crowded(**values: Any) -> Harness:
    return Harness(**{"page_size": 4, "num_pages": 10, "max_num_tokens": 16, "max_batch_size": 8, **values})


@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_two_of_sixty_percent_of_the_pool_both_finish(policy: str) -> None:
    harness = crowded(scheduler_policy=policy)
    pair = [make_sequence(8, 16, name=name, arrival=ord(name)) for name in "ab"]
    harness.add(*pair)
    harness.run()
    assert [sequence.num_output_tokens for sequence in pair] == [16, 16]
    assert harness.finish_step[pair[0]] == 16, "the first never waits"
    assert harness.scheduler.num_preemptions == (policy == "max_utilization")


def test_the_newest_gives_way_and_comes_back_first() -> None:
    harness = crowded()
    old, new, late = (make_sequence(8, 16, name=name, arrival=ord(name)) for name in "abc")
    harness.add(old, new)
    while not harness.scheduler.num_preemptions:
        harness.step()
    assert (old.status, new.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert (new.num_computed, len(new.page_table), new.num_preemptions) == (0, 0, 1)
    harness.add(late)
    harness.run()
    assert harness.finish_step[old] < harness.finish_step[new] < harness.finish_step[late]


def test_the_lowest_priority_gives_way_before_the_newest() -> None:
    harness = crowded()
    unimportant = make_sequence(8, 16, name="u", arrival=1, priority=3)
    important = make_sequence(8, 16, name="i", arrival=2, priority=0)
    harness.add(unimportant, important)
    harness.run()
    assert (unimportant.num_preemptions, important.num_preemptions) == (1, 0)


def test_it_preempts_no_more_than_it_must() -> None:
    harness = crowded(num_pages=13)
    harness.add(*(make_sequence(7, 13, name=name, arrival=ord(name)) for name in "abc"))
    preempted = [plan.preempted for plan in harness.run() if plan.preempted]
    assert [[item.request_id for item in group] for group in preempted] == [["c"]]


def test_what_is_preempted_keeps_its_pages_while_nobody_needs_them() -> None:
    harness = crowded(num_pages=20)
    old, new = (make_sequence(25, 30, name=name, arrival=ord(name)) for name in "ab")
    harness.add(old, new)
    while not new.num_preemptions:
        harness.step()
    num_computed_before = harness.num_tokens_computed
    harness.scheduler.finish(old)
    harness.step()
    assert new.num_computed >= new.num_tokens - 4
    assert harness.num_tokens_computed - num_computed_before < 8


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_at_token_37_the_text_goes_on_where_it_was(times: int, enable_prefix_caching: bool) -> None:
    """However often, also while it is coming back: counts stay, nothing is sampled twice, the text is that of a run alone."""

    def text(times: int) -> Sequence:
        harness = crowded(
            num_pages=40, enable_prefix_caching=enable_prefix_caching, long_prefill_token_threshold=3
        )
        subject = make_sequence(11, 60, name="s")
        harness.add(subject)
        while subject.num_output_tokens < 37:
            harness.step()
        first_token_step = harness.first_token_step[subject]
        for _ in range(times):
            harness.scheduler.preempt_last()
            harness.scheduler.check_integrity()
            assert (subject.num_output_tokens, subject.num_computed) == (37, 0)
            harness.step()
        harness.run()
        assert harness.first_token_step[subject] == first_token_step
        return subject

    subject = text(times)
    assert subject.num_preemptions == times
    assert subject.num_output_tokens == 60
    assert subject.token_ids == text(0).token_ids


@pytest.mark.parametrize("policy", ["first_come_first_served", "equal_progress"])
def test_guaranteed_no_evict_never_preempts(policy: str) -> None:
    harness = crowded(num_pages=24, scheduler_policy="guaranteed_no_evict", chunking_policy=policy)
    sequences = [make_sequence(5 + i % 9, 1 + 7 * i % 40, name=f"{i}", arrival=i) for i in range(20)]
    for sequence in sequences:
        harness.add(sequence)
        harness.step()
        needed = sum(harness.pool.pages_for(item.max_num_tokens) for item in harness.scheduler.running)
        assert needed <= 24
    plans = harness.run()
    assert harness.scheduler.num_preemptions == 0
    assert not any(plan.preempted for plan in plans)


def test_guaranteed_no_evict_counts_shared_pages_once() -> None:
    harness = crowded(num_pages=11, scheduler_policy="guaranteed_no_evict")
    harness.add(*(make_sequence(range(24), 4, index=index) for index in range(3)))
    harness.step()
    harness.step()
    harness.step()
    assert harness.scheduler.num_running == 3, "7 pages each, 5 of them the same"
    harness.run()


@pytest.mark.parametrize(("policy", "together"), [("max_utilization", 4), ("guaranteed_no_evict", 1)])
def test_a_huge_max_tokens_does_not_serialise_unless_it_is_guaranteed(policy: str, together: int) -> None:
    harness = crowded(num_pages=20, scheduler_policy=policy)
    sequences = [make_sequence(4, 60, name=f"{i}", arrival=i) for i in range(4)]
    harness.add(*sequences)
    most = 0
    while harness.scheduler.has_work:
        harness.step()
        most = max(most, harness.scheduler.num_running)
        for sequence in sequences:
            if sequence.num_output_tokens == 10:
                harness.scheduler.finish(sequence)
    assert most == together
    assert harness.scheduler.num_preemptions == 0


def test_a_newcomer_is_not_admitted_just_to_be_preempted() -> None:
    """One free page for each that runs: what was admitted runs for at least a page's tokens."""
    harness = crowded(num_pages=40, max_batch_size=12, max_num_tokens=64)
    sequences = [make_sequence(6 + i % 5, 60, name=f"{i}", arrival=i) for i in range(24)]
    harness.add(*sequences)
    admitted: dict[Sequence, int] = {}
    while harness.scheduler.has_work:
        plan = harness.step()
        for sequence in plan.preempted:
            assert harness.num_steps - admitted.pop(sequence) >= harness.page_size
        for sequence in harness.scheduler.running:
            admitted.setdefault(sequence, harness.num_steps)
    assert harness.scheduler.num_preemptions > 0


def test_a_sequence_alone_uses_the_pool_to_the_last_page() -> None:
    harness = crowded()
    sequence = make_sequence(20, 20, name="a")
    harness.add(sequence)
    harness.run()
    assert sequence.num_output_tokens == 20


def test_one_that_lacks_pages_is_not_overtaken_for_ever() -> None:
    harness = crowded(num_pages=20)
    harness.add(make_sequence(4, 40, name="stream", arrival=0))
    big = make_sequence(64, 1, name="big", arrival=1)
    harness.add(big)
    for arrival in range(2, 200):
        if big in harness.first_token_step:
            break
        harness.add(make_sequence(4, 4, name="small", arrival=arrival))
        harness.step()
    assert big in harness.first_token_step
    assert harness.num_steps < 60


@pytest.mark.parametrize("num_prompt", [60, 63, 64])
def test_without_chunks_what_has_outgrown_a_step_still_comes_back(num_prompt: int) -> None:
    harness = crowded(num_pages=30, max_num_tokens=64, enable_chunked_prefill=False)
    old, new = (make_sequence(num_prompt, 50, name=name, arrival=ord(name)) for name in "ab")
    harness.add(old)
    while old.num_output_tokens < 20:
        harness.step()
    harness.scheduler.preempt_last()
    assert old.num_tokens > 64
    harness.add(new)
    harness.run()
    assert (old.num_output_tokens, new.num_output_tokens) == (50, 50)


def test_without_chunks_a_prompt_is_computed_whole_or_not_at_all() -> None:
    harness = crowded(num_pages=100, max_num_tokens=32, enable_chunked_prefill=False)
    sequences = [
        make_sequence(length, 6, name=f"{i}", arrival=i) for i, length in enumerate((20, 12, 1, 32, 5, 30))
    ]
    harness.add(*sequences)
    for plan in harness.run():
        assert all(item.num_tokens in (1, item.sequence.num_prompt_tokens) for item in plan.ranges)
    order = sorted(sequences, key=lambda sequence: harness.first_token_step[sequence])
    assert order == sequences, "nobody is overtaken"
