"""The engine: add, abort, step. Synchronous, without threads and without Triton.

One call of `step` is one turn of the whole machine: the scheduler says who computes which tokens, the model computes
them, the sampler chooses, text comes out. With look_ahead a step is launched on the device before the tokens of the one before
it are known: its sequences compute the tokens that are pending, and text comes out one call later. `prepare` may run in any
thread; everything else belongs to the one thread that steps.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass

from paged_engine.admission import Admission, PreparedRequest
from paged_engine.config import EngineConfig
from paged_engine.errors import RequestError
from paged_engine.execution.launch import LaunchedStep
from paged_engine.execution.runner import ModelRunner
from paged_engine.execution.sampling import SampledToken, Sampler, not_finite
from paged_engine.generation import Generation, Output
from paged_engine.request import GenerateRequest
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.scheduling.sequence import FinishReason, Sequence, SequenceStatus, StepPlan
from paged_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStatistics:
    """Gauges of now, and counters since the model was loaded. Pages are counted as the allocator sees them."""

    num_running: int
    num_waiting: int
    num_pages_total: int
    num_pages_used: int
    """Distinct pages held by sequences."""
    num_pages_cached: int
    """Pages that no sequence holds and the prefix index remembers; they count as free."""
    page_size: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_prefix_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True)
class _Step:
    """A step that is launched, or could not be."""

    plan: StepPlan
    launched: LaunchedStep | RequestError


class Engine:
    """In-flight batching over a paged KV cache, one step at a time."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        admission: Admission,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
    ) -> None:
        """Put ready-made parts together; `paged_engine.loading.load_engine` makes them from a configuration."""
        self.config = config
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self._admission = admission
        self.eos_token_ids = eos_token_ids
        self._runner = runner
        self._sampler = sampler
        self._looks_ahead = config.look_ahead is True
        self._generations: dict[str, dict[int, Generation]] = {}
        self._in_flight: list[_Step] = []
        """The steps that are launched and not taken in, in that order: between calls none, with look-ahead one at most."""
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, if only to take in one that is in flight, whose sequences may all have ended."""
        return self.scheduler.has_work or bool(self._in_flight)

    def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Tokenize and check a request, in any thread. Raises RequestError where it can never run."""
        return self._admission.prepare(request)

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a prepared request."""
        self._generations[prepared.request.request_id] = {
            sequence.index: Generation(sequence, self.tokenizer, self.eos_token_ids)
            for sequence in prepared.sequences
        }
        self._num_prompt_tokens += prepared.num_prompt_tokens
        for sequence in prepared.sequences:
            self.scheduler.add(sequence)

    def abort(self, request_id: str, reason: FinishReason | RequestError) -> list[Output]:
        """End a request where it stands and free its pages.

        Returns:
            The last output of each sequence that had not ended yet; none for a request that is not known (any more).
            With a finish reason (a deadline) the text held back is in it; with an error there is no text.
        """
        return [
            self._end(generation, reason)
            for generation in list(self._generations.get(request_id, {}).values())
        ]

    def step(self) -> list[Output]:
        """Launch a step, and return what those that are over have brought: scores of prompts, then new tokens, in plan order.

        Without look-ahead the step just launched is over with this call; with it, it stays in flight while the host takes in
        the one before. A sequence may then turn out to have ended that the step in flight computes one more token of; this
        token is never taken in, and all that the step writes for it, before anything else of a later step, is its own slot.

        A fault while launching or computing ends the sequences of the step with INTERNAL and leaves the others untouched.

        Raises:
            RuntimeError: the device can do nothing any more.
        """
        outputs: list[Output] = []
        if self._in_flight and not self._may_be_followed(self._in_flight[-1]):
            outputs += self._collect()
        is_left = self._launch() and self._looks_ahead
        while len(self._in_flight) > is_left:
            outputs += self._collect()
        return outputs

    def statistics(self) -> EngineStatistics:
        """Gauges and counters as of the last step."""
        pages = self.scheduler.pages
        return EngineStatistics(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_pages_total=pages.num_total,
            num_pages_used=pages.num_held,
            num_pages_cached=pages.num_cached,
            page_size=self.config.page_size,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_prefix_cached_tokens=self.scheduler.num_prefix_cached_tokens,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError where a page is lost, shared by two writers, or held by nobody the scheduler knows, or a token
        is awaited that no launched step chooses; and what CUDA raises where the device can do nothing any more."""
        self.scheduler.check_integrity(
            Counter(
                sequence
                for step in self._in_flight
                if isinstance(step.launched, LaunchedStep)
                for sequence in step.launched.sampling
            )
        )
        self._runner.recover()

    def _launch(self) -> bool:
        """Plan a step and launch it behind what is in flight; False if there is nothing to compute."""
        plan = self.scheduler.plan()
        if not plan.ranges:
            return False
        previous = self._in_flight[-1].launched if self._in_flight else None
        assert not isinstance(previous, RequestError), "nothing follows a step that failed"
        launched: LaunchedStep | RequestError
        try:
            launched = LaunchedStep(
                plan, self._runner, self._sampler, page_size=self.config.page_size, previous=previous
            )
        except Exception as error:
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            launched = _internal(error)
        else:
            self.scheduler.advance(plan)
        self._in_flight.append(_Step(plan, launched))
        return True

    def _may_be_followed(self, step: _Step) -> bool:
        """Whether another step may be launched before this one's tokens are known."""
        return isinstance(step.launched, LaunchedStep) and not any(
            sequence.status is not SequenceStatus.FINISHED
            and not sequence.is_full
            and self._sampler.needs_history(sequence)
            for sequence in step.launched.sampling
        )

    def _collect(self) -> list[Output]:
        """Wait for the step that was launched first, and take in what it has brought."""
        step = self._in_flight.pop(0)
        if isinstance(step.launched, RequestError):
            return self._fail([step.plan], step.launched)
        fault = None
        try:
            scores, tokens = step.launched.result()
        except Exception as error:
            logger.exception("a step of %d tokens failed on the device", step.plan.num_tokens)
            fault = _internal(error)
        if fault is not None:
            # A device tells of a fault when it comes to it: it may be that of any launched step, and have spoilt any page.
            plans = [step.plan, *(later.plan for later in self._in_flight)]
            self._in_flight.clear()
            self.scheduler.pages.forget_cached()
            return self._fail(plans, fault)
        outputs: list[Output] = []
        for sequence, prompt_tokens in scores:
            outputs += self._accept_scores(sequence, prompt_tokens)
        for sequence, token in tokens:
            outputs += self._accept(sequence, token)
        return outputs

    def _accept_scores(self, sequence: Sequence, prompt_tokens: list[SampledToken]) -> list[Output]:
        """Hand on what a step has found out about a prompt; logits that are not finite end the request."""
        if sequence.status is SequenceStatus.FINISHED:
            return []
        if any(token.logprob is None or math.isnan(token.logprob) for token in prompt_tokens):
            return self.abort(sequence.request_id, not_finite("some token of the prompt"))
        return [
            Output(
                request_id=sequence.request_id,
                index=sequence.index,
                num_prompt_tokens=sequence.num_prompt_tokens,
                prompt_logprobs=tuple(prompt_tokens),
            )
        ]

    def _accept(self, sequence: Sequence, token: SampledToken | RequestError) -> list[Output]:
        """Take one sampled token into its sequence. A fault on the way ends the request, all its sequences included."""
        if sequence.status is SequenceStatus.FINISHED:
            return []  # in a step before, or by a sibling's fault, or while the step was in flight
        if isinstance(token, RequestError):
            return self.abort(sequence.request_id, token)
        generation = self._generations[sequence.request_id][sequence.index]
        self.scheduler.append_token(sequence, token.token_id)
        self._num_generated_tokens += 1
        try:
            output = generation.accept(token)
        except Exception as error:
            logger.exception("detokenizing request %s failed", sequence.request_id)
            return self.abort(sequence.request_id, _internal(error))
        if output.finished:
            self._forget(sequence)
        return [output]

    def _end(self, generation: Generation, reason: FinishReason | RequestError) -> Output:
        """End a sequence without a new token; pages are back when this returns."""
        self._forget(generation.sequence)
        return generation.end(reason)

    def _fail(self, plans: list[StepPlan], reason: RequestError) -> list[Output]:
        """End the sequences of some steps, and see what is left of the device."""
        outputs: list[Output] = []
        for sequence in (item.sequence for plan in plans for item in plan.ranges):
            if sequence.status is not SequenceStatus.FINISHED:
                outputs += self.abort(sequence.request_id, reason)
        self._runner.recover()
        return outputs

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        of_request = self._generations[sequence.request_id]
        del of_request[sequence.index]
        if not of_request:
            del self._generations[sequence.request_id]


def _internal(error: Exception) -> RequestError:
    return RequestError.internal(f"{type(error).__name__}: {error}")
