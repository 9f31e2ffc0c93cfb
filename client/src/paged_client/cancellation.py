"""How one part of a program ends a generation that another part waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """A switch that can be thrown once, from any thread; whoever waits binds the action that wakes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._interrupt: Callable[[], object] | None = None

    def is_requested(self) -> bool:
        """Whether the switch has been thrown."""
        return self._requested

    def cancel(self) -> None:
        """Throws the switch and interrupts what is bound."""
        with self._lock:
            self._requested = True
            interrupt = self._interrupt
        if interrupt is not None:
            interrupt()

    @contextmanager
    def bound(self, interrupt: Callable[[], object]) -> Iterator[None]:
        """While inside, `cancel` calls `interrupt`; at once, if it was called before."""
        with self._lock:
            self._interrupt = interrupt
            requested = self._requested
        if requested:
            interrupt()
        try:
            yield
        finally:
            with self._lock:
                self._interrupt = None
