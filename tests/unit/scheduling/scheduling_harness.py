"""Runs the real scheduler and pool over a model of KV memory instead of a model of language.

Each slot of the memory remembers the prefix whose last token was written there, and a step may read only slots that held
exactly the right prefixes before it began: any read of a page that is unwritten, stale or another's is an error at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any
from zlib import crc32

from paged_engine.config import EngineConfig
from paged_engine.request import SamplingParams
from paged_engine.scheduling import chunking
from paged_engine.scheduling.chunking import OVERTAKING_RATIO
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, SequenceStatus, StepPlan

SAMPLING = SamplingParams()
SCORING = SamplingParams(prompt_logprobs=0)


def greedy_token(text: SequenceOf[int]) -> int:
    """A next token that depends on the text alone, so that equal sequences stay equal."""
    return (sum(text) * 31 + len(text)) % 997


def make_sequence(
    prompt: Iterable[int] | int,
    max_tokens: int = 4,
    *,
    name: str = "",
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    index: int = 0,
    scores_prompt: bool = False,
) -> Sequence:
    """A sequence; a prompt given as a length has tokens of its own, different from those of any other name."""
    if isinstance(prompt, int):
        first = 1000 + 100_000 * (crc32(name.encode()) % 20_000)
        prompt = range(first, first + prompt)
    token_ids = list(prompt)
    return Sequence(
        name,
        token_ids,
        SCORING if scores_prompt else SAMPLING,
        max_num_tokens=len(token_ids) + max_tokens,
        index=index,
        priority=priority,
        cache_salt=salt,
        arrival_time=arrival,
    )


class Harness:
    """A scheduler, a pool, their KV memory, and a clock that counts steps."""

    def __init__(
        self, *, num_pages: int = 64, page_size: int = 16, looks_ahead: bool = False, **config: Any
    ) -> None:
        """`looks_ahead`: a step's tokens are appended when the next one has been launched."""
        values = {"model": "none", "page_size": page_size, "num_pages": num_pages, **config}
        self.config = EngineConfig.model_validate(values).fitted_to("cpu")
        self.pool = PagePool(num_pages, page_size, self.config.enable_prefix_caching)
        self.scheduler = Scheduler(self.config, self.pool)
        self.page_size = page_size
        self.looks_ahead = looks_ahead
        self.pending: dict[Sequence, list[int]] = {}
        """The tokens that launched steps have chosen and the scheduler does not know."""
        self.in_flight: list[list[Sequence]] = []
        self.memory: list[int | None] = [None] * (num_pages * page_size)
        self.prefixes: dict[Sequence, list[int]] = {}
        self.scored: dict[Sequence, list[int]] = {}
        """The positions whose logits have been scored, in the order in which that was done."""
        self.num_steps = 0
        self.num_tokens_computed = 0
        self.first_token_step: dict[Sequence, int] = {}
        self.finish_step: dict[Sequence, int] = {}

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> StepPlan:
        """Plan, check the plan, compute it in the memory, advance; append tokens, finish what is done."""
        assert self.scheduler.has_work, "nothing is left to do"
        decoding = [item for item in self.scheduler.running if item.num_uncomputed == 1 and not item.is_full]
        plan = self.scheduler.plan()
        if plan.ranges or not self.in_flight:
            self.num_steps += 1
            self.check_plan(plan, decoding)
            self.check_integrity()
            self.compute(plan)
            sampling = [item.sequence for item in plan.ranges if item.samples]
            for item in plan.ranges:
                self.scored.setdefault(item.sequence, []).extend(item.scored)
            for sequence in sampling:
                self.pending.setdefault(sequence, []).append(greedy_token(self.text(sequence)))
            self.scheduler.advance(plan)
            self.in_flight.append(sampling)
            self.check_integrity()
        while len(self.in_flight) > (self.looks_ahead and bool(plan.ranges)):
            self.collect()
            self.check_integrity()
        return plan

    def collect(self) -> None:
        """Append the tokens of the step that was launched first."""
        for sequence in self.in_flight.pop(0):
            self.append_token(sequence)

    def text(self, sequence: Sequence) -> list[int]:
        """All its tokens, pending ones too."""
        return [*sequence.token_ids, *self.pending.get(sequence, ())]

    def check_integrity(self) -> None:
        """The scheduler's own check, and that exactly the tokens pending are awaited."""
        self.scheduler.check_integrity(Counter(sequence for step in self.in_flight for sequence in step))

    def run(self, max_steps: int = 10_000) -> list[StepPlan]:
        """Step until nothing is left to do."""
        plans: list[StepPlan] = []
        while self.scheduler.has_work:
            assert len(plans) < max_steps, "the scheduler does not come to an end"
            plans.append(self.step())
        assert self.pool.num_held == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        return plans

    def append_token(self, sequence: Sequence) -> None:
        token = self.pending[sequence].pop(0)
        if sequence.status is SequenceStatus.FINISHED:
            return
        num_scored = sequence.num_prompt_tokens - 1 if sequence.scores_prompt else 0
        assert self.scored[sequence] == list(range(num_scored)), "each once, in order, before the first token"
        self.scheduler.append_token(sequence, token)
        self.first_token_step.setdefault(sequence, self.num_steps)
        if len(sequence.token_ids) >= sequence.max_num_tokens:
            self.finish_step[sequence] = self.num_steps
            self.scheduler.finish(sequence)

    # The memory

    def compute(self, plan: StepPlan) -> None:
        """Read what was there before the step, then write: no range may count on another one of the same step."""
        for item in plan.ranges:
            for position in range(item.start):
                found = self.memory[self.slot(item.sequence, position)]
                assert found == self.prefix(item.sequence, position), (
                    f"{item.sequence} reads position {position}"
                )
        written: set[int] = set()
        for item in plan.ranges:
            for position in range(item.start, item.end):
                slot = self.slot(item.sequence, position)
                assert slot not in written, f"slot {slot} is written twice in a step"
                written.add(slot)
                self.memory[slot] = self.prefix(item.sequence, position)
        self.num_tokens_computed += len(written)

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.page_table[position // self.page_size] * self.page_size + position % self.page_size

    def prefix(self, sequence: Sequence, position: int) -> int:
        """Stands for salt and tokens up to and including a position."""
        chain = self.prefixes.setdefault(sequence, [])
        if len(chain) <= position:
            for token in self.text(sequence)[len(chain) :]:
                chain.append(hash((chain[-1] if chain else sequence.cache_salt, token)))
        return chain[position]

    # The rules that hold for every plan

    def check_plan(self, plan: StepPlan, decoding: list[Sequence]) -> None:
        assert plan.ranges, "a step without progress"
        assert plan.num_tokens <= self.config.max_num_tokens
        sequences = [item.sequence for item in plan.ranges]
        assert len(set(sequences)) == len(sequences) <= self.config.max_batch_size
        assert sum(len(item.scored) for item in plan.ranges) <= chunking.MAX_SCORED_POSITIONS
        lengths = [item.num_tokens for item in plan.ranges]
        assert [length > 1 for length in lengths] == sorted(length > 1 for length in lengths)
        for sequence in decoding:
            assert sequence in sequences or sequence in plan.preempted, f"{sequence} was held up"
        for item in plan.ranges:
            assert item.sequence.status is SequenceStatus.RUNNING
            assert item.sequence.num_computed == item.start < item.end <= item.sequence.num_tokens
            assert item.end <= len(item.sequence.page_table) * self.page_size
        self.check_rounding([item for item in plan.ranges if item.sequence not in decoding])

    def check_rounding(self, chunks: list[ScheduledRange]) -> None:
        """A truncated chunk ends at a page boundary, save for the two that must not get nothing."""
        chunks = sorted(chunks, key=lambda item: item.sequence.rank)
        threshold = self.config.long_prefill_token_threshold
        unrounded = [
            item
            for item in chunks
            if not item.samples and item.end % self.page_size != 0 and item.num_tokens != threshold
        ]
        head_rest = chunks[0].sequence.num_tokens - chunks[0].start if chunks else 0
        overtaking = [
            item for item in chunks if (item.sequence.num_tokens - item.start) * OVERTAKING_RATIO <= head_rest
        ]
        allowed = chunks[:1] + overtaking[:1]
        assert all(item in allowed for item in unrounded), f"unrounded: {unrounded}"
        for item in unrounded:
            assert item.num_tokens < self.page_size
