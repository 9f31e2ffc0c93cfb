"""Ticket: one request's way through the service; and the two interfaces the service stands between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from paged_engine.errors import RequestError
from paged_engine.request import GenerateRequest
from paged_engine.scheduling.sequence import FinishReason, SequenceStatus
from paged_engine.serving.contract import ParsedRequest
from paged_engine.serving.metrics import Outcome
from paged_engine.serving.outputs import Response, ResponseAssembler

if TYPE_CHECKING:
    from paged_engine.admission import PreparedRequest
    from paged_engine.engine import EngineStatistics
    from paged_engine.generation import Output


class EngineTokenizer(Protocol):
    """What the service needs of the tokenizer, from any thread."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""

    def decode_token(self, token_id: int) -> str:
        """The text of one token on its own."""


class ServedEngine(Protocol):
    """What the service needs of the engine; `prepare` from any thread, all else from the step thread."""

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The checkpoint's."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Tokenize and check; raises RequestError."""

    def add(self, prepared: PreparedRequest) -> None:
        """Queue a request."""

    def abort(self, request_id: str, reason: FinishReason | RequestError) -> list[Output]:
        """End a request; returns the last outputs of its unfinished sequences."""

    def step(self) -> list[Output]:
        """Compute one batch."""

    def statistics(self) -> EngineStatistics:
        """Gauges and counters as of the last step."""

    def check_integrity(self) -> None:
        """Raise where pages are lost or shared wrongly."""


class Responder(Protocol):
    """The way back to one client. Used by the sender thread alone."""

    def prepare(self, response: Response) -> Callable[[], None]:
        """Build one response; the function returned sends it. Nothing may follow a final one."""

    def cancelled(self) -> bool:
        """Whether the client cancelled or went away; not to be asked after the final response."""


class Ticket:
    """One request from its arrival to its final response."""

    __slots__ = (
        "arrival_time",
        "assembler",
        "deadline",
        "has_begun",
        "is_finished",
        "num_unfinished",
        "outcome",
        "parsed",
        "prepared",
        "request_id",
        "responder",
        "token_times",
        "waiting_bytes",
    )

    def __init__(self, request_id: str, responder: Responder) -> None:
        self.request_id = request_id
        self.arrival_time = time.monotonic()
        self.responder: Responder | None = responder
        """The sender thread's; None once the final response is sent."""
        self.is_finished = False
        """Whether the ending is decided; set by the ledger alone, once."""
        self.outcome: Outcome | None = None
        """What the ending was; set by the ledger alone."""
        self.has_begun = False
        """Whether a step has worked on it; set by the ledger for the step thread."""
        self.waiting_bytes = 0
        """Memory it is charged for while it waits; set by the ledger alone."""
        self.parsed: ParsedRequest | None = None
        """What it asks for; None again when it has ended."""
        self.deadline: float | None = None
        """On time.monotonic's clock."""
        self.prepared: PreparedRequest | None = None
        self.assembler: ResponseAssembler | None = None
        """Made at intake, then the sender thread's."""
        self.num_unfinished = 0
        """Sequences still to end; the step thread's."""
        self.token_times: list[float] = []
        """When the newest token of each sequence came, 0.0 before the first; the step thread's."""

    def set_parsed(self, parsed: ParsedRequest) -> None:
        """Note what the request asks for; its deadline counts from arrival."""
        self.parsed = parsed
        if parsed.timeout_ms:
            self.deadline = self.arrival_time + parsed.timeout_ms / 1000

    def set_prepared(self, prepared: PreparedRequest, assembler: ResponseAssembler) -> None:
        """Note what the engine made of it."""
        self.prepared = prepared
        self.assembler = assembler
        self.num_unfinished = len(prepared.sequences)
        self.token_times = [0.0] * len(prepared.sequences)

    @property
    def num_token_bytes(self) -> int:
        """Memory of its tokens, 4 bytes for each token of each of its sequences."""
        return 0 if self.prepared is None else 4 * sum(item.num_tokens for item in self.prepared.sequences)

    def is_being_computed(self) -> bool:
        """Whether any of its sequences has left the queue, be it that it was sent back there since."""
        if self.prepared is None:
            return False
        return any(
            sequence.num_output_tokens or sequence.status is not SequenceStatus.WAITING
            for sequence in self.prepared.sequences
        )
