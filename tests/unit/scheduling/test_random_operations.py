"""Any order of operations: the books balance after each, nothing foreign is read, and everything comes to an end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling_harness import Harness, make_sequence

from paged_engine.scheduling import chunking
from paged_engine.scheduling.sequence import Sequence, SequenceStatus

CONFIGURATIONS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 2, 4, 7]),
        "num_pages": st.integers(12, 30),
        "max_batch_size": st.sampled_from([1, 2, 5]),
        "max_num_tokens": st.sampled_from([8, 13, 40]),
        "enable_chunked_prefill": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 1, 3, 8]),
        "chunking_policy": st.sampled_from(["first_come_first_served", "equal_progress"]),
        "scheduler_policy": st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
        "looks_ahead": st.booleans(),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, aborts and preempts; prompts of two tokens' alphabet make prefixes meet."""

    def __init__(self) -> None:
        super().__init__()
        self.harness: Harness
        self.sequences: list[Sequence] = []

    @initialize(configuration=CONFIGURATIONS)
    def load(self, configuration: dict[str, Any]) -> None:
        self.harness = Harness(**configuration)
        self.longest = self.harness.pool.num_total * self.harness.page_size
        self.longest_prompt = self.longest - 1
        if not self.harness.config.enable_chunked_prefill:
            self.longest_prompt = min(self.longest_prompt, self.harness.config.max_num_tokens)

    def add(
        self, prompt: list[int], max_tokens: int, priority: int, salt: str, scores_prompt: bool = False
    ) -> None:
        prompt = prompt[: self.longest_prompt]
        sequence = make_sequence(
            prompt,
            min(max_tokens, self.longest - len(prompt)),
            name=f"{len(self.sequences)}",
            arrival=float(self.harness.num_steps),
            priority=priority,
            salt=salt,
            scores_prompt=scores_prompt,
        )
        self.sequences.append(sequence)
        self.harness.add(sequence)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=60),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "s"]),
        scores_prompt=st.booleans(),
    )
    def add_new(
        self, prompt: list[int], max_tokens: int, priority: int, salt: str, scores_prompt: bool
    ) -> None:
        self.add(prompt, max_tokens, priority, salt, scores_prompt)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=9), max_tokens=st.integers(1, 30))
    def add_follow_up(self, data: st.DataObject, more: list[int], max_tokens: int) -> None:
        """The text of an earlier one, finished or not, and something more: a hit, or a wait for one."""
        earlier = data.draw(st.sampled_from(self.sequences))
        self.add([*earlier.token_ids, *more], max_tokens, earlier.priority, earlier.cache_salt)

    @precondition(lambda self: self.sequences and self.harness.scheduler.has_work)
    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.harness.scheduler.has_work:
                self.harness.step()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.scheduler.finish(data.draw(st.sampled_from(self.sequences)))

    @precondition(lambda self: self.sequences and self.harness.scheduler.num_running)
    @rule()
    def preempt(self) -> None:
        if self.harness.config.scheduler_policy == "max_utilization":
            self.harness.scheduler.preempt_last()

    @precondition(lambda self: self.sequences and self.harness.scheduler.num_running)
    @rule(data=st.data())
    def fail_a_step(self, data: st.DataObject) -> None:
        """A fault in the step ends its sequences; the plan is never advanced, and a step before it brings its tokens."""
        plan = self.harness.scheduler.plan()
        if self.harness.in_flight:
            self.harness.collect()
        for item in plan.ranges:
            self.harness.scheduler.finish(item.sequence)

    @invariant()
    def books_balance(self) -> None:
        if self.sequences:
            self.harness.check_integrity()
            alive = sum(sequence.status is not SequenceStatus.FINISHED for sequence in self.sequences)
            assert alive == self.harness.scheduler.num_running + self.harness.scheduler.num_waiting

    def teardown(self) -> None:
        if self.sequences:
            self.harness.run()
            assert all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_ten_thousand_random_operations(
    policy: str, enable_prefix_caching: bool, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunking, "MAX_SCORED_POSITIONS", 12)
    chance = random.Random(11)
    harness = Harness(
        page_size=4,
        num_pages=40,
        max_batch_size=6,
        max_num_tokens=24,
        scheduler_policy=policy,
        enable_prefix_caching=enable_prefix_caching,
        looks_ahead=looks_ahead,
    )
    alive: list[Sequence] = []
    num_done = 0
    for number in range(2_500):
        alive = [sequence for sequence in alive if sequence.status is not SequenceStatus.FINISHED]
        action = chance.random()
        if (action < 0.25 and len(alive) < 30) or not alive:
            common = [7] * chance.choice([0, 0, 8, 24])
            prompt = common + [chance.randrange(2) for _ in range(chance.choice([1, 3, 4, 9, 40]))]
            sequence = make_sequence(
                prompt,
                chance.randrange(1, 40),
                name=f"{number}",
                arrival=number,
                priority=chance.randrange(2),
                scores_prompt=chance.random() < 0.3,
            )
            alive.append(sequence)
            harness.add(sequence)
        elif action < 0.33:
            harness.scheduler.finish(chance.choice(alive))
        else:
            harness.step()
            num_done = len(harness.finish_step)
        harness.check_integrity()
    harness.run()
    assert num_done > 100
    assert (harness.scheduler.num_preemptions > 10) == (policy == "max_utilization")
    assert (harness.scheduler.num_prefix_cached_tokens > 100) == enable_prefix_caching
