"""gRPC: one `ModelStreamInfer` stream per generation, all of them over one channel.

tritonclient's InferenceServerClient allows one stream per client object, cannot cancel one request of a
stream and needs a thread per stream. Its generated stubs have none of these limits: any number of streams
share a channel, which is thread-safe, and cancelling a call ends exactly one generation. The request iterator
ends after its only request, so each stream is half-closed at once; a stream left open would keep Triton from
unloading the model.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from paged_client.cancellation import Cancellation
from paged_client.endpoint import Endpoint
from paged_client.errors import (
    ConnectionFailed,
    PagedClientError,
    TimedOut,
    cancelled_here,
    is_coded,
    server_error,
    unreadable,
)
from paged_client.request import Request, Tensor
from paged_client.response import Response

_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A server that has just been started is found quickly, instead of after gRPC's back-off of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Each client object has connections of its own.
    ("grpc.use_local_subchannel_pool", 1),
]

_STRUCT_CODES = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f"}
"""`struct` letters of Triton's datatypes; raw contents are little-endian and packed."""


class _Wire:
    """What both gRPC transports share: messages in and out, and the meaning of a failed call."""

    def __init__(self, endpoint: Endpoint, model: str, headers: Mapping[str, str]) -> None:
        self.endpoint = endpoint
        self.model = model
        self.metadata = [(name.lower(), value) for name, value in headers.items()]

    def stub(
        self, insecure_channel: Callable[..., Any], secure_channel: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """A channel made by one of the two functions, and Triton's stub over it."""
        address = self.endpoint.address
        if self.endpoint.secure:
            channel = secure_channel(address, grpc.ssl_channel_credentials(), options=_CHANNEL_OPTIONS)
        else:
            channel = insecure_channel(address, options=_CHANNEL_OPTIONS)
        return channel, service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def encode(self, request: Request) -> Any:
        """The ModelInferRequest for a request; asks for a mark on the last response."""
        message = service_pb2.ModelInferRequest(model_name=self.model, id=request.request_id)
        for tensor in request.inputs:
            message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)])
            message.raw_input_contents.append(encode_tensor(tensor))
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message

    def decode(self, message: Any) -> Response:
        """The response in a ModelStreamInferResponse. Raises the error that it carries instead of one."""
        if message.error_message:
            raise server_error(message.error_message)
        response = message.infer_response
        try:
            outputs = {
                output.name: decode_tensor(output.datatype, raw)
                for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
            }
        except (ValueError, KeyError, struct.error) as error:
            raise unreadable(error) from error
        parameters = response.parameters
        is_final = "triton_final_response" in parameters and parameters["triton_final_response"].bool_param
        return Response(outputs, is_final)

    def failure(self, error: Any, cancellation: Cancellation | None = None) -> PagedClientError:
        """The exception for a failed call (a grpc.RpcError)."""
        status, details = error.code(), error.details() or ""
        if cancellation is not None and cancellation.is_requested():
            return cancelled_here()
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimedOut(f"{self.endpoint.address} did not answer in time")
        if status is grpc.StatusCode.UNAVAILABLE and not is_coded(details):
            return ConnectionFailed(f"{self.endpoint.address}: {details}")
        return server_error(details, status.name)


class GrpcTransport:
    """The synchronous gRPC transport; implements `Transport`."""

    def __init__(self, endpoint: Endpoint, model: str, headers: Mapping[str, str]) -> None:
        self._wire = _Wire(endpoint, model, headers)
        self._channel, self._stub = self._wire.stub(grpc.insecure_channel, grpc.secure_channel)

    def responses(
        self, request: Request, timeout_s: float | None, cancellation: Cancellation
    ) -> Generator[Response, None, None]:
        """See `Transport.responses`."""
        message = self._wire.encode(request)
        call = self._stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=self._wire.metadata)
        is_complete = False
        with cancellation.bound(call.cancel):
            try:
                for answer in call:
                    response = self._wire.decode(answer)
                    is_complete = bool(response.is_final)
                    yield response
            except grpc.RpcError as error:
                if not is_complete:
                    raise self._wire.failure(error, cancellation) from error
            finally:
                call.cancel()

    def is_ready(self, timeout_s: float) -> bool:
        """See `Transport.is_ready`."""
        request = service_pb2.ModelReadyRequest(name=self._wire.model)
        try:
            answer = self._stub.ModelReady(request, timeout=timeout_s, metadata=self._wire.metadata)
        except grpc.RpcError as error:
            raise self._wire.failure(error) from error
        return bool(answer.ready)

    def close(self) -> None:
        """Closes the channel; calls in flight end."""
        self._channel.close()


class AsyncGrpcTransport:
    """The asyncio gRPC transport; implements `AsyncTransport`."""

    def __init__(self, endpoint: Endpoint, model: str, headers: Mapping[str, str]) -> None:
        self._wire = _Wire(endpoint, model, headers)
        self._channel: Any = None
        self._stub: Any = None

    def _connected_stub(self) -> Any:
        """The stub; its channel belongs to the running event loop, so it is made at the first use."""
        if self._stub is None:
            self._channel, self._stub = self._wire.stub(grpc.aio.insecure_channel, grpc.aio.secure_channel)
        return self._stub

    async def responses(
        self, request: Request, timeout_s: float | None, cancellation: Cancellation
    ) -> AsyncGenerator[Response, None]:
        """See `Transport.responses`."""
        message = self._wire.encode(request)
        stub = self._connected_stub()
        call = stub.ModelStreamInfer(iter([message]), timeout=timeout_s, metadata=self._wire.metadata)
        is_complete = False
        with cancellation.bound(call.cancel):
            try:
                async for answer in call:
                    response = self._wire.decode(answer)
                    is_complete = bool(response.is_final)
                    yield response
            except grpc.RpcError as error:
                if not is_complete:
                    raise self._wire.failure(error, cancellation) from error
            except asyncio.CancelledError:
                # A pending read raises this both when the task is cancelled and when the call is.
                if not cancellation.is_requested():
                    raise
                raise cancelled_here() from None
            finally:
                call.cancel()

    async def is_ready(self, timeout_s: float) -> bool:
        """See `Transport.is_ready`."""
        request = service_pb2.ModelReadyRequest(name=self._wire.model)
        try:
            answer = await self._connected_stub().ModelReady(
                request, timeout=timeout_s, metadata=self._wire.metadata
            )
        except grpc.RpcError as error:
            raise self._wire.failure(error) from error
        return bool(answer.ready)

    async def aclose(self) -> None:
        """Closes the channel; calls in flight end."""
        if self._channel is not None:
            await self._channel.close()


def encode_tensor(tensor: Tensor) -> bytes:
    """Triton's raw form of a tensor: packed little-endian numbers, or for BYTES each element behind its length."""
    if tensor.datatype != "BYTES":
        return struct.pack(f"<{len(tensor.values)}{_STRUCT_CODES[tensor.datatype]}", *tensor.values)
    elements = [value.encode() for value in tensor.values]
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def decode_tensor(datatype: str, raw: bytes) -> Sequence[Any]:
    """The elements in Triton's raw form of a tensor; BYTES as text.

    Raises struct.error or ValueError for malformed contents, KeyError for a datatype the model does not send.
    """
    if datatype != "BYTES":
        code = _STRUCT_CODES[datatype]
        return [value for (value,) in struct.iter_unpack(f"<{code}", raw)]
    elements: list[str] = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4 + length
        elements.append(raw[position - length : position].decode())
    return elements
