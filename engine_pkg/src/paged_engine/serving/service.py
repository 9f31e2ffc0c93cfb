"""Service: the threads between Triton and the engine, put together.

`submit` (Triton's thread) takes a request in or refuses it; intake threads tokenize; the step loop computes; the sender
answers, and between two answers looks after cancelled requests, a wedged step loop and the metrics.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from paged_engine.config import EngineConfig
from paged_engine.errors import RequestError
from paged_engine.serving.contract import Contract, ParsedRequest
from paged_engine.serving.intake import Intake
from paged_engine.serving.ledger import Ledger
from paged_engine.serving.metrics import ServiceMetrics
from paged_engine.serving.outputs import ResponseAssembler
from paged_engine.serving.sender import Sender
from paged_engine.serving.sources import RawRequest
from paged_engine.serving.step_loop import StepLoop
from paged_engine.serving.ticket import Responder, ServedEngine, Ticket

if TYPE_CHECKING:
    from paged_engine.admission import PreparedRequest

logger = logging.getLogger(__name__)

WEDGED_AFTER_S = 120.0
"""A step that runs longer has hung: the model is not ready, and those in flight are answered with an error."""

_POLL_S = 0.05
_MAX_POLLS = 20
"""Asking whether a request is cancelled is a round trip to another process, as dear as sending a token: every request is
asked every second time, and so many at most each time, in turn."""
_PUBLISH_S = 0.25
_CLOSE_TIMEOUT_S = 10.0


class Service:
    """Serves one engine to any number of clients."""

    def __init__(
        self,
        engine: ServedEngine,
        config: EngineConfig,
        metrics: ServiceMetrics,
        wedged_after_s: float = WEDGED_AFTER_S,
    ) -> None:
        """
        Args:
            engine: from now on used by this object alone.
            config: the effective configuration.
            metrics: closed with the service.
            wedged_after_s: see WEDGED_AFTER_S.
        """
        self._engine = engine
        self._metrics = metrics
        self._wedged_after_s = wedged_after_s
        self._contract = Contract(config, engine.eos_token_ids)
        self._request_ids = itertools.count()
        self._ledger = Ledger(config.max_batch_size, config.max_queue_size, config.max_queue_bytes, metrics)
        self._sender = Sender(self._settle, self._keep_house)
        self._loop = StepLoop(engine, self._ledger, self._sender, metrics)
        self._intake = Intake(self._prepare)
        self._next_poll = 0.0
        self._num_polls = 0
        self._next_publication = 0.0

    def start(self) -> None:
        """Start the threads."""
        self._sender.start()
        self._loop.start()
        self._intake.start()

    def submit(self, read: Callable[[], RawRequest], responder: Responder) -> None:
        """Take one request in; returns at once and never raises.

        Args:
            read: copies the request; called before this returns, and not at all where the request is refused unread.
            responder: gets exactly one final response.
        """
        ticket = Ticket(str(next(self._request_ids)), responder)
        try:
            self._check_healthy()
            self._ledger.admit(ticket)
            parsed = self._contract.parse(read(), ticket.request_id)
            self._ledger.charge(ticket, parsed.num_bytes)
            ticket.set_parsed(parsed)
        except Exception as error:
            self._refuse(ticket, error)
            return
        self._loop.watch_deadline(ticket)
        self._intake.put(ticket, parsed)

    def is_ready(self) -> bool:
        """Whether requests are taken in and being worked on."""
        return self._ledger.closed is None and not self._is_wedged()

    def close(self) -> None:
        """Refuse what comes, end what is left as UNAVAILABLE, answer it, and end the threads."""
        self._ledger.close("the model is being unloaded")
        self._loop.close(_CLOSE_TIMEOUT_S)
        for ticket in self._ledger.live():  # only where the step loop hangs
            self._refuse(ticket, RequestError.unavailable("the model is being unloaded"))
        self._intake.close(_CLOSE_TIMEOUT_S)
        self._sender.close(_CLOSE_TIMEOUT_S)
        self._metrics.close()

    def _check_healthy(self) -> None:
        if self._is_wedged():
            raise RequestError.unavailable(self._wedged_message())

    def _is_wedged(self) -> bool:
        return self._loop.seconds_in_step > self._wedged_after_s

    def _wedged_message(self) -> str:
        return f"the engine hangs: a step has been running for {self._loop.seconds_in_step:.0f} s"

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """End a request that has not reached the engine."""
        if not isinstance(error, RequestError):
            logger.error("taking in request %s failed", ticket.request_id, exc_info=error)
            error = RequestError.internal(f"{type(error).__name__}: {error}")
        if self._ledger.finish(ticket, error):
            self._sender.put([(ticket, error)])

    def _prepare(self, ticket: Ticket) -> None:
        """The work of an intake thread."""
        parsed = ticket.parsed
        if ticket.is_finished or parsed is None:
            return
        try:
            prepared = self._engine.prepare(parsed.request)
            assembler = ResponseAssembler(
                parsed,
                num_prompt_tokens=prepared.num_prompt_tokens,
                prompt_text=self._prompt_text(parsed, prepared),
                decode_token=self._engine.tokenizer.decode_token,
            )
            ticket.set_prepared(prepared, assembler)
            self._ledger.charge(ticket, ticket.num_token_bytes)
        except Exception as error:
            self._refuse(ticket, error)
            return
        self._loop.add(ticket)

    def _prompt_text(self, parsed: ParsedRequest, prepared: PreparedRequest) -> str:
        """The prompt as it stands in front of the output, where it is wanted there."""
        if not parsed.prepend_prompt:
            return ""
        prompt = parsed.request.prompt
        return (
            prompt
            if isinstance(prompt, str)
            else self._engine.tokenizer.decode(prepared.sequences[0].token_ids)
        )

    def _settle(self, ticket: Ticket, failure: RequestError | None) -> None:
        """A request has been answered; one whose response could not be built or sent is let go of everywhere else, too."""
        self._ledger.settle(ticket, failure)
        if failure is not None:
            self._loop.abort(ticket, failure)

    def _keep_house(self) -> float:
        """What the sender thread does between sends; returns the seconds until it is due again."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._end_wedged()
            self._end_cancelled()
            self._next_poll = now + _POLL_S
        if now >= self._next_publication:
            self._metrics.publish(self._loop.statistics, *self._ledger.counts())
            self._next_publication = now + _PUBLISH_S
        return max(0.0, min(self._next_poll, self._next_publication) - time.monotonic())

    def _end_cancelled(self) -> None:
        live = self._ledger.live()
        num_polls = min(_MAX_POLLS, (len(live) + 1) // 2)
        for _ in range(num_polls):
            self._num_polls += 1
            ticket = live[self._num_polls % len(live)]
            if ticket.responder is not None and ticket.responder.cancelled():
                self._loop.abort(ticket, RequestError.cancelled())

    def _end_wedged(self) -> None:
        if self._is_wedged():
            error = RequestError.unavailable(self._wedged_message())
            for ticket in self._ledger.live():
                if self._ledger.finish(ticket, error):
                    self._sender.put([(ticket, error)])
                    self._loop.abort(ticket, error)
