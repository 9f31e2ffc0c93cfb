"""Sequence: the progress of one generated sequence, in the two counters all scheduling is arithmetic on."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from paged_engine.constraints import TokenConstraints
from paged_engine.guided import GrammarState
from paged_engine.request import SamplingParams

_NOWHERE = range(0)


class FinishReason(str, Enum):
    """Why a sequence ended well; the values stand in the `finish_reason` output."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the longest sequence that fits."""
    TIMEOUT = "timeout"
    """The request's deadline passed; the text so far stands."""


class SequenceStatus(Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    """In the queue, holding no pages (new, or preempted)."""
    RUNNING = "running"
    """Holds pages and is offered tokens of every step."""
    FINISHED = "finished"
    """Holds no pages and never runs again."""


class Sequence:
    """One sequence of a request. There is no prefill and no decode: `num_computed` catches up with `num_tokens`.

    The token at position p has its keys and values in slot `page_table[p // page_size] * page_size + p % page_size`.
    """

    __slots__ = (
        "arrival_time",
        "cache_salt",
        "constraints",
        "grammar",
        "index",
        "max_num_tokens",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored",
        "page_keys",
        "page_table",
        "priority",
        "rank",
        "request_id",
        "sampling",
        "scores_prompt",
        "seed",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams,
        *,
        max_num_tokens: int,
        seed: int = 0,
        index: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
        constraints: TokenConstraints | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        """Which of the request's n sequences this is."""
        self.sampling = sampling
        self.seed = seed
        """Names this sequence's random stream; drawn at random where the request gave none."""
        self.constraints = constraints
        """The controls that name tokens, as TokenConstraints.resolve gives them; None when the request has none."""
        self.grammar = grammar
        """What the text must be like, this sequence's own; None when it is free."""
        self.priority = priority
        self.cache_salt = cache_salt
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.token_ids = array("i", prompt_token_ids)
        """Prompt and generated tokens, int32, as far as they are known."""
        self.num_pending = 0
        """Tokens behind those that launched steps are choosing: they count, but only the device knows which they are."""
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = max_num_tokens
        """Prompt + output tokens this sequence may reach; the engine guarantees that they fit the pool and the context."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache, or will be by the end of the steps that are launched."""
        self.num_cached = 0
        """Prompt tokens whose pages came from the prefix cache when the sequence was first scheduled."""
        self.num_preemptions = 0
        """How often its pages were taken back before it was done."""
        self.scores_prompt = sampling.prompt_logprobs is not None and index == 0
        """Whether this sequence finds out how likely its prompt is: once for a request, in the first of its sequences."""
        self.num_scored = 0
        """Prompt positions whose logits have told how likely the token behind them is, where `scores_prompt`."""
        self.page_table = array("i")
        self.page_keys: list[bytes] = []
        """Prefix index keys of its first full pages, as far as they have been needed; like its tokens they never change."""
        self.rank: tuple[float, int] = (0.0, 0)
        """Place in the scheduler's order, lower is sooner; the scheduler sets it once, when the sequence is added."""
        self.status = SequenceStatus.WAITING

    @property
    def num_tokens(self) -> int:
        """Prompt + generated tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, pending ones included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed; 1 is what used to be called decoding."""
        return self.num_tokens - self.num_computed

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens it may have, if a pending one too; nobody needs the last one's keys and values."""
        return self.num_tokens >= self.max_num_tokens

    @property
    def num_unscored(self) -> int:
        """Prompt positions whose logits are still to be scored; the last one's logits choose the first new token instead."""
        return self.num_prompt_tokens - 1 - self.num_scored if self.scores_prompt else 0

    @property
    def num_reusable(self) -> int:
        """Tokens whose keys and values the prefix cache may provide: none whose logits are still wanted."""
        return self.num_scored if self.num_unscored else self.num_tokens - 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}/{self.index}, {self.status.value}, {self.num_computed} of {self.num_tokens} "
            f"tokens computed, prompt {self.num_prompt_tokens}, {len(self.page_table)} pages)"
        )


@dataclass(frozen=True)
class ScheduledRange:
    """The tokens of one sequence that a step computes: positions [start, end)."""

    sequence: Sequence
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How much of the step's budget the range takes."""
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the range reaches the sequence's last token, so that its logits choose the next one."""
        return self.end == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Positions whose logits tell how likely the prompt's next token is; empty where nobody asks, or knows already."""
        sequence = self.sequence
        if not sequence.scores_prompt:
            return _NOWHERE
        return range(max(self.start, sequence.num_scored), min(self.end, sequence.num_prompt_tokens - 1))


@dataclass(frozen=True)
class StepPlan:
    """Who computes which tokens in one step; ranges of one token come first."""

    ranges: tuple[ScheduledRange, ...]
    preempted: tuple[Sequence, ...] = ()
    """Sequences whose pages were taken back to make room; they wait again with num_computed = 0."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step, at most max_num_tokens."""
        return sum(item.num_tokens for item in self.ranges)
