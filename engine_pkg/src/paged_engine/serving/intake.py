"""Intake: tokenizes and checks requests off the step thread, small prompts never behind a large one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from paged_engine.serving.ticket import Ticket

_LARGE_PROMPT_BYTES = 64 * 1024
"""A prompt beyond this takes the other lane; tokenizing so many bytes takes some ten milliseconds."""


class Intake:
    """Two lanes with a thread each; requests of one lane keep their order."""

    def __init__(self, prepare: Callable[[Ticket], None]) -> None:
        """
        Args:
            prepare: does the work for one request and must not raise.
        """
        self._prepare = prepare
        self._small = _Lane(prepare, "intake")
        self._large = _Lane(prepare, "intake-large")

    def start(self) -> None:
        """Start the threads."""
        self._small.thread.start()
        self._large.thread.start()

    def put(self, ticket: Ticket, num_prompt_bytes: int) -> None:
        """Have this request prepared; any thread."""
        lane = self._large if num_prompt_bytes > _LARGE_PROMPT_BYTES else self._small
        lane.tickets.put(ticket)

    def close(self, timeout_s: float) -> None:
        """Work off what was put before, then end the threads."""
        for lane in (self._small, self._large):
            lane.tickets.put(None)
        for lane in (self._small, self._large):
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
