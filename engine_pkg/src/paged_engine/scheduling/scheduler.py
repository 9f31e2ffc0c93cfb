"""Scheduler: decides each step who computes which tokens, and who holds which pages for that.

There is no prefill phase and no decode phase: a sequence computes [num_computed, num_computed + n) of its tokens, whatever
they are. All order comes from one number per sequence, its rank: when it arrived, shifted by its priority. A rank never
changes, so an older sequence is overtaken only by those that arrive soon enough to be worth it, and nobody starves. The
best-ranked running sequence is never preempted, so it comes to its end, and then the next one does.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from paged_engine.config import EngineConfig
from paged_engine.scheduling.chunking import Chunk, ChunkLimits, limit_scoring, share_equally, share_in_order
from paged_engine.scheduling.pages import IntegrityError, PagePool
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, SequenceStatus, StepPlan
from paged_engine.scheduling.waiting_queue import WaitingQueue

SECONDS_PER_PRIORITY_LEVEL = 60.0
"""How much earlier a sequence would have had to arrive to stand where one level of priority puts it."""
SPARE_PAGES_PER_RUNNING = 1
"""Pages that must stay free for each running sequence when another is admitted, under max_utilization."""
MAX_PASSED_OVER = 32
"""Waiting sequences looked at in one step without a prospect of tokens for them; it bounds the cost of a step."""


class Scheduler:
    """Plans steps over one pool of pages. Not thread-safe: the step thread alone calls it.

    The policies, by their names in the configuration:

    - max_utilization: a sequence is admitted with the pages its present tokens need, if a page for each running sequence
      stays free, and takes more as it grows. When none is free, the worst-ranked running sequence gives its pages back and
      waits again; what it computed stays in the prefix index until the pages are needed.
    - guaranteed_no_evict: a sequence is admitted with all the pages it may ever need. Nothing is preempted.
    - first_come_first_served, equal_progress: see chunking.py.

    Waiting sequences are admitted in the order of their ranks. One that lacks pages holds up those behind it, so that it
    cannot starve. One that only lacks tokens of the step, or whose prefix a sequence ahead is just computing, does not.
    """

    def __init__(self, config: EngineConfig, pages: PagePool) -> None:
        self.pages = pages
        self.max_batch_size = config.max_batch_size
        self.reserves_to_completion = config.scheduler_policy == "guaranteed_no_evict"
        self.share_budget = share_equally if config.chunking_policy == "equal_progress" else share_in_order
        self.limits = ChunkLimits(
            page_size=pages.page_size,
            max_num_tokens=config.max_num_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In the order of their ranks, best first."""
        self.num_added = 0
        self.num_preemptions = 0
        """Preemptions so far."""
        self.num_prefix_cached_tokens = 0
        """Prompt tokens that did not have to be computed so far; what a preempted sequence finds again is not counted."""

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold pages."""
        return len(self.running)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
            ValueError: it could not even run alone; the engine refuses such a request before.
        """
        most_pages = self.pages.pages_for(max(sequence.max_num_tokens, sequence.num_tokens))
        if most_pages > self.pages.num_total:
            raise ValueError(f"{sequence} may need {most_pages} pages, the pool has {self.pages.num_total}")
        self.num_added += 1
        shifted_arrival = sequence.arrival_time + sequence.priority * SECONDS_PER_PRIORITY_LEVEL
        sequence.rank = (shifted_arrival, self.num_added)
        self.waiting.push(sequence)

    def plan(self) -> StepPlan:
        """The next step: one token for each sequence that lacks one, then chunks with what is left of max_num_tokens.

        Allocates the pages that the step writes to. Never empty while there is work, unless all of it waits for pending tokens:
        a sequence that is full with its own has nothing to compute, and one in the queue does not start before its is known.
        """
        preempted = self._grow_running()
        ranges = [
            ScheduledRange(sequence, sequence.num_computed, sequence.num_tokens)
            for sequence in self.running
            if sequence.num_uncomputed == 1 and not sequence.is_full
        ]
        ranges.extend(self._plan_chunks(self.limits.max_num_tokens - len(ranges)))
        ranges.sort(key=lambda item: item.num_tokens > 1)
        return StepPlan(tuple(ranges), tuple(preempted))

    def advance(self, plan: StepPlan) -> None:
        """Record that a step is launched: its ranges count as computed, and what it chooses as pending tokens.

        Sequences finished meanwhile are skipped.
        """
        for item in plan.ranges:
            sequence = item.sequence
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_scored += len(item.scored)
                sequence.num_computed = item.end
                sequence.num_pending += item.samples
                self.pages.enter_computed(sequence, item.start)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """Record which token the oldest pending one is; a page that was lacking nothing else may enter the index."""
        sequence.num_pending -= 1
        sequence.token_ids.append(token_id)
        self.pages.enter_computed(sequence, len(sequence.token_ids) - 1)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever its state, and free its pages; a second call does nothing."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        else:
            self.waiting.discard(sequence)
        sequence.status = SequenceStatus.FINISHED

    def preempt_last(self) -> Sequence:
        """Take the pages of the worst-ranked running sequence, of which there must be one; it waits again, with all its
        tokens to compute."""
        sequence = self.running[-1]
        self._stop_running(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)
        self.num_preemptions += 1
        return sequence

    def check_integrity(self, num_pending: Mapping[Sequence, int] | None = None) -> None:
        """Check the pool against the page tables, and the queues against the sequences' states.

        Args:
            num_pending: how many tokens of each sequence are being chosen, those not named having none; None: not known here.

        Raises:
            IntegrityError: says what is wrong, with figures.
        """
        self.pages.check_integrity(self.running)
        if self.running != sorted(self.running, key=lambda sequence: sequence.rank):
            raise IntegrityError("the running sequences are not in the order of their ranks")
        if len(self.running) > self.max_batch_size:
            raise IntegrityError(f"{len(self.running)} sequences run, at most {self.max_batch_size} may")
        for sequence in self.running:
            if sequence.status is not SequenceStatus.RUNNING or sequence in self.waiting:
                raise IntegrityError(f"{sequence} is among the running ones")
        for sequence in self.waiting.members:
            if sequence.status is not SequenceStatus.WAITING or sequence.page_table or sequence.num_computed:
                raise IntegrityError(f"{sequence} is in the queue")
        if num_pending is not None:
            for sequence in (*self.running, *self.waiting.members):
                if sequence.num_pending != num_pending.get(sequence, 0):
                    raise IntegrityError(
                        f"{sequence} waits for {sequence.num_pending} tokens, {num_pending.get(sequence, 0)} are to come"
                    )

    # Pages of the running

    def _grow_running(self) -> list[Sequence]:
        """Give each running sequence the pages for all its tokens, best rank first, preempting from the other end."""
        preempted = []
        for sequence in tuple(self.running):
            while sequence.status is SequenceStatus.RUNNING and not self._grow(sequence):
                preempted.append(self.preempt_last())
        return preempted

    def _grow(self, sequence: Sequence) -> bool:
        num_tokens = sequence.num_tokens - sequence.is_full  # a full one computes no more
        missing = self.pages.pages_for(num_tokens) - len(sequence.page_table)
        if missing > self.pages.num_free:
            return False
        if missing > 0:
            sequence.page_table.extend(self.pages.allocate(missing))
        return True

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.page_table)
        del sequence.page_table[:]

    # Chunks of the running and of newcomers

    def _plan_chunks(self, budget: int) -> list[ScheduledRange]:
        """Divide `budget` tokens in the order of ranks, and admit the newcomers that get any."""
        chunks = [Chunk(item, item.num_computed) for item in self.running if item.num_uncomputed > 1]
        chunks.extend(self._newcomers(chunks, budget))
        chunks.sort(key=lambda chunk: chunk.sequence.rank)
        chunks = limit_scoring(chunks)
        ranges = []
        for chunk, length in zip(chunks, self.share_budget(chunks, budget, self.limits), strict=True):
            if length:
                ranges.append(ScheduledRange(chunk.sequence, chunk.start, chunk.start + length))
            if chunk.sequence.status is SequenceStatus.WAITING:
                self._admit(chunk) if length else self._put_back(chunk)
        return ranges

    def _newcomers(self, running: list[Chunk], budget: int) -> list[Chunk]:
        """Take from the queue, in order, those that could start in this step.

        A sequence whose next page is just being computed by one ahead of it is left in the queue until that page is in the
        index: computing it again would cost more than the wait. That wait is for sequences ahead only, so it ends.

        Args:
            running: what running sequences still have to compute.
            budget: tokens for chunks in this step.
        """
        newcomers: list[Chunk] = []
        left_waiting: list[Chunk] = []
        rank_by_page_key = {self._next_page_key(chunk): chunk.sequence.rank for chunk in reversed(running)}
        num_wanted = sum(chunk.num_uncomputed for chunk in running)
        num_slots = self.max_batch_size - len(self.running)
        num_pages = num_passed_over = 0
        while len(newcomers) + len(left_waiting) < num_slots and num_passed_over < MAX_PASSED_OVER:
            chunk = self._take_from_queue()
            if chunk is None:
                break
            rank = chunk.sequence.rank
            key = self._next_page_key(chunk)
            could_use_it = chunk.start + self.pages.page_size <= chunk.sequence.num_reusable
            if key is not None and could_use_it and rank_by_page_key.get(key, rank) < rank:
                left_waiting.append(chunk)
                num_passed_over += 1
                continue
            num_spare = 0 if self.reserves_to_completion else len(self.running) + len(newcomers)
            num_pages += self._num_new_pages(chunk)
            if num_pages + num_spare * SPARE_PAGES_PER_RUNNING > self.pages.num_free:
                left_waiting.append(chunk)
                break
            newcomers.append(chunk)
            rank_by_page_key.setdefault(key, rank)
            num_passed_over += num_wanted >= budget
            num_wanted += chunk.num_uncomputed
        for chunk in left_waiting:
            self._put_back(chunk)
        return newcomers

    def _take_from_queue(self) -> Chunk | None:
        """The next in the queue, if it may start. Its cached pages are shared at once, so that nobody ahead of it evicts them."""
        sequence = self.waiting.pop()
        if sequence is None:
            return None
        if sequence.num_pending:  # preempted while a step was choosing its token
            self.waiting.push(sequence)
            return None
        hits = self.pages.match(sequence)
        self.pages.share(hits)
        return Chunk(sequence, len(hits) * self.pages.page_size, tuple(hits))

    def _put_back(self, chunk: Chunk) -> None:
        self.pages.release(chunk.hits)
        self.waiting.push(chunk.sequence)

    def _admit(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        sequence.page_table.extend(chunk.hits)
        sequence.page_table.extend(self.pages.allocate(self._num_new_pages(chunk)))
        sequence.num_computed = chunk.start
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=lambda item: item.rank)
        if sequence.num_preemptions == 0:
            sequence.num_cached = chunk.start
            self.num_prefix_cached_tokens += chunk.start

    def _num_new_pages(self, chunk: Chunk) -> int:
        """Pages that a newcomer needs besides its cached ones: at least one, since at least one token is uncomputed."""
        sequence = chunk.sequence
        num_tokens = sequence.num_tokens
        if self.reserves_to_completion:
            num_tokens = max(num_tokens, sequence.max_num_tokens)
        return self.pages.pages_for(num_tokens) - len(chunk.hits)

    def _next_page_key(self, chunk: Chunk) -> bytes | None:
        """The key of the page that a sequence computes next, None if the page will not be full or nothing is indexed."""
        return self.pages.full_page_key(chunk.sequence, chunk.start // self.pages.page_size)
