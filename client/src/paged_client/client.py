"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from threading import Event
from typing import TYPE_CHECKING

from paged_client.endpoint import parse_endpoint
from paged_client.errors import PagedClientError, TimedOut
from paged_client.grpc_transport import GrpcTransport
from paged_client.http_transport import HttpTransport
from paged_client.request import GenerationOptions, Prompt
from paged_client.session import READINESS_PAUSE_S, Session, Settings
from paged_client.transport import Transport
from paged_client.types import Delta, Generation, Protocol

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self, Unpack


class Stream:
    """A generation in progress: an iterator of deltas, made by `Client.stream`.

    The request is sent when the iteration begins. Leaving the loop early and closing the stream (by `close`,
    at the end of a `with` block, or by letting go of the object) ends the request on the server as well.
    """

    def __init__(self, transport: Transport, session: Session) -> None:
        self._session = session
        self._deltas = _run(transport, session)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def result(self) -> Generation:
        """The complete generation, once the iteration has come to its end.

        Raises what ended it otherwise: the error it failed with, Cancelled after `cancel` or `close`,
        RuntimeError while it still goes on.
        """
        return self._session.result

    def cancel(self) -> None:
        """Ends the request, from any thread. A loop over the stream, here or in another thread, simply ends."""
        self._session.cancellation.cancel()

    def close(self) -> None:
        """Ends the request if it still goes on, and releases its connection."""
        self.cancel()
        # A ValueError says that another thread is inside the generator; the cancellation makes it finish there.
        with suppress(ValueError):
            self._deltas.close()


class Client:
    """A client of the Triton model `llm`; one object serves any number of threads.

    `url` is `host:port`, optionally behind `grpc://`, `grpcs://` (TLS), `http://` or `https://`. The scheme
    decides the protocol; without a scheme `protocol` ("grpc" or "http") does; without that, port 8000 means
    http and every other port grpc. A port left out is Triton's usual one.

    `timeout_s` limits each generation from sending the request to the last response, in seconds (None: no
    limit); `stream` and `generate` can set another limit. `retries` is the number of further attempts when
    the server cannot be reached or answers UNAVAILABLE before any text has come, with pauses that start at
    `retry_delay_s` seconds and double up to 8. `headers` go along with every request (HTTP headers or gRPC
    metadata), for a gateway that wants a token.

    Raises ValueError for a url or setting that makes no sense. No connection is made before the first call.
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
        make_transport: Callable[..., Transport] = (
            GrpcTransport if endpoint.protocol == "grpc" else HttpTransport
        )
        self._transport = make_transport(endpoint, model, headers or {})

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Generates text and yields it as it comes.

        `prompt` is text, a list of token ids, or a list of {role, content} messages. `timeout_s` is this
        call's own time limit in seconds (`math.inf` for none), `request_id` appears in the server's log;
        `options` are those of `GenerationOptions`. Raises InvalidRequest for a value that cannot be sent,
        TypeError for an unknown option; the iteration raises ServerError (InvalidRequest, Unavailable, …),
        ConnectionFailed or TimedOut.
        """
        session = self._settings.begin(
            prompt, options, stream=True, timeout_s=timeout_s, request_id=request_id
        )
        return Stream(self._transport, session)

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        **options: Unpack[GenerationOptions],
    ) -> Generation:
        """Generates text and returns it as a whole; arguments and errors are those of `stream`.

        Over HTTP, Triton does not notice that the caller of a whole answer has gone: after TimedOut the
        server goes on until `max_tokens` or `timeout_ms`. gRPC and `stream` have no such gap.
        """
        session = self._settings.begin(
            prompt, options, stream=False, timeout_s=timeout_s, request_id=request_id
        )
        for _ in _run(self._transport, session):
            pass
        return session.result

    def is_ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the server can be reached within `timeout_s` seconds and says that the model is ready."""
        return self._unreadiness(timeout_s) is None

    def wait_until_ready(self, timeout_s: float = 60.0) -> None:
        """Returns as soon as the model is ready. Raises TimedOut, with the reason, after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (reason := self._unreadiness(max(0.1, min(5.0, deadline - time.monotonic())))) is not None:
            if time.monotonic() >= deadline:
                raise TimedOut(f"{self._name} is not ready after {timeout_s:g} seconds: {reason}")
            time.sleep(READINESS_PAUSE_S)

    def _unreadiness(self, timeout_s: float) -> str | None:
        """Why the model cannot be used now; None if it can."""
        try:
            return (
                None if self._transport.is_ready(timeout_s) else "the server says that the model is not ready"
            )
        except PagedClientError as error:
            return str(error)

    def close(self) -> None:
        """Closes the connections; the object cannot be used afterwards."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _run(transport: Transport, session: Session) -> Generator[Delta, None, None]:
    """Drives a session to its end. A function without `self`: a dropped Stream is then freed, and ended, at once."""
    session.start()
    while not session.cancellation.is_requested():
        try:
            attempt = transport.responses(session.request, session.remaining_s(), session.cancellation)
            with closing(attempt) as responses:
                for response in responses:
                    yield from session.receive(response)
                    if session.cancellation.is_requested():
                        return
            session.finish()
            return
        except PagedClientError as error:
            pause_s = session.recover(error)
        if pause_s is None:
            return
        interrupted = Event()
        with session.cancellation.bound(interrupted.set):
            interrupted.wait(pause_s)
