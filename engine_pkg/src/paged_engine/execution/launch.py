"""LaunchedStep: a step from its plan to its tokens, in two halves, so that the host may do something else in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paged_engine.execution.batch import build_batch
from paged_engine.execution.logprobs import PendingPromptScores, SampledToken
from paged_engine.scheduling.sequence import Sequence, StepPlan

if TYPE_CHECKING:
    from paged_engine.errors import RequestError
    from paged_engine.execution.runner import ModelRunner
    from paged_engine.execution.sampling import PendingTokens, Sampler


class LaunchedStep:
    """A step that the device has been given to compute.

    Steps run on the device in the order in which they are launched, each after all that the ones before it write and read.
    """

    def __init__(
        self,
        plan: StepPlan,
        runner: ModelRunner,
        sampler: Sampler,
        *,
        page_size: int,
        previous: LaunchedStep | None = None,
    ) -> None:
        """Launch it.

        Args:
            plan: not yet recorded by the scheduler as launched.
            runner: computes its logits.
            sampler: chooses its tokens.
            page_size: tokens of a page.
            previous: the step whose tokens are pending, if there is one.
        """
        self.sampling = [item.sequence for item in plan.ranges if item.samples]
        """The sequences that get a token each."""
        scoring = [item for item in plan.ranges if item.scored]
        self._scoring = [item.sequence for item in scoring]
        pending = None if previous is None else previous.tokens
        batch = build_batch(plan, page_size, runner.device, pending)
        logits = runner.execute(batch)
        self._scores = PendingPromptScores(logits[batch.num_samples :], scoring)
        self.tokens: PendingTokens = sampler.launch(logits[: batch.num_samples], self.sampling, pending)

    def result(
        self,
    ) -> tuple[
        Iterator[tuple[Sequence, list[SampledToken]]], Iterator[tuple[Sequence, SampledToken | RequestError]]
    ]:
        """Wait for it: the scores of prompts and the new tokens, both with their sequences and in plan order.

        Raises:
            RuntimeError: what has gone wrong on the device, if it be in another step.
        """
        scores, tokens = self._scores.result(), self.tokens.result()
        return zip(self._scoring, scores, strict=True), zip(self.sampling, tokens, strict=True)
