"""From a response's named outputs to deltas, and from all deltas to the generation: the same for every transport."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_client.types import Delta, GeneratedSequence, Generation, TokenLogprob, TokenLogprobs


@dataclass(frozen=True)
class Response:
    """One response of the model.

    `outputs` has each output's elements by name. `is_final` says whether the transport marked it as the
    request's last one; None where the transport has no such mark.
    """

    outputs: Mapping[str, Sequence[Any]]
    is_final: bool | None


@dataclass
class _Progress:
    """What one sequence has received so far."""

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.num_tokens += delta.num_tokens
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob

    def build(self) -> GeneratedSequence:
        return GeneratedSequence(
            text="".join(self.texts),
            finish_reason=self.finish_reason,
            num_output_tokens=self.num_tokens,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            cumulative_logprob=self.cumulative_logprob,
        )


class GenerationBuilder:
    """Adds up the responses of one request."""

    def __init__(self) -> None:
        self._sequences: list[_Progress] = []
        self._num_input_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no response has had any text output yet, not even an empty one."""
        return not self._sequences

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has its finish reason."""
        return bool(self._sequences) and all(sequence.finish_reason for sequence in self._sequences)

    def add(self, response: Response) -> list[Delta]:
        """Takes a response in and returns what it brings: a delta for each sequence that it adds anything to.

        Raises ValueError, KeyError, TypeError or IndexError for outputs that do not fit together.
        """
        outputs = response.outputs
        self._num_input_tokens = next(iter(outputs.get("num_input_tokens", ())), self._num_input_tokens)
        for text in outputs.get("prompt_logprobs", ()):
            self._prompt_logprobs = _parse_prompt_logprobs(text)
        deltas = [delta for delta in _split(outputs) if self._is_news(delta)]
        for delta in deltas:
            self._sequences[delta.sequence_index].add(delta)
        return deltas

    def build(self, *, duration_s: float, time_to_first_token_s: float | None) -> Generation:
        """Everything received; times in seconds."""
        return Generation(
            sequences=tuple(sequence.build() for sequence in self._sequences),
            num_input_tokens=self._num_input_tokens,
            duration_s=duration_s,
            time_to_first_token_s=time_to_first_token_s,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _is_news(self, delta: Delta) -> bool:
        """A response has an element for every sequence, also for those that have ended or got no token this time."""
        while len(self._sequences) <= delta.sequence_index:
            self._sequences.append(_Progress())
        has_ended = self._sequences[delta.sequence_index].finish_reason is not None
        return bool(delta.text or delta.num_tokens or (delta.finish_reason and not has_ended))


def _split(outputs: Mapping[str, Sequence[Any]]) -> list[Delta]:
    """One delta for each element of `text_output`; `token_ids` are concatenated, `num_output_tokens` splits them.

    Without `num_output_tokens` they all belong to the only sequence.
    """
    texts = outputs.get("text_output", ())
    token_ids = outputs.get("token_ids", ())
    counts = outputs.get("num_output_tokens", [len(token_ids) if len(texts) == 1 else 0] * len(texts))
    reasons = outputs.get("finish_reason", [None] * len(texts))
    cumulative = outputs.get("cumulative_logprob", [None] * len(texts))
    logprobs = outputs.get("logprobs", [""] * len(texts))
    deltas = []
    first_token = 0
    for index, text in enumerate(texts):
        num_tokens = counts[index]
        deltas.append(
            Delta(
                text=text,
                num_tokens=num_tokens,
                finish_reason=None if reasons[index] in (None, "", "None") else reasons[index],
                token_ids=tuple(token_ids[first_token : first_token + num_tokens]),
                logprobs=_parse_logprobs(logprobs[index]),
                cumulative_logprob=cumulative[index],
                sequence_index=index,
            )
        )
        first_token += num_tokens
    return deltas


def _parse_logprobs(text: str) -> tuple[TokenLogprobs, ...]:
    """Reads `[{token_id: {logprob, rank, decoded_token}}, …]`."""
    positions = json.loads(text) if text else None
    return tuple(_candidates(position) for position in positions or ())


def _parse_prompt_logprobs(text: str) -> tuple[TokenLogprobs | None, ...]:
    """Reads the same with null for a position of which nothing is known."""
    return tuple(None if position is None else _candidates(position) for position in json.loads(text) or ())


def _candidates(position: Mapping[str, Any]) -> TokenLogprobs:
    """JSON has no -Infinity, so null stands for it."""
    return {
        int(token_id): TokenLogprob(
            logprob=float("-inf") if entry["logprob"] is None else float(entry["logprob"]),
            rank=entry.get("rank"),
            decoded_token=entry.get("decoded_token"),
        )
        for token_id, entry in position.items()
    }
