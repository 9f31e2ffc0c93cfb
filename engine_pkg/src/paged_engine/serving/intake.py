"""Intake: tokenizes and checks requests off the step thread, small ones never behind a large one or one with a grammar."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from paged_engine.serving.contract import ParsedRequest
from paged_engine.serving.ticket import Ticket

_LARGE_REQUEST_BYTES = 64 * 1024
"""A request beyond this takes another lane; tokenizing so many bytes takes some ten milliseconds."""


class Intake:
    """Three lanes with a thread each; requests of one lane keep their order."""

    def __init__(self, prepare: Callable[[Ticket], None]) -> None:
        """
        Args:
            prepare: does the work for one request and must not raise.
        """
        self._small = _Lane(prepare, "intake")
        self._large = _Lane(prepare, "intake-large")
        self._guided = _Lane(prepare, "intake-guided")

    @property
    def _lanes(self) -> tuple[_Lane, ...]:
        return (self._small, self._large, self._guided)

    def start(self) -> None:
        """Start the threads."""
        for lane in self._lanes:
            lane.thread.start()

    def put(self, ticket: Ticket, parsed: ParsedRequest) -> None:
        """Have this request prepared; any thread."""
        if parsed.request.sampling.structured_outputs is not None:
            lane = self._guided  # nobody knows how long a grammar takes to compile
        else:
            lane = self._large if parsed.num_bytes > _LARGE_REQUEST_BYTES else self._small
        lane.tickets.put(ticket)

    def close(self, timeout_s: float) -> None:
        """Work off what was put before, then end the threads."""
        for lane in self._lanes:
            lane.tickets.put(None)
        for lane in self._lanes:
            lane.thread.join(timeout_s)


class _Lane:
    """A queue and the thread that empties it."""

    def __init__(self, prepare: Callable[[Ticket], None], name: str) -> None:
        self._prepare = prepare
        self.tickets: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while (ticket := self.tickets.get()) is not None:
            self._prepare(ticket)
