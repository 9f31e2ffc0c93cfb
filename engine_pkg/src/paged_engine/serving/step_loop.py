"""StepLoop: the one thread that owns the engine. It steps while there is work and sleeps while there is none."""

from __future__ import annotations

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from paged_engine.errors import RequestError
from paged_engine.scheduling.sequence import FinishReason
from paged_engine.serving.ledger import Ledger
from paged_engine.serving.metrics import Outcome, ServiceMetrics
from paged_engine.serving.sender import Delivery, Sender
from paged_engine.serving.ticket import ServedEngine, Ticket

if TYPE_CHECKING:
    from paged_engine.engine import EngineStatistics
    from paged_engine.generation import Output

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
"""Deadlines may lie further ahead than a queue can be made to wait."""
_SPARE_DEADLINES = 256
"""So many deadlines of ended requests are kept at least before they are looked for."""


class StepLoop:
    """Adds, aborts and steps. Other threads leave it calls to make; whatever it decides goes through the ledger."""

    def __init__(self, engine: ServedEngine, ledger: Ledger, sender: Sender, metrics: ServiceMetrics) -> None:
        self._engine = engine
        self._ledger = ledger
        self._sender = sender
        self._metrics = metrics
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deadlines: list[tuple[float, str]] = []
        """A heap; those of requests that have ended are in it, too."""
        self._most_deadlines = _SPARE_DEADLINES
        self._in_engine: dict[str, Ticket] = {}
        self._queued: dict[str, Ticket] = {}
        """Those in the engine that no step has worked on."""
        self._stopping = False
        self._step_began: float | None = None
        self._statistics = engine.statistics()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def watch_deadline(self, ticket: Ticket) -> None:
        """End this request when its deadline passes, wherever it is then; any thread."""
        if ticket.deadline is not None:
            deadline = (ticket.deadline, ticket.request_id)
            self._calls.put(lambda: self._add_deadline(deadline))

    def add(self, ticket: Ticket) -> None:
        """Hand a prepared request to the engine; any thread."""
        self._calls.put(lambda: self._add(ticket))

    def abort(self, ticket: Ticket, reason: RequestError) -> None:
        """End this request for this reason, if it has not ended, and free what it holds; any thread."""
        self._calls.put(lambda: self._abort(ticket, reason))

    def close(self, timeout_s: float) -> None:
        """End all requests that are left as UNAVAILABLE, and then the thread."""
        self._calls.put(self._stop)
        self._thread.join(timeout_s)

    @property
    def statistics(self) -> EngineStatistics:
        """The engine's, as of the last step."""
        return self._statistics

    @property
    def seconds_in_step(self) -> float:
        """How long the step in progress has been running; 0.0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._make_calls()
                self._enforce_deadlines()
                if self._engine.has_work and not self._stopping:
                    self._step()
                self._statistics = self._engine.statistics()
        except Exception as error:
            logger.exception("the step loop ended")
            reason = f"the engine is down: {type(error).__name__}: {error}"
            self._ledger.close(reason)
            for ticket in self._ledger.live():  # nothing has been wrong with those that no step has worked on
                error_of = RequestError.internal if ticket.has_begun else RequestError.unavailable
                self._end(ticket, error_of(reason))
            with suppress(Exception):  # whatever state it is in
                self._statistics = self._engine.statistics()

    def _make_calls(self) -> None:
        """Make the calls left by other threads; without work, wait for one, or for the next deadline, if that is not too long."""
        if not self._engine.has_work:
            patience = self._deadlines[0][0] - time.monotonic() if self._deadlines else _LONGEST_WAIT_S
            try:
                self._calls.get(timeout=min(max(0.0, patience), _LONGEST_WAIT_S))()
            except queue.Empty:
                return
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            call()

    def _add_deadline(self, deadline: tuple[float, str]) -> None:
        """Keep it; now and then forget those of requests that have ended, or the latest would pile up."""
        heapq.heappush(self._deadlines, deadline)
        if len(self._deadlines) > self._most_deadlines:
            live = {ticket.request_id for ticket in self._ledger.live()}
            self._deadlines = [item for item in self._deadlines if item[1] in live]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _SPARE_DEADLINES

    def _add(self, ticket: Ticket) -> None:
        if ticket.is_finished or ticket.prepared is None:
            return
        try:
            self._engine.add(ticket.prepared)
        except Exception as error:
            logger.exception("adding request %s failed", ticket.request_id)
            self._abort(ticket, _as_request_error(error))
            return
        self._in_engine[ticket.request_id] = ticket
        self._queued[ticket.request_id] = ticket

    def _abort(self, ticket: Ticket, reason: RequestError) -> None:
        self._engine.abort(ticket.request_id, reason)
        self._end(ticket, reason)

    def _end(self, ticket: Ticket, error: RequestError) -> None:
        """The one way a request ends badly in this thread."""
        self._forget(ticket)
        if self._ledger.finish(ticket, error):
            self._sender.put([(ticket, error)])

    def _forget(self, ticket: Ticket) -> None:
        self._in_engine.pop(ticket.request_id, None)
        self._queued.pop(ticket.request_id, None)

    def _stop(self) -> None:
        self._stopping = True
        for ticket in self._ledger.live():
            self._abort(ticket, RequestError.unavailable("the model is being unloaded"))

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            ticket = self._ledger.find(request_id)
            if ticket is None:
                continue
            if ticket.has_begun:
                self._cut_short(ticket, now)
            else:
                waited = round((now - ticket.arrival_time) * 1000)
                self._abort(
                    ticket,
                    RequestError.unavailable(f"queue deadline passed: still waiting after {waited} ms"),
                )

    def _cut_short(self, ticket: Ticket, now: float) -> None:
        """End a request with the text so far."""
        try:
            outputs = self._engine.abort(ticket.request_id, FinishReason.TIMEOUT)
        except Exception as error:
            logger.exception("ending request %s at its deadline failed", ticket.request_id)
            self._abort(ticket, _as_request_error(error))
            return
        self._sender.put(self._deliveries(outputs, now))

    def _step(self) -> None:
        began = time.monotonic()
        self._step_began = began
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._recover(error)
            return
        finally:
            self._step_began = None
        self._note_beginnings(began)
        if outputs:
            self._sender.put(self._deliveries(outputs, time.monotonic()))

    def _recover(self, error: Exception) -> None:
        """End all that is in the engine and go on, if the engine is sound without it; raises if it is not."""
        logger.error("a step failed outside the model", exc_info=error)
        reason = RequestError.internal(f"the step failed: {type(error).__name__}: {error}")
        for ticket in list(self._in_engine.values()):
            self._abort(ticket, reason)
        self._engine.check_integrity()
        if self._engine.has_work:
            self._engine.step()  # takes in what is in flight, for nobody
        if self._engine.has_work:
            raise RuntimeError("the engine has work that no request owns") from error

    def _note_beginnings(self, step_began: float) -> None:
        """Requests that the step has taken out of the queue have waited until it began."""
        begun = [ticket for ticket in self._queued.values() if ticket.is_being_computed()]
        for ticket in begun:
            del self._queued[ticket.request_id]
            self._ledger.begin(ticket)
        self._metrics.record(
            self._metrics.queue_seconds, [step_began - ticket.arrival_time for ticket in begun]
        )

    def _deliveries(self, outputs: Sequence[Output], now: float) -> list[Delivery]:
        """Group outputs by request; requests that end with them are ended in the ledger first, so that the place is free."""
        by_request: dict[str, list[Output]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        deliveries: list[Delivery] = []
        for request_id, of_request in by_request.items():
            ticket = self._in_engine.get(request_id)
            if ticket is None or ticket.is_finished:
                continue
            self._time_tokens(ticket, of_request, now)
            error = next((output.error for output in of_request if output.error is not None), None)
            if error is not None:
                self._abort(ticket, error)
                continue
            ticket.num_unfinished -= sum(output.finished for output in of_request)
            if ticket.num_unfinished == 0:
                self._forget(ticket)
                if not self._ledger.finish(ticket, _outcome(of_request)):
                    continue
            deliveries.append((ticket, of_request))
        return deliveries

    def _time_tokens(self, ticket: Ticket, outputs: Sequence[Output], now: float) -> None:
        for output in outputs:
            if not output.token_ids:
                continue
            previous = ticket.token_times[output.index]
            if previous:
                gap = (now - previous) / len(output.token_ids)
                self._metrics.record(self._metrics.inter_token_seconds, [gap] * len(output.token_ids))
            elif not any(ticket.token_times):
                self._metrics.record(self._metrics.first_token_seconds, [now - ticket.arrival_time])
            ticket.token_times[output.index] = now


def _outcome(outputs: Sequence[Output]) -> Outcome:
    """A request's outcome: that of the sequence which ended last."""
    reasons = [output.finish_reason for output in outputs if output.finish_reason is not None]
    return Outcome(reasons[-1].value)


def _as_request_error(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    return RequestError.internal(f"{type(error).__name__}: {error}")
