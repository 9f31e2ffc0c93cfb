"""What a caller receives: deltas while the text is made, and the generation once it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

Protocol = Literal["grpc", "http"]


class Message(TypedDict):
    """One turn of a conversation, as a chat template takes it: role `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (natural logarithm) of one token at one position, its rank from 1, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = Mapping[int, TokenLogprob]
"""The candidates of one position by token id: the chosen token and the most likely ones."""


@dataclass(frozen=True)
class Delta:
    """What one response adds to one sequence.

    `sequence_index` is 0 unless `n` > 1. `text` may be empty: a token can be half a character, and the last
    response may bring nothing but the `finish_reason`, which is None until then, also for a sequence that ended
    before the others. `token_ids` and `logprobs` are filled only if they were asked for, `cumulative_logprob` too.
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None
    sequence_index: int = 0


@dataclass(frozen=True)
class GeneratedSequence:
    """One complete sequence of a generation; the fields mean what they mean in `Delta`, over the whole."""

    text: str
    finish_reason: str | None
    num_output_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class Generation:
    """A complete generation.

    `sequences` has one element for each of the `n` sequences asked for; `text`, `finish_reason` and the other
    properties are those of the first. Times are in seconds, measured by the client from the moment the
    request is sent; `time_to_first_token_s` is None where the answer came as a whole (`generate`).
    """

    sequences: tuple[GeneratedSequence, ...]
    num_input_tokens: int
    duration_s: float
    time_to_first_token_s: float | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Candidates of each token of the prompt, None for the first; empty unless `prompt_logprobs` were asked for."""

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended: `stop`, `length` or `timeout`."""
        return self.sequences[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of the first sequence."""
        return self.sequences[0].num_output_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first sequence; empty unless `return_token_ids`."""
        return self.sequences[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Candidates of each position of the first sequence; empty unless `logprobs` were asked for."""
        return self.sequences[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log probabilities of the first sequence; None unless `return_cumulative_logprob`."""
        return self.sequences[0].cumulative_logprob
