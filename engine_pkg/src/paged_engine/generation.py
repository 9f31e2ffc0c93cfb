"""Generation: a sequence on its way to text, the half of its progress that the scheduler does not care about."""

from __future__ import annotations

from dataclasses import dataclass

from paged_engine.errors import RequestError
from paged_engine.execution.logprobs import SampledToken
from paged_engine.scheduling.sequence import FinishReason, Sequence
from paged_engine.text.stream import TextStream
from paged_engine.text.tokenizer import Tokenizer


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


class Generation:
    """Turns a sequence's tokens into outputs."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        """`eos_token_ids` end a text, unless the request says otherwise."""
        sampling = sequence.sampling
        self.sequence = sequence
        self._eos_token_ids = eos_token_ids
        self._text = TextStream(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        self._cumulative_logprob: float | None = None if sampling.logprobs is None else 0.0

    def accept(self, token: SampledToken) -> Output:
        """What the token brings that has just been appended to the sequence. Raises whatever detokenizing does."""
        sequence = self.sequence
        if self._cumulative_logprob is not None and token.logprob is not None:
            self._cumulative_logprob += token.logprob
        text, reason = self._extend_text(token.token_id)
        return Output(
            request_id=sequence.request_id,
            index=sequence.index,
            num_prompt_tokens=sequence.num_prompt_tokens,
            text=text,
            token_ids=(token.token_id,),
            logprobs=() if sequence.sampling.logprobs is None else (token,),
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=reason,
        )

    def end(self, reason: FinishReason | RequestError) -> Output:
        """The last output where no token brings the end: with the text held back, or the error alone."""
        failed = isinstance(reason, RequestError)
        return Output(
            request_id=self.sequence.request_id,
            index=self.sequence.index,
            num_prompt_tokens=self.sequence.num_prompt_tokens,
            text="" if failed else self._text.finish(),
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=None if isinstance(reason, RequestError) else reason,
            error=reason if isinstance(reason, RequestError) else None,
        )

    def _extend_text(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that the newest token makes visible, and why the sequence ends with it, if it does.

        The token that ends a text (end of sequence, a stop token) is not part of it.
        """
        sequence, stream = self.sequence, self._text
        ends = self._is_stop_token(token_id)
        text = "" if ends and not sequence.sampling.include_stop_str_in_output else stream.push([token_id])
        if ends and stream.stopped_by is None:
            return text + stream.finish(), FinishReason.STOP
        if stream.stopped_by is not None:
            return text, FinishReason.STOP
        if len(sequence.token_ids) >= sequence.max_num_tokens:
            text += stream.finish()
            return text, FinishReason.LENGTH if stream.stopped_by is None else FinishReason.STOP
        return text, None

    def _is_stop_token(self, token_id: int) -> bool:
        sequence, sampling = self.sequence, self.sequence.sampling
        if len(sequence.token_ids) - sequence.num_prompt_tokens < sampling.min_tokens:
            return False
        return token_id in sampling.stop_token_ids or (
            not sampling.ignore_eos and token_id in self._eos_token_ids
        )
