"""What the clients ask of a transport; gRPC and HTTP each have a synchronous and an asyncio one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Protocol

from paged_client.cancellation import Cancellation
from paged_client.request import Request
from paged_client.response import Response


class Transport(Protocol):
    """Carries requests of one model to one server; safe to use from several threads."""

    def responses(
        self, request: Request, timeout_s: float | None, cancellation: Cancellation
    ) -> Generator[Response, None, None]:
        """Sends the request and yields its responses; closing the generator ends the request on the server.

        Raises TimedOut after `timeout_s` seconds in all, Cancelled once `cancellation` is requested,
        ConnectionFailed where the server cannot be reached or goes away, ServerError for the server's own
        errors. Whether the responses were complete is for the caller to check.
        """

    def is_ready(self, timeout_s: float) -> bool:
        """Whether the server says that the model is ready. Raises ConnectionFailed, TimedOut or ServerError."""

    def close(self) -> None:
        """Closes the connections."""


class AsyncTransport(Protocol):
    """The same for asyncio; bound to the event loop it is first used on."""

    def responses(
        self, request: Request, timeout_s: float | None, cancellation: Cancellation
    ) -> AsyncGenerator[Response, None]:
        """As `Transport.responses`."""

    async def is_ready(self, timeout_s: float) -> bool:
        """As `Transport.is_ready`."""

    async def aclose(self) -> None:
        """Closes the connections."""
