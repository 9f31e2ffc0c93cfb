"""The engine: add, abort, step. Synchronous, without threads and without Triton.

One call of `step` is one turn of the whole machine: the scheduler says who computes which tokens, the model computes
them, the sampler chooses, text comes out. `prepare` may run in any thread; everything else belongs to the one thread
that steps.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from paged_engine.admission import Admission, PreparedRequest
from paged_engine.config import EngineConfig
from paged_engine.errors import RequestError
from paged_engine.execution.batch import build_batch
from paged_engine.execution.logprobs import PendingPromptScores
from paged_engine.execution.runner import ModelRunner
from paged_engine.execution.sampling import SampledToken, Sampler, not_finite
from paged_engine.request import GenerateRequest
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.scheduling.sequence import FinishReason, Sequence, StepPlan
from paged_engine.text.stream import TextStream
from paged_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Output:
    """What one step brought for one sequence; the last one of a sequence has a finish reason or an error."""

    request_id: str
    index: int
    """Which of the request's n sequences."""
    num_prompt_tokens: int
    text: str = ""
    """The delta; "" while characters or a possible stop string are incomplete."""
    token_ids: tuple[int, ...] = ()
    """The new tokens, an end-of-sequence token included."""
    logprobs: tuple[SampledToken, ...] = ()
    """One for each new token, where the request asked for logprobs."""
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """Where the request asked for prompt_logprobs, the prompt's tokens that the step has scored: by the first new token of the
    first sequence, all but the prompt's first, each once and in order."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, where the request asked for logprobs."""
    finish_reason: FinishReason | None = None
    error: RequestError | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the sequence's last output."""
        return self.finish_reason is not None or self.error is not None


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


class _Generation:
    """A sequence on its way to text: the half of its progress that the scheduler does not care about."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        sampling = sequence.sampling
        self.sequence = sequence
        self.text = TextStream(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        self.cumulative_logprob: float | None = None if sampling.logprobs is None else 0.0


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
        self._generations: dict[str, dict[int, _Generation]] = {}
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Tokenize and check a request, in any thread. Raises RequestError where it can never run."""
        return self._admission.prepare(request)

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a prepared request."""
        self._generations[prepared.request.request_id] = {
            sequence.index: _Generation(sequence, self.tokenizer) for sequence in prepared.sequences
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
        """Compute one batch and return what it brought: scores of prompts, then new tokens, both in plan order.

        A fault while computing ends the sequences of this step with INTERNAL and leaves the others untouched.

        Raises:
            RuntimeError: the device can do nothing any more.
        """
        plan = self.scheduler.plan()
        if not plan.ranges:
            return []
        sampling = [item.sequence for item in plan.ranges if item.samples]
        scoring = [item for item in plan.ranges if item.scored]
        failed: list[Output] | None = None
        try:
            logits = self._runner.execute(build_batch(plan, self.config.page_size, self._runner.device))
            scores = PendingPromptScores(logits[len(sampling) :], scoring).result()
            tokens = self._sampler.sample(logits[: len(sampling)], sampling)
        except Exception as error:
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            failed = self._fail(plan, error)
        if failed is not None:
            self._runner.recover()
            return failed
        self.scheduler.advance(plan)
        outputs: list[Output] = []
        for item, prompt_tokens in zip(scoring, scores, strict=True):
            outputs += self._accept_scores(item.sequence, prompt_tokens)
        for sequence, token in zip(sampling, tokens, strict=True):
            outputs += self._accept(sequence, token)
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
        """Raise IntegrityError where a page is lost, shared by two writers, or held by nobody the scheduler knows; and what
        CUDA raises where the device can do nothing any more."""
        self.scheduler.check_integrity()
        self._runner.recover()

    def _accept_scores(self, sequence: Sequence, prompt_tokens: list[SampledToken]) -> list[Output]:
        """Hand on what a step has found out about a prompt; logits that are not finite end the request."""
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
        generation = self._generations.get(sequence.request_id, {}).get(sequence.index)
        if generation is None:
            return []  # a sibling's fault ended the request earlier in this very step
        if isinstance(token, RequestError):
            return self.abort(sequence.request_id, token)
        self.scheduler.append_token(sequence, token.token_id)
        self._num_generated_tokens += 1
        if generation.cumulative_logprob is not None and token.logprob is not None:
            generation.cumulative_logprob += token.logprob
        try:
            text, reason = self._extend_text(generation, token.token_id)
        except Exception as error:
            logger.exception("detokenizing request %s failed", sequence.request_id)
            return self.abort(sequence.request_id, _internal(error))
        if reason is not None:
            self._forget(generation)
        return [
            Output(
                request_id=sequence.request_id,
                index=sequence.index,
                num_prompt_tokens=sequence.num_prompt_tokens,
                text=text,
                token_ids=(token.token_id,),
                logprobs=() if sequence.sampling.logprobs is None else (token,),
                cumulative_logprob=generation.cumulative_logprob,
                finish_reason=reason,
            )
        ]

    def _extend_text(self, generation: _Generation, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that the newest token makes visible, and why the sequence ends with it, if it does.

        The token that ends a text (end of sequence, a stop token) is not part of it.
        """
        sequence, stream = generation.sequence, generation.text
        ends = self._is_stop_token(sequence, token_id)
        text = "" if ends and not sequence.sampling.include_stop_str_in_output else stream.push([token_id])
        if ends and stream.stopped_by is None:
            return text + stream.finish(), FinishReason.STOP
        if stream.stopped_by is not None:
            return text, FinishReason.STOP
        if len(sequence.token_ids) >= sequence.max_num_tokens:
            text += stream.finish()
            return text, FinishReason.LENGTH if stream.stopped_by is None else FinishReason.STOP
        return text, None

    def _is_stop_token(self, sequence: Sequence, token_id: int) -> bool:
        sampling = sequence.sampling
        if len(sequence.token_ids) - sequence.num_prompt_tokens < sampling.min_tokens:
            return False
        return token_id in sampling.stop_token_ids or (
            not sampling.ignore_eos and token_id in self.eos_token_ids
        )

    def _end(self, generation: _Generation, reason: FinishReason | RequestError) -> Output:
        """End a sequence without a new token; pages are back when this returns."""
        self._forget(generation)
        sequence = generation.sequence
        failed = isinstance(reason, RequestError)
        return Output(
            request_id=sequence.request_id,
            index=sequence.index,
            num_prompt_tokens=sequence.num_prompt_tokens,
            text="" if failed else generation.text.finish(),
            cumulative_logprob=generation.cumulative_logprob,
            finish_reason=None if isinstance(reason, RequestError) else reason,
            error=reason if isinstance(reason, RequestError) else None,
        )

    def _fail(self, plan: StepPlan, error: Exception) -> list[Output]:
        reason = _internal(error)
        outputs: list[Output] = []
        for item in plan.ranges:
            outputs += self.abort(item.sequence.request_id, reason)
        return outputs

    def _forget(self, generation: _Generation) -> None:
        sequence = generation.sequence
        self.scheduler.finish(sequence)
        of_request = self._generations[sequence.request_id]
        del of_request[sequence.index]
        if not of_request:
            del self._generations[sequence.request_id]


def _internal(error: Exception) -> RequestError:
    return RequestError.internal(f"{type(error).__name__}: {error}")
