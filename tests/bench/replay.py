"""Replays a trace through the real scheduler and page pool in modelled time, for `simulate_scheduler`."""

from __future__ import annotations

import heapq
import itertools
from array import array
from dataclasses import dataclass, field

from traffic import Arrival

from paged_engine.config import EngineConfig
from paged_engine.request import SamplingParams
from paged_engine.scheduling import scheduler
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.sequence import Sequence

SAMPLING = SamplingParams()


@dataclass
class Observed:
    """What a replay measured; times in seconds and in steps."""

    first_seconds: list[float] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    short_first_seconds: list[float] = field(default_factory=list)
    between_seconds: list[float] = field(default_factory=list)
    between_steps: list[int] = field(default_factory=list)
    pages_held: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_computed: int = 0
    num_needed: int = 0
    num_prompt: int = 0
    num_output: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    seconds: float = 0.0


class Replay:
    """One run of a trace: an event loop whose time is the sum of the steps' modelled times."""

    def __init__(
        self, config: EngineConfig, num_pages: int, step_seconds: float, token_seconds: float
    ) -> None:
        self.pool = PagePool(num_pages, config.page_size, config.enable_prefix_caching)
        self.scheduler = scheduler.Scheduler(config, self.pool)
        self.max_num_tokens = config.max_num_tokens
        self.can_chunk = config.enable_chunked_prefill
        self.step_seconds = step_seconds
        self.token_seconds = token_seconds
        self.now = 0.0
        self.observed = Observed()
        self.asked: dict[Sequence, Arrival] = {}
        self.last_token: dict[Sequence, tuple[float, int]] = {}
        self.next_output = itertools.count(-1, -1)

    def run(self, arrivals: list[Arrival]) -> Observed:
        """Serve all arrivals to their ends."""
        self.events = list(arrivals)
        heapq.heapify(self.events)
        while self.events or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, self.events[0].time)
            while self.events and self.events[0].time <= self.now:
                self.submit(heapq.heappop(self.events))
            if self.scheduler.has_work:
                self.step()
        self.observed.seconds = self.now
        self.observed.num_preemptions = self.scheduler.num_preemptions
        self.observed.num_cached = self.scheduler.num_prefix_cached_tokens
        return self.observed

    def submit(self, arrival: Arrival) -> None:
        """Queue a request, unless it would be refused: a prompt that needs chunks where there are none."""
        if not self.can_chunk and len(arrival.prompt) > self.max_num_tokens:
            return
        sequence = Sequence(
            "",
            arrival.prompt,
            SAMPLING,
            max_num_tokens=len(arrival.prompt) + arrival.max_tokens,
            arrival_time=arrival.time,
        )
        self.asked[sequence] = arrival
        self.last_token[sequence] = (arrival.time, self.observed.num_steps)
        self.scheduler.add(sequence)

    def step(self) -> None:
        """Plan, let the modelled time pass, take in the new tokens."""
        plan = self.scheduler.plan()
        self.now += self.step_seconds + plan.num_tokens * self.token_seconds
        self.observed.num_steps += 1
        self.observed.num_computed += plan.num_tokens
        self.observed.pages_held.append(self.pool.num_held / self.pool.num_total)
        sampling = [item.sequence for item in plan.ranges if item.samples]
        self.scheduler.advance(plan)
        for sequence in sampling:
            self.take_token(sequence)

    def take_token(self, sequence: Sequence) -> None:
        """Note how long a token took, and end the sequence with its last."""
        seen, asked = self.observed, self.asked[sequence]
        before, step_before = self.last_token[sequence]
        if sequence.num_output_tokens == 0:
            seen.first_seconds.append(self.now - before)
            seen.first_steps.append(seen.num_steps - step_before)
            if sequence.num_prompt_tokens <= 200:
                seen.short_first_seconds.append(self.now - before)
        else:
            seen.between_seconds.append(self.now - before)
            seen.between_steps.append(seen.num_steps - step_before)
        self.last_token[sequence] = (self.now, seen.num_steps)
        self.scheduler.append_token(sequence, next(self.next_output))
        if sequence.num_output_tokens >= asked.num_output:
            self.end(sequence, asked)

    def end(self, sequence: Sequence, asked: Arrival) -> None:
        """Finish a sequence and, in a conversation, let the user think about the next question."""
        self.scheduler.finish(sequence)
        self.observed.num_needed += sequence.num_tokens - 1 - sequence.num_cached
        self.observed.num_prompt += sequence.num_prompt_tokens
        self.observed.num_output += sequence.num_output_tokens
        del self.asked[sequence], self.last_token[sequence]
        if asked.follow_ups:
            thought, question, answer = asked.follow_ups[0]
            new_tokens = array("i", (next(self.next_output) for _ in range(question)))
            prompt = sequence.token_ids + new_tokens
            follow_up = Arrival(self.now + thought, prompt, answer, max(answer, 512), asked.follow_ups[1:])
            heapq.heappush(self.events, follow_up)
