"""HTTP: Triton's generate extension, `generate_stream` (server-sent events) and `generate` (one JSON object).

Each generation has a connection of its own: ending it is how a server learns that nobody reads any more, and
a connection that is never used twice cannot turn out to have been closed in between. While a thread or task
waits on the connection, another one ends the wait by shutting the socket down.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from paged_client.cancellation import Cancellation
from paged_client.endpoint import Endpoint
from paged_client.errors import (
    ConnectionFailed,
    PagedClientError,
    ServerError,
    TimedOut,
    cancelled_here,
    server_error,
    unreadable,
)
from paged_client.request import Request
from paged_client.response import Response
from paged_client.server_sent_events import EventDecoder


class _Connection:
    """The socket under one generation, learned from httpx's trace events, and why it was shut down."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._network_stream: Any = None
        self._is_shut = False
        self.has_expired = False

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """An httpx trace function: keeps the newest network stream (TLS replaces the plain one)."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._network_stream = info["return_value"]
                is_shut = self._is_shut
            if is_shut:
                self.shut_down()

    async def async_trace(self, event: str, info: Mapping[str, Any]) -> None:
        """The same for httpx's asyncio client."""
        self.trace(event, info)

    def shut_down(self) -> None:
        """Ends the connection in both directions, which wakes whoever reads from it. May be called from any thread."""
        with self._lock:
            self._is_shut = True
            network_stream = self._network_stream
        if network_stream is None:
            return
        try:
            # A duplicate, since asyncio hands out a socket that must not be changed, and TLS sockets do more.
            number = network_stream.get_extra_info("socket").fileno()
            with socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # It is closed already, by us or by the other side.

    def expire(self) -> None:
        """Shuts down because the time is up."""
        self.has_expired = True
        self.shut_down()


class _Wire:
    """What both HTTP transports share: bodies in and out, and the meaning of failures."""

    def __init__(self, endpoint: Endpoint, model: str, headers: Mapping[str, str]) -> None:
        self.endpoint = endpoint
        self.model_url = f"{endpoint.base_url}/v2/models/{quote(model, safe='')}"
        self.client_arguments: dict[str, Any] = {
            # Compression on the way would hold deltas back.
            "headers": {"Accept-Encoding": "identity", "Connection": "close", **headers},
            "limits": httpx.Limits(max_connections=None),
            # Without TLS there is nothing to verify, and loading the certificates takes tens of milliseconds.
            "verify": endpoint.secure,
        }

    def post_arguments(self, request: Request, timeout_s: float | None, trace: Any) -> dict[str, Any]:
        """The arguments of httpx's `stream` for a request."""
        body: dict[str, Any] = {"id": request.request_id} if request.request_id else {}
        for tensor in request.inputs:
            body[tensor.name] = tensor.values[0] if tensor.is_scalar else tensor.values
        return {
            "method": "POST",
            "url": f"{self.model_url}/{'generate_stream' if request.stream else 'generate'}",
            "content": json.dumps(body, ensure_ascii=False).encode(),
            "headers": {"Content-Type": "application/json"},
            "timeout": timeout_s,
            "extensions": {"trace": trace},
        }

    def decode(self, payload: str | bytes, *, is_final: bool | None) -> Response:
        """The response in a JSON object. Raises the error that it carries instead of one."""
        try:
            answer = json.loads(payload)
        except ValueError as error:
            raise unreadable(error) from error
        if not isinstance(answer, dict):
            raise unreadable(TypeError(f"expected a JSON object, got {payload[:80]!r}"))
        if "error" in answer:
            raise server_error(str(answer["error"]))
        return Response(
            {name: value if isinstance(value, list) else [value] for name, value in answer.items()}, is_final
        )

    def decode_chunk(self, decoder: EventDecoder, chunk: bytes) -> list[str]:
        """The data of the events that a chunk completes."""
        try:
            return decoder.feed(chunk)
        except UnicodeDecodeError as error:
            raise unreadable(error) from error

    def refusal(self, status: int, body: bytes) -> ServerError:
        """The exception for an answer with an error status: Triton's JSON, plain or as an event, or anybody's text."""
        text = body.decode(errors="replace").strip().removeprefix("data:").strip()
        try:
            message = str(json.loads(text)["error"])
        except (ValueError, KeyError, TypeError):
            message = f"HTTP status {status}: {text[:200] or 'no explanation given'}"
        return server_error(message, status)

    def failure(
        self,
        error: httpx.RequestError,
        connection: _Connection | None = None,
        cancellation: Cancellation | None = None,
    ) -> PagedClientError:
        """The exception for a request that got no complete answer."""
        if cancellation is not None and cancellation.is_requested():
            return cancelled_here()
        if isinstance(error, httpx.TimeoutException) or (connection is not None and connection.has_expired):
            return TimedOut(f"{self.endpoint.base_url} did not answer in time")
        return ConnectionFailed(f"{self.endpoint.base_url}: {error or type(error).__name__}")


class HttpTransport:
    """The synchronous HTTP transport; implements `Transport`."""

    def __init__(self, endpoint: Endpoint, model: str, headers: Mapping[str, str]) -> None:
        self._wire = _Wire(endpoint, model, headers)
        self._client = httpx.Client(**self._wire.client_arguments)

    def responses(
        self, request: Request, timeout_s: float | None, cancellation: Cancellation
    ) -> Generator[Response, None, None]:
        """See `Transport.responses`."""
        wire, connection, decoder = self._wire, _Connection(), EventDecoder()
        arguments = wire.post_arguments(request, timeout_s, connection.trace)
        with cancellation.bound(connection.shut_down), _thread_timer(timeout_s, connection):
            try:
                with self._client.stream(**arguments) as answer:
                    if answer.status_code != httpx.codes.OK:
                        raise wire.refusal(answer.status_code, answer.read())
                    if not request.stream:
                        yield wire.decode(answer.read(), is_final=True)
                        return
                    for chunk in answer.iter_bytes():
                        for event in wire.decode_chunk(decoder, chunk):
                            yield wire.decode(event, is_final=None)
            except httpx.RequestError as error:
                raise wire.failure(error, connection, cancellation) from error

    def is_ready(self, timeout_s: float) -> bool:
        """See `Transport.is_ready`."""
        try:
            return self._client.get(f"{self._wire.model_url}/ready", timeout=timeout_s).is_success
        except httpx.RequestError as error:
            raise self._wire.failure(error) from error

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()


class AsyncHttpTransport:
    """The asyncio HTTP transport; implements `AsyncTransport`."""

    def __init__(self, endpoint: Endpoint, model: str, headers: Mapping[str, str]) -> None:
        self._wire = _Wire(endpoint, model, headers)
        self._client = httpx.AsyncClient(**self._wire.client_arguments)

    async def responses(
        self, request: Request, timeout_s: float | None, cancellation: Cancellation
    ) -> AsyncGenerator[Response, None]:
        """See `Transport.responses`."""
        wire, connection, decoder = self._wire, _Connection(), EventDecoder()
        arguments = wire.post_arguments(request, timeout_s, connection.async_trace)
        with cancellation.bound(connection.shut_down), _loop_timer(timeout_s, connection):
            try:
                async with self._client.stream(**arguments) as answer:
                    if answer.status_code != httpx.codes.OK:
                        raise wire.refusal(answer.status_code, await answer.aread())
                    if not request.stream:
                        yield wire.decode(await answer.aread(), is_final=True)
                        return
                    async for chunk in answer.aiter_bytes():
                        for event in wire.decode_chunk(decoder, chunk):
                            yield wire.decode(event, is_final=None)
            except httpx.RequestError as error:
                raise wire.failure(error, connection, cancellation) from error

    async def is_ready(self, timeout_s: float) -> bool:
        """See `Transport.is_ready`."""
        try:
            return (await self._client.get(f"{self._wire.model_url}/ready", timeout=timeout_s)).is_success
        except httpx.RequestError as error:
            raise self._wire.failure(error) from error

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._client.aclose()


@contextmanager
def _thread_timer(timeout_s: float | None, connection: _Connection) -> Iterator[None]:
    """Ends the connection after `timeout_s` seconds; httpx itself limits single reads only, not the whole answer."""
    timer = None
    if timeout_s is not None and timeout_s < threading.TIMEOUT_MAX:
        timer = threading.Timer(timeout_s, connection.expire)
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


@contextmanager
def _loop_timer(timeout_s: float | None, connection: _Connection) -> Iterator[None]:
    """The same with the running event loop's timer."""
    timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, connection.expire)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
