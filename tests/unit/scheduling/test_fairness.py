"""Nobody waits for ever and nobody waits long for a long prompt; counted in steps."""

from __future__ import annotations

import pytest
from scheduling_harness import Harness, make_sequence

from paged_engine.config import EngineConfig
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.scheduler import SECONDS_PER_PRIORITY_LEVEL, Scheduler
from paged_engine.scheduling.sequence import Sequence

POLICIES = ["first_come_first_served", "equal_progress"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("max_num_tokens", "page_size", "num_prompt"),
    [(2048, 16, 4000), (64, 16, 4000), (33, 16, 1000), (17, 16, 1000), (17, 1, 320), (65, 64, 1000)],
)
@pytest.mark.parametrize("num_long", [1, 3])
def test_a_long_prompt_holds_up_neither_a_stream_nor_a_newcomer(
    policy: str, max_num_tokens: int, page_size: int, num_prompt: int, num_long: int
) -> None:
    harness = Harness(
        page_size=page_size,
        num_pages=(num_prompt * num_long + 1000) // page_size,
        max_num_tokens=max_num_tokens,
        max_batch_size=8,
        chunking_policy=policy,
    )
    stream = make_sequence(3, 300, name="stream", arrival=0)
    harness.add(stream)
    harness.step()
    long_ones = [make_sequence(num_prompt, 2, name=f"long {i}", arrival=1 + i) for i in range(num_long)]
    harness.add(*long_ones)
    harness.step()
    newcomer = make_sequence(10, 5, name="newcomer", arrival=10)
    harness.add(newcomer)
    while stream.num_output_tokens < 300:
        before = stream.num_output_tokens
        harness.step()
        assert stream.num_output_tokens == before + 1, "the stream waited"
    harness.run()
    waited = harness.first_token_step[newcomer] - 2
    assert waited <= 10
    if max_num_tokens < 2048:
        assert harness.finish_step[newcomer] < harness.first_token_step[long_ones[0]] / 2
    assert all(sequence in harness.finish_step for sequence in long_ones)


def test_a_long_prompt_keeps_half_its_pace_under_a_flood_of_short_ones() -> None:
    def steps_for_long(num_short_each_step: int) -> int:
        harness = Harness(page_size=4, num_pages=2000, max_num_tokens=64, max_batch_size=32)
        long_one = make_sequence(2000, 1, name="long", arrival=0)
        harness.add(long_one)
        while long_one not in harness.first_token_step:
            for i in range(num_short_each_step):
                harness.add(make_sequence(30, 1, name=f"{i}", arrival=1 + harness.num_steps))
            harness.step()
        return harness.num_steps

    assert steps_for_long(5) <= 2.2 * steps_for_long(0)


def test_prompts_of_one_size_are_served_in_order() -> None:
    harness = Harness(num_pages=400, max_num_tokens=64, max_batch_size=8)
    sequences = [make_sequence(300 + i, 1, name=f"{i}", arrival=i) for i in range(6)]
    harness.add(*reversed(sequences))
    harness.run()
    steps = [harness.first_token_step[sequence] for sequence in sequences]
    assert steps == sorted(steps)
    assert len(set(steps)) == 6


def test_equal_progress_brings_equal_prompts_forward_together() -> None:
    harness = Harness(num_pages=400, max_num_tokens=64, max_batch_size=8, chunking_policy="equal_progress")
    sequences = [make_sequence(320, 1, name=f"{i}", arrival=i) for i in range(4)]
    harness.add(*sequences)
    while harness.scheduler.has_work:
        harness.step()
        computed = [sequence.num_computed for sequence in harness.scheduler.running]
        assert max(computed, default=0) - min(computed, default=0) <= 16
    assert len(set(harness.finish_step.values())) == 1


def test_equal_progress_shares_among_more_than_a_step_has_pages_for() -> None:
    harness = Harness(num_pages=400, max_num_tokens=64, max_batch_size=16, chunking_policy="equal_progress")
    harness.add(*(make_sequence(100 + i, 3, name=f"{i}", arrival=i) for i in range(16)))
    harness.run()


def test_priority_decides_among_those_that_wait_and_for_the_tokens_of_a_step() -> None:
    harness = Harness(num_pages=400, max_num_tokens=64, max_batch_size=2)
    running = make_sequence(1000, 1, name="running", arrival=0, priority=1)
    harness.add(running)
    harness.step()
    low = make_sequence(300, 1, name="low", arrival=1, priority=2)
    high = make_sequence(300, 1, name="high", arrival=2, priority=0)
    harness.add(low, high)
    harness.run()
    steps = [harness.first_token_step[sequence] for sequence in (high, running, low)]
    assert steps == sorted(steps)


def test_a_priority_does_not_preempt_what_runs() -> None:
    harness = Harness(page_size=4, num_pages=12, max_num_tokens=16, max_batch_size=8)
    low = make_sequence(16, 20, name="low", arrival=0, priority=9)
    harness.add(low)
    harness.step()
    harness.add(make_sequence(30, 1, name="high", arrival=1, priority=0))
    harness.run()
    assert low.num_preemptions == 0


@pytest.mark.parametrize("gap", [1, 3])
def test_a_low_priority_waits_at_most_its_levels_worth_of_time(gap: int) -> None:
    """One urgent request a second for ever, each taking the whole engine for a step: the other one's turn comes."""
    harness = Harness(num_pages=8, max_num_tokens=17, max_batch_size=1)
    low = make_sequence(4, 1, name="low", arrival=0.5, priority=gap)
    harness.add(low)
    second = 0
    while low not in harness.first_token_step:
        harness.add(
            *(make_sequence(4, 1, name="high", arrival=second) for _ in range(2 if second == 0 else 1))
        )
        harness.step()
        second += 1
    worth = gap * SECONDS_PER_PRIORITY_LEVEL
    assert worth < second <= worth + 3


def test_a_very_low_number_goes_first_whatever_has_waited() -> None:
    harness = Harness(max_num_tokens=17, max_batch_size=1)
    patient = make_sequence(4, 1, name="patient", arrival=-1e6)
    urgent = make_sequence(4, 1, name="urgent", arrival=0, priority=-(2**31))
    harness.add(patient, urgent)
    harness.run()
    assert harness.finish_step[urgent] < harness.finish_step[patient]


class CountingPool(PagePool):
    """Counts how often sequences are looked up, which is what a look at the queue costs."""

    num_matches = 0

    def match(self, sequence: Sequence) -> list[int]:
        self.num_matches += 1
        return super().match(sequence)


@pytest.mark.parametrize(
    ("num_prompt", "num_pages", "max_batch_size", "same_prompt"),
    [(900, 40_000, 500, False), (1000, 130, 500, False), (600, 4000, 500, True), (2, 4000, 64, False)],
    ids=["long prompts", "lacking pages", "one prompt", "no places"],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_looks_at_no_more_sequences_however_many_wait(
    policy: str, num_prompt: int, num_pages: int, max_batch_size: int, same_prompt: bool
) -> None:
    def looked_at(num_waiting: int) -> int:
        config = EngineConfig(
            model="none", max_num_tokens=512, max_batch_size=max_batch_size, chunking_policy=policy
        )
        pool = CountingPool(num_pages, 16)
        scheduler = Scheduler(config, pool)
        for i in range(num_waiting):
            scheduler.add(make_sequence(num_prompt, 8, name="" if same_prompt else f"{i}", arrival=i))
        for _ in range(2):
            plan = scheduler.plan()
            scheduler.advance(plan)
            for item in plan.ranges:
                if item.samples:
                    scheduler.append_token(item.sequence, 1)
        return pool.num_matches

    assert looked_at(200) == looked_at(4000) <= 2 * 64
