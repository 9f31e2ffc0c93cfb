"""Sender: the one thread that talks to clients, so that responses keep their order and FINAL is sent in one place.

Sending is a round trip to another process; the step loop only leaves its outputs here and goes on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paged_engine.errors import RequestError
from paged_engine.serving.outputs import Response
from paged_engine.serving.ticket import Ticket

if TYPE_CHECKING:
    from paged_engine.generation import Output

logger = logging.getLogger(__name__)

Delivery = tuple[Ticket, "Sequence[Output] | RequestError"]
"""What one step brought for a request, or the error it ends with."""


class Sender:
    """Builds responses and sends them, in the order in which they were put."""

    def __init__(
        self, on_answered: Callable[[Ticket, RequestError | None], None], housekeeping: Callable[[], float]
    ) -> None:
        """
        Args:
            on_answered: told, once for each request, when its final response has been sent; with the error, when it had
                to be ended since a response could not be built or sent.
            housekeeping: called between sends; returns after how many seconds it wants to be called again at the latest.
        """
        self._on_answered = on_answered
        self._housekeeping = housekeeping
        self._deliveries: queue.SimpleQueue[Sequence[Delivery] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Have these sent; any thread."""
        self._deliveries.put(deliveries)

    def close(self, timeout_s: float) -> None:
        """Send what was put before, then end the thread."""
        self._deliveries.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            patience = self._keep_house()
            try:
                deliveries = self._deliveries.get(timeout=patience)
            except queue.Empty:
                continue
            if deliveries is None:
                self._keep_house()
                return
            # First all are built, then all are sent: computing in between would turn the code for each out of the caches.
            for prepared in [self._prepare(*delivery) for delivery in deliveries]:
                if prepared is not None:
                    self._send(*prepared)

    def _keep_house(self) -> float:
        try:
            return self._housekeeping()
        except Exception:
            logger.exception("housekeeping failed")
            return 1.0

    def _prepare(
        self, ticket: Ticket, content: Sequence[Output] | RequestError
    ) -> tuple[Ticket, Callable[[], None], bool] | None:
        """The response this content makes, if it makes one: what sends it, and whether it is final. Never raises."""
        if ticket.responder is None:
            return None  # ended with an error before, while this was on its way
        try:
            response = self._response(ticket, content)
            if response is None:
                return None
            return ticket, ticket.responder.prepare(response), response.is_final
        except Exception as error:
            self._fail(ticket, error)
            return None

    def _send(self, ticket: Ticket, send: Callable[[], None], is_final: bool) -> None:
        """Never raises."""
        try:
            send()
        except Exception as error:
            self._fail(ticket, error)
            return
        if is_final:
            ticket.responder = None
            self._on_answered(ticket, None)

    def _response(self, ticket: Ticket, content: Sequence[Output] | RequestError) -> Response | None:
        if isinstance(content, RequestError):
            return Response.failed(content)
        assert ticket.assembler is not None, "outputs come after intake"
        return ticket.assembler.add(content)

    def _fail(self, ticket: Ticket, cause: Exception) -> None:
        """End a request whose response could not be built or sent."""
        logger.error(
            "building or sending a response for request %s failed", ticket.request_id, exc_info=cause
        )
        error = RequestError.internal(f"the response failed: {type(cause).__name__}: {cause}")
        responder, ticket.responder = ticket.responder, None
        self._on_answered(ticket, error)
        try:
            if responder is not None:
                responder.prepare(Response.failed(error))()
        except Exception as again:  # the transport is broken, or the failed response had been the final one
            logger.warning("request %s got no final response: %s", ticket.request_id, again)
