"""The scheduler's steps: order, budget, exact pages, and taking sequences out at every moment."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from scheduling_harness import Harness, make_sequence

from paged_engine.scheduling.sequence import Sequence, SequenceStatus, StepPlan


def ranges(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(item.sequence.request_id, item.start, item.end) for item in plan.ranges]


def test_one_sequence_from_prompt_to_end_with_exact_pages() -> None:
    harness = Harness(page_size=4, num_pages=8, max_num_tokens=8, max_batch_size=2)
    sequence = make_sequence(9, 4, name="a")
    harness.add(sequence)
    assert (sequence.status, harness.scheduler.num_waiting) == (SequenceStatus.WAITING, 1)
    assert ranges(harness.step()) == [("a", 0, 8)]
    assert sequence.page_table == array("i", [0, 1, 2])
    assert ranges(harness.step()) == [("a", 8, 9)]
    assert [ranges(harness.step()) for _ in range(3)] == [[("a", 9, 10)], [("a", 10, 11)], [("a", 11, 12)]]
    assert sequence.status is SequenceStatus.FINISHED
    assert not harness.scheduler.has_work
    assert (harness.pool.num_held, harness.pool.num_cached, harness.pool.num_free) == (0, 3, 8)


def test_a_page_is_added_when_a_sequence_grows_into_it() -> None:
    harness = Harness(page_size=4, num_pages=8, max_num_tokens=8, max_batch_size=2)
    sequence = make_sequence(4, 6, name="a")
    harness.add(sequence)
    tables = []
    while harness.scheduler.has_work:
        tables.append(len(harness.step().ranges and sequence.page_table))
    assert tables == [1, 2, 2, 2, 2, 0]


def test_decoding_comes_first_then_chunks_then_newcomers() -> None:
    harness = Harness(page_size=4, num_pages=40, max_num_tokens=16, max_batch_size=4)
    harness.add(*(make_sequence(3, 9, name=name, arrival=1) for name in "ab"))
    assert ranges(harness.step()) == [("a", 0, 3), ("b", 0, 3)]
    harness.add(make_sequence(30, name="c", arrival=2), make_sequence(15, name="d", arrival=3))
    assert ranges(harness.step()) == [("a", 3, 4), ("b", 3, 4), ("c", 0, 12)]
    assert ranges(harness.step()) == [("a", 4, 5), ("b", 4, 5), ("c", 12, 24)]
    assert ranges(harness.step()) == [("a", 5, 6), ("b", 5, 6), ("c", 24, 30), ("d", 0, 8)]
    assert ranges(harness.step()) == [("a", 6, 7), ("b", 6, 7), ("c", 30, 31), ("d", 8, 15)]


def test_single_tokens_come_first_in_a_plan() -> None:
    """A prompt of one token behind a longer one: attention may count on the order."""
    harness = Harness(max_num_tokens=64, max_batch_size=4)
    harness.add(make_sequence(20, name="a", arrival=1), make_sequence(1, name="b", arrival=2))
    assert ranges(harness.step()) == [("b", 0, 1), ("a", 0, 20)]


def test_no_more_run_than_the_batch_holds() -> None:
    harness = Harness(max_num_tokens=64, max_batch_size=3)
    sequences = [make_sequence(2, 3, name=f"{i}", arrival=i) for i in range(8)]
    harness.add(*sequences)
    for _ in range(3):
        harness.step()
        assert harness.scheduler.num_running <= 3
    harness.run()
    steps = [harness.finish_step[sequence] for sequence in sequences]
    assert steps == [3, 3, 3, 6, 6, 6, 9, 9]


@pytest.mark.parametrize("threshold", [1, 8, 15, 17])
@pytest.mark.parametrize("page_size", [1, 2, 7, 16])
def test_the_threshold_forces_exact_chunks(threshold: int, page_size: int) -> None:
    harness = Harness(
        page_size=page_size,
        num_pages=200,
        max_num_tokens=64,
        max_batch_size=4,
        long_prefill_token_threshold=threshold,
    )
    harness.add(make_sequence(40, 1, name="a"))
    lengths = [plan.ranges[0].num_tokens for plan in harness.run()]
    assert lengths == [threshold] * (40 // threshold) + ([40 % threshold] if 40 % threshold else [])


def test_a_sequence_that_can_never_run_is_refused() -> None:
    harness = Harness(page_size=4, num_pages=4)
    harness.add(make_sequence(8, 8, name="fits"))
    with pytest.raises(ValueError, match="may need 5 pages, the pool has 4"):
        harness.add(make_sequence(8, 9, name="too long"))
    harness.run()


def queued(harness: Harness, sequence: Sequence) -> None:
    harness.add(sequence)


def in_its_first_chunk(harness: Harness, sequence: Sequence) -> None:
    harness.add(sequence)
    harness.step()
    assert 0 < sequence.num_computed < sequence.num_prompt_tokens


def in_a_later_chunk(harness: Harness, sequence: Sequence) -> None:
    in_its_first_chunk(harness, sequence)
    harness.step()
    assert 32 < sequence.num_computed < sequence.num_prompt_tokens


def between_its_last_chunk_and_its_first_decode(harness: Harness, sequence: Sequence) -> None:
    in_its_first_chunk(harness, sequence)
    while sequence.num_output_tokens == 0:
        harness.step()
    assert sequence.num_computed == sequence.num_prompt_tokens


def decoding(harness: Harness, sequence: Sequence) -> None:
    between_its_last_chunk_and_its_first_decode(harness, sequence)
    harness.step()


def preempted(harness: Harness, sequence: Sequence) -> None:
    harness.add(make_sequence(97, 95, name="older", arrival=-1))
    harness.add(sequence)
    while not sequence.num_preemptions:
        harness.step()
    assert sequence.status is SequenceStatus.WAITING


def planned(harness: Harness, sequence: Sequence) -> None:
    """A fault in the step, or an abort while it runs, ends it before the scheduler hears that the step is over."""
    decoding(harness, sequence)
    plan = harness.scheduler.plan()
    harness.scheduler.finish(sequence)
    harness.scheduler.advance(plan)


def finished(harness: Harness, sequence: Sequence) -> None:
    harness.add(sequence)
    harness.run()


@pytest.mark.parametrize(
    "reach",
    [
        queued,
        in_its_first_chunk,
        in_a_later_chunk,
        between_its_last_chunk_and_its_first_decode,
        decoding,
        preempted,
        planned,
        finished,
    ],
)
@pytest.mark.parametrize("num_neighbours", [0, 2])
def test_cancelled_at_any_moment_the_pool_is_clean(
    reach: Callable[[Harness, Sequence], None], num_neighbours: int
) -> None:
    harness = Harness(page_size=16, num_pages=16, max_num_tokens=40, max_batch_size=4)
    harness.add(*(make_sequence(1, 3, name=f"n{i}", arrival=-2) for i in range(num_neighbours)))
    sequence = make_sequence(100, 60, name="a")
    reach(harness, sequence)
    for _ in range(2):
        harness.scheduler.finish(sequence)
        harness.scheduler.check_integrity()
        assert sequence.status is SequenceStatus.FINISHED
        assert not sequence.page_table
    num_tokens = sequence.num_tokens
    harness.run()
    assert sequence.num_tokens == num_tokens, "it was computed after it was cancelled"


def test_finishing_a_sequence_that_was_never_added_does_no_harm() -> None:
    harness = Harness()
    harness.add(make_sequence(3, name="a"))
    harness.scheduler.finish(make_sequence(3, name="b"))
    assert harness.scheduler.num_waiting == 1
    harness.run()


def test_a_step_that_failed_leaves_nothing_in_the_index() -> None:
    harness = Harness()
    sequence = make_sequence(40, name="a")
    harness.add(sequence)
    plan = harness.scheduler.plan()
    harness.scheduler.finish(sequence)
    harness.scheduler.advance(plan)
    harness.scheduler.check_integrity()
    assert (harness.pool.num_held, harness.pool.num_cached) == (0, 0)
    harness.add(make_sequence(40, name="a"))
    harness.run()


def test_sent_back_while_its_token_is_pending_it_waits_for_that() -> None:
    harness = Harness(looks_ahead=True)
    sequence = make_sequence(20, 4, name="a")
    harness.add(sequence)
    harness.step()
    assert sequence.num_pending == 1
    harness.scheduler.preempt_last()
    assert harness.scheduler.plan().ranges == ()
    harness.collect()
    harness.run()
    assert len(sequence.token_ids) == 24


def test_a_last_token_that_is_pending_takes_no_page() -> None:
    """Each of the two computes 8 of its 9 tokens, which fill the pool."""
    harness = Harness(looks_ahead=True, page_size=4, num_pages=4, max_num_tokens=32, max_batch_size=2)
    harness.add(*(make_sequence(4, 5, name=name) for name in "ab"))
    harness.run()
    assert harness.scheduler.num_preemptions == 0


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_pages_of_generated_tokens_are_found_later(looks_ahead: bool) -> None:
    """A page whose last token was pending when it was computed is no exception."""
    harness = Harness(looks_ahead=looks_ahead, page_size=4, num_pages=16)
    sequence = make_sequence(4, 13, name="a")
    harness.add(sequence)
    harness.run()
    assert harness.pool.num_cached == 4
    follow_up = make_sequence(sequence.token_ids, 2, name="b")
    harness.add(follow_up)
    harness.run()
    assert follow_up.num_cached == 16
