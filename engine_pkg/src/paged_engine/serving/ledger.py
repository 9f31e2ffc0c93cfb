"""Ledger: which requests are in the house, and how much of its memory those that wait take.

It alone decides who may come in, and that each ends exactly once.
"""

from __future__ import annotations

import threading
import time

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.serving.metrics import Outcome, ServiceMetrics
from paged_engine.serving.ticket import Ticket

_OUTCOMES = {
    ErrorCode.INVALID_ARG: Outcome.INVALID,
    ErrorCode.UNAVAILABLE: Outcome.UNAVAILABLE,
    ErrorCode.CANCELLED: Outcome.CANCELLED,
    ErrorCode.INTERNAL: Outcome.ERROR,
}


class Ledger:
    """The requests taken in and not ended yet. Every method may be called from any thread."""

    def __init__(
        self, max_running: int, max_waiting: int, max_waiting_bytes: int, metrics: ServiceMetrics
    ) -> None:
        """
        Args:
            max_running: requests that a step can work on (max_batch_size).
            max_waiting: requests that may wait besides (max_queue_size).
            max_waiting_bytes: what all that wait may hold together (max_queue_bytes).
            metrics: counts the outcomes.
        """
        self._limit = max_running + max_waiting
        self._limits = f"max_batch_size {max_running}, max_queue_size {max_waiting}"
        self._max_waiting_bytes = max_waiting_bytes
        self._metrics = metrics
        self._lock = threading.Lock()
        self._live: dict[str, Ticket] = {}
        self._num_begun = 0
        self._waiting_bytes = 0
        self._closed: str | None = None

    def admit(self, ticket: Ticket) -> None:
        """Take a request in.

        Raises:
            RequestError: UNAVAILABLE, since the queue is full or nothing is taken in any more.
        """
        with self._lock:
            if self._closed is not None:
                raise RequestError.unavailable(self._closed)
            if len(self._live) >= self._limit:
                raise RequestError.unavailable(
                    f"the queue is full: {len(self._live)} requests are running or waiting ({self._limits}); try again later"
                )
            self._live[ticket.request_id] = ticket

    def charge(self, ticket: Ticket, num_bytes: int) -> None:
        """Count memory that a request holds from now on until a step has worked on it, or it ends.

        Raises:
            RequestError: UNAVAILABLE, since those that wait would hold more than max_queue_bytes with it; INVALID_ARG,
                since it would do so alone. Then nothing is counted.
        """
        with self._lock:
            if ticket.is_finished:
                return
            total = ticket.waiting_bytes + num_bytes
            if total > self._max_waiting_bytes:
                raise RequestError.invalid(
                    f"the request is too large to wait: its inputs and tokens take {total} bytes, at most "
                    f"max_queue_bytes = {self._max_waiting_bytes} may wait; send less in one request"
                )
            if self._waiting_bytes + num_bytes > self._max_waiting_bytes:
                others = self._waiting_bytes - ticket.waiting_bytes
                raise RequestError.unavailable(
                    f"the queue is full: the requests that wait hold {others} bytes, with the {total} of this one more than "
                    f"max_queue_bytes = {self._max_waiting_bytes}; try again later"
                )
            ticket.waiting_bytes = total
            self._waiting_bytes += num_bytes

    def close(self, reason: str) -> None:
        """Refuse new requests from now on, for this reason. The first reason stands."""
        with self._lock:
            self._closed = self._closed or reason

    @property
    def closed(self) -> str | None:
        """Why nothing is taken in any more; None as long as it is."""
        return self._closed

    def begin(self, ticket: Ticket) -> None:
        """A step has worked on this request for the first time."""
        with self._lock:
            if not ticket.is_finished and not ticket.has_begun:
                ticket.has_begun = True
                self._num_begun += 1
                self._discharge(ticket)

    def finish(self, ticket: Ticket, ending: Outcome | RequestError) -> bool:
        """End a request, refused ones included; its place is free.

        Returns:
            False if it had ended before; then the first ending stands and nothing may be sent for this one.
        """
        with self._lock:
            if ticket.is_finished:
                return False
            ticket.is_finished = True
            self._live.pop(ticket.request_id, None)
            self._num_begun -= ticket.has_begun
            self._discharge(ticket)
            ticket.parsed = None  # wherever the ticket still lies, what it asked for is of no use any more
            ticket.outcome = _OUTCOMES[ending.code] if isinstance(ending, RequestError) else ending
        if ticket.has_begun:
            self._metrics.record(self._metrics.request_seconds, [time.monotonic() - ticket.arrival_time])
        return True

    def settle(self, ticket: Ticket, failure: RequestError | None = None) -> None:
        """Count the outcome of a request that has been answered.

        Args:
            failure: why its answer could not be sent, if that is so; then that is the outcome, whatever it was before.
        """
        if failure is not None:
            self.finish(ticket, failure)
            ticket.outcome = _OUTCOMES[failure.code]
        if ticket.outcome is not None:
            self._metrics.count_request(ticket.outcome)

    def _discharge(self, ticket: Ticket) -> None:
        self._waiting_bytes -= ticket.waiting_bytes
        ticket.waiting_bytes = 0

    def find(self, request_id: str) -> Ticket | None:
        """A live request by its id."""
        with self._lock:
            return self._live.get(request_id)

    def live(self) -> list[Ticket]:
        """All requests that have not ended, in order of arrival."""
        with self._lock:
            return list(self._live.values())

    def counts(self) -> tuple[int, int]:
        """How many requests a step has worked on, and how many still wait for that."""
        with self._lock:
            return self._num_begun, len(self._live) - self._num_begun

    @property
    def waiting_bytes(self) -> int:
        """What the requests that wait hold together."""
        return self._waiting_bytes
