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
            for ticket, content in deliveries:
                self._deliver(ticket, content)

    def _keep_house(self) -> float:
        try:
            return self._housekeeping()
        except Exception:
            logger.exception("housekeeping failed")
            return 1.0

    def _deliver(self, ticket: Ticket, content: Sequence[Output] | RequestError) -> None:
        """Send the response this content makes, if it makes one. Never raises."""
        if ticket.responder is None:
            return  # ended with an error before, while this was on its way
        try:
            response = self._response(ticket, content)
            if response is not None:
                ticket.responder.send(response)
        except Exception as error:
            logger.exception("building or sending a response for request %s failed", ticket.request_id)
            self._fail(ticket, RequestError.internal(f"the response failed: {type(error).__name__}: {error}"))
            return
        if response is not None and response.is_final:
            ticket.responder = None
            self._on_answered(ticket, None)

    def _response(self, ticket: Ticket, content: Sequence[Output] | RequestError) -> Response | None:
        if isinstance(content, RequestError):
            return Response.failed(content)
        assert ticket.assembler is not None, "outputs come after intake"
        return ticket.assembler.add(content)

    def _fail(self, ticket: Ticket, error: RequestError) -> None:
        responder, ticket.responder = ticket.responder, None
        self._on_answered(ticket, error)
        try:
            if responder is not None:
                responder.send(Response.failed(error))
        except Exception as again:  # the transport is broken, or the failed response had been the final one
            logger.warning("request %s got no final response: %s", ticket.request_id, again)
