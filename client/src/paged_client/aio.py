"""The asyncio client: the synchronous one with awaits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from paged_client.endpoint import parse_endpoint
from paged_client.errors import PagedClientError, TimedOut
from paged_client.grpc_transport import AsyncGrpcTransport
from paged_client.http_transport import AsyncHttpTransport
from paged_client.request import GenerationOptions, Prompt
from paged_client.session import READINESS_PAUSE_S, Session, Settings
from paged_client.transport import AsyncTransport
from paged_client.types import Delta, Generation, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


class AsyncStream:
    """A generation in progress: an asynchronous iterator of deltas, made by `AsyncClient.stream`.

    The request is sent when the iteration begins. Leaving the loop early and closing the stream (by `aclose`,
    at the end of an `async with` block, or by letting go of the object) or cancelling the task that waits for
    it ends the request on the server as well.
    """

    def __init__(self, transport: AsyncTransport, session: Session) -> None:
        self._session = session
        self._deltas = _run(transport, session)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._deltas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def result(self) -> Generation:
        """The complete generation, once the iteration has come to its end; otherwise as `Stream.result`."""
        return self._session.result

    def cancel(self) -> None:
        """Ends the request, from any task of the event loop. A loop over the stream in another task simply ends."""
        self._session.cancellation.cancel()

    async def aclose(self) -> None:
        """Ends the request if it still goes on, and releases its connection."""
        self.cancel()
        # A RuntimeError says that another task is inside the generator; the cancellation makes it finish there.
        with suppress(RuntimeError):
            await self._deltas.aclose()


class AsyncClient:
    """A client of the Triton model `llm` for asyncio; one object serves any number of tasks of one event loop.

    The arguments are those of `Client`.
    """

    def __init__(
        self,
        url: str = "localhost:8001",
        protocol: Protocol | None = None,
        model: str = "llm",
        *,
        timeout_s: float | None = 600.0,
        retries: int = 0,
        retry_delay_s: float = 0.25,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        endpoint = parse_endpoint(url, protocol)
        self._name = f"{model!r} at {endpoint.address}"
        self._settings = Settings(timeout_s, retries, retry_delay_s)
        make_transport: Callable[..., AsyncTransport] = (
            AsyncGrpcTransport if endpoint.protocol == "grpc" else AsyncHttpTransport
        )
        self._transport = make_transport(endpoint, model, headers or {})

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Generates text and yields it as it comes: `async for delta in client.stream(…)`. See `Client.stream`."""
        session = self._settings.begin(
            prompt, options, stream=True, timeout_s=timeout_s, request_id=request_id
        )
        return AsyncStream(self._transport, session)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Generates text and returns it as a whole. See `Client.generate`."""
        session = self._settings.begin(
            prompt, options, stream=False, timeout_s=timeout_s, request_id=request_id
        )
        async with aclosing(_run(self._transport, session)) as deltas:
            async for _ in deltas:
                pass
        return session.result

    async def is_ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the server can be reached within `timeout_s` seconds and says that the model is ready."""
        return await self._unreadiness(timeout_s) is None

    async def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Returns as soon as the model is ready. Raises TimedOut, with the reason, after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (
            reason := await self._unreadiness(max(0.1, min(5.0, deadline - time.monotonic())))
        ) is not None:
            if time.monotonic() >= deadline:
                raise TimedOut(f"{self._name} is not ready after {timeout_s:g} seconds: {reason}")
            await asyncio.sleep(READINESS_PAUSE_S)

    async def _unreadiness(self, timeout_s: float) -> str | None:
        """Why the model cannot be used now; None if it can."""
        try:
            ready = await self._transport.is_ready(timeout_s)
        except PagedClientError as error:
            return str(error)
        return None if ready else "the server says that the model is not ready"

    async def aclose(self) -> None:
        """Closes the connections; the object cannot be used afterwards."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


async def _run(transport: AsyncTransport, session: Session) -> AsyncGenerator[Delta, None]:
    """Drives a session to its end. A function without `self`: a dropped AsyncStream is then ended at once."""
    session.start()
    while not session.cancellation.is_requested():
        try:
            attempt = transport.responses(session.request, session.remaining_s(), session.cancellation)
            async with aclosing(attempt) as responses:
                async for response in responses:
                    for delta in session.receive(response):
                        yield delta
                    if session.cancellation.is_requested():
                        return
            session.finish()
            return
        except PagedClientError as error:
            pause_s = session.recover(error)
        if pause_s is None:
            return
        interrupted = asyncio.Event()
        with session.cancellation.bound(interrupted.set), suppress(asyncio.TimeoutError):
            await asyncio.wait_for(interrupted.wait(), pause_s)
