"""Requests as other programs send them: plain HTTP, and tritonclient's gRPC streams; the answers of both in one form."""

from __future__ import annotations

import http.client
import json
import queue
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from triton_server import TritonServer
from tritonclient.utils import InferenceServerException

HANG_S = 120.0
"""Nothing takes so long on the slowest machine; a test that waits so long has found a hang."""

SLOW = "[[fault:slow]] "
"""In front of a prompt on a server with faults on demand: 0.05 s for each step while the request is in the engine."""

DATATYPES = {
    "text_input": "BYTES",
    "input_ids": "INT32",
    "messages": "BYTES",
    "truncate_prompt_tokens": "INT64",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "max_tokens": "INT64",
    "min_tokens": "INT64",
    "temperature": "FP32",
    "top_p": "FP32",
    "min_p": "FP32",
    "top_k": "INT32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "random_seed": "UINT64",
    "n": "INT32",
    "num_return_sequences": "INT32",
    "stop": "BYTES",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "ignore_eos": "BOOL",
    "logprobs": "INT32",
    "prompt_logprobs": "INT32",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_token_ids": "BOOL",
    "return_at_end": "BOOL",
    "priority": "INT32",
    "timeout_ms": "INT64",
    "beam_width": "INT32",
    "length_penalty": "FP32",
    "end_id": "INT32",
    "pad_id": "INT32",
}
"""The model's inputs; lists of them are sent as lists, all else with shape [1]."""

_NUMPY_TYPES: Mapping[str, Any] = {
    "BYTES": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
}
_RESERVED_OUTPUTS = frozenset({"model_name", "model_version", "id"})

Fields = Mapping[str, Any]
"""A request: input name -> value."""


@dataclass
class Answer:
    """Everything one request brought: outputs as lists (strings decoded), by response; and how it ended."""

    responses: list[dict[str, list[Any]]] = field(default_factory=list)
    error: str | None = None
    status: int | None = None
    """HTTP's."""
    final_flags: list[bool] = field(default_factory=list)
    """gRPC's: for each response whether Triton marked it as the last one."""

    @property
    def text(self) -> str:
        """The text of the first sequence, its deltas joined."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """The text of each sequence, its deltas joined."""
        return ["".join(parts) for parts in zip(*(r["text_output"] for r in self.responses), strict=True)]

    def joined(self, name: str) -> list[Any]:
        """The elements of one output in all responses."""
        return [element for response in self.responses for element in response[name]]

    def checked(self) -> Answer:
        """Itself, if it is a whole answer; AssertionError with the error otherwise."""
        assert self.error is None and self.responses, f"the request failed: {self.error}"
        return self


# ---- HTTP ----


class HttpRequest:
    """One request to `generate` or `generate_stream` on a connection of its own; sending and reading are separate."""

    def __init__(self, server: TritonServer, endpoint: str = "generate_stream") -> None:
        """Connect. `close`, or leave the `with` block, in the end."""
        self._path = f"/v2/models/{server.model_name}/{endpoint}"
        self._connection = http.client.HTTPConnection("127.0.0.1", server.process.ports.http, timeout=HANG_S)
        self._connection.connect()
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> HttpRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, body: Fields | str | bytes, headers: Mapping[str, str] | None = None) -> HttpRequest:
        """Send the request; a mapping goes as JSON."""
        data = body if isinstance(body, str | bytes) else json.dumps(body)
        self._connection.request("POST", self._path, data, dict(headers or {}))
        return self

    @property
    def response(self) -> http.client.HTTPResponse:
        """Status and headers; waits for the first response of the model."""
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def answer(self) -> Answer:
        """Wait for everything."""
        status, kind = self.response.status, self.response.getheader("Content-Type", "")
        # What Triton refuses before the model sees it is plain JSON, from `generate_stream`, too.
        bodies = list(self.events()) if "event-stream" in kind else [json.loads(self.response.read())]
        return _answer(bodies, status)

    def events(self) -> Iterator[dict[str, Any]]:
        """The server-sent events as they come."""
        while line := self.response.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    def close(self, *, reset: bool = False) -> None:
        """Close the connection, with TCP's RST if asked."""
        if reset and self._connection.sock is not None:
            linger = struct.pack("ii", 1, 0)
            self._connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._connection.close()
        if self._response is not None:
            self._response.close()


def generate(server: TritonServer, body: Fields | str | bytes) -> Answer:
    """POST to `generate`."""
    with HttpRequest(server, "generate") as request:
        return request.send(body).answer()


def generate_stream(server: TritonServer, body: Fields | str | bytes) -> Answer:
    """POST to `generate_stream`, and read to the end."""
    with HttpRequest(server, "generate_stream") as request:
        return request.send(body).answer()


def _answer(bodies: Sequence[Mapping[str, Any]], status: int) -> Answer:
    """Of HTTP's JSON: outputs of one element are scalars there."""
    answer = Answer(status=status)
    for body in bodies:
        if "error" in body:
            answer.error = body["error"]
        else:
            answer.responses.append(
                {
                    name: value if isinstance(value, list) else [value]
                    for name, value in body.items()
                    if name not in _RESERVED_OUTPUTS
                }
            )
    return answer


# ---- gRPC ----


class GrpcStream:
    """One tritonclient stream on a connection of its own, with any number of requests; what comes back is queued."""

    def __init__(self, server: TritonServer) -> None:
        """Open the stream. `close`, or leave the `with` block, in the end: an open stream keeps a model from unloading."""
        self._model_name = server.model_name
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._arrived: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._arrived.put((result, error)), stream_timeout=HANG_S
        )

    def __enter__(self) -> GrpcStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(cancel_requests=True)

    def send(self, fields: Fields, parameters: Mapping[str, Any] | None = None, **options: Any) -> GrpcStream:
        """Send one request; `options` are async_stream_infer's, and `inputs` goes before `fields`."""
        options.setdefault("inputs", infer_inputs(fields))
        options.setdefault("enable_empty_final_response", True)
        self._client.async_stream_infer(
            self._model_name, parameters=None if parameters is None else dict(parameters), **options
        )
        return self

    def next(self) -> tuple[Any, InferenceServerException | None]:
        """The next response, as tritonclient delivers it."""
        return self._arrived.get(timeout=HANG_S)

    def finish(self) -> list[tuple[Any, InferenceServerException | None]]:
        """Half-close, wait until the server has ended the stream, and return all that was not taken by `next`."""
        self._client.stop_stream()
        self._client.close()
        arrived = []
        while not self._arrived.empty():
            arrived.append(self._arrived.get())
        return arrived

    def close(self, *, cancel_requests: bool = False) -> None:
        """End the stream; without `cancel_requests` that waits for the answers."""
        self._client.stop_stream(cancel_requests=cancel_requests)
        self._client.close()


def grpc_infer(
    server: TritonServer, fields: Fields, parameters: Mapping[str, Any] | None = None, **options: Any
) -> Answer:
    """One request over gRPC, all of its answer."""
    with GrpcStream(server) as stream:
        stream.send(fields, parameters, **options)
        return grpc_answer(stream.finish())


def grpc_answer(arrived: Sequence[tuple[Any, InferenceServerException | None]]) -> Answer:
    """An Answer of what a stream with one request has brought."""
    answer = Answer()
    for result, error in arrived:
        if error is not None:
            answer.error = error.message()
            continue
        answer.responses.append(outputs_of(result))
        answer.final_flags.append(is_final(result))
    return answer


def outputs_of(result: Any) -> dict[str, list[Any]]:
    """The outputs of one gRPC response."""
    outputs: dict[str, list[Any]] = {}
    for output in result.get_response().outputs:
        elements = result.as_numpy(output.name).tolist()
        outputs[output.name] = [e.decode() if isinstance(e, bytes) else e for e in elements]
    return outputs


def is_final(result: Any) -> bool:
    """Whether Triton marked a gRPC response as the last one of its request."""
    parameters = result.get_response().parameters
    return "triton_final_response" in parameters and parameters["triton_final_response"].bool_param


def infer_inputs(fields: Fields) -> list[grpcclient.InferInput]:
    """tritonclient's inputs for a request."""
    inputs = []
    for name, value in fields.items():
        elements = list(value) if isinstance(value, list | tuple) else [value]
        inputs.append(tensor(name, DATATYPES[name], elements))
    return inputs


def tensor(
    name: str, datatype: str, elements: Sequence[Any], shape: Sequence[int] | None = None
) -> grpcclient.InferInput:
    """One tritonclient input."""
    encoded = [e.encode() if isinstance(e, str) else e for e in elements]
    array = np.array(encoded, dtype=_NUMPY_TYPES[datatype]).reshape(shape or [len(encoded)])
    result = grpcclient.InferInput(name, array.shape, datatype)
    result.set_data_from_numpy(array)
    return result


# ---- Both ----


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make all calls at the same time, each in a thread of its own; returns what they return, in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def wait_for(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    """Return as soon as that is so."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)
