"""Triton's two front ends in miniature: real servers on real sockets that answer by a script.

A script is a list of steps for each request. What Triton does on the wire (markers, framing, statuses, where an
error goes once text has been sent) is imitated after Triton 2.51; the model behind it is the script.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

DATATYPES = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
    "token_ids": "INT32",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "prompt_logprobs": "BYTES",
}
LETTERS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f"}


@dataclass(frozen=True)
class Send:
    """A response with these outputs; `is_final` rides on the last one."""

    outputs: dict[str, list[Any]]
    is_final: bool = False


@dataclass(frozen=True)
class Fail:
    """An error as the model makes it; with `grpc_status` a failed call, with `http_status` that status."""

    message: str
    grpc_status: str | None = None
    http_status: int = 400


@dataclass(frozen=True)
class End:
    """An orderly end of the stream without a final response."""


@dataclass(frozen=True)
class Hang:
    """Nothing more, until the client has gone."""


@dataclass(frozen=True)
class Pause:
    """A moment of silence."""

    seconds: float


Step = Send | Fail | End | Hang | Pause


@dataclass
class Received:
    """A request as it arrived: `inputs` by name as lists; datatypes and shapes where the wire has them."""

    inputs: dict[str, list[Any]]
    request_id: str = ""
    model: str = "llm"
    endpoint: str = "ModelStreamInfer"
    datatypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def prompt(self) -> str:
        return str(self.inputs["text_input"][0])


def pieces(*texts: str, finish_reason: str = "stop") -> list[Step]:
    """A streamed answer, one token a response; the finish reason and the final mark ride on the last."""
    last = len(texts) - 1
    return [
        Send(
            {
                "text_output": [text],
                "finish_reason": [finish_reason if index == last else "None"],
                "num_input_tokens": [7],
                "num_output_tokens": [1],
            },
            is_final=index == last,
        )
        for index, text in enumerate(texts)
    ]


def as_one_response(steps: Iterable[Step]) -> Iterator[Step]:
    """What the model makes of a script for a request that is not streamed: its responses joined into one."""
    joined: dict[str, list[Any]] = {}
    for step in steps:
        if not isinstance(step, Send):
            yield step
            continue
        for name, values in step.outputs.items():
            is_added_up = name in ("text_output", "num_output_tokens") and name in joined
            joined[name] = (
                [a + b for a, b in zip(joined[name], values, strict=True)] if is_added_up else values
            )
        if step.is_final:
            yield Send(joined, is_final=True)


def endless(pause_s: float = 0.01) -> Iterator[Step]:
    """A stream that never ends by itself."""
    while True:
        yield Send({"text_output": ["a "], "finish_reason": ["None"], "num_output_tokens": [1]})
        yield Pause(pause_s)


class FakeTriton:
    """What both servers share: the script, the requests so far, and how many clients have left early."""

    url: str

    def __init__(self) -> None:
        self.respond: Callable[[Received], Iterable[Step]] = lambda received: pieces("ok")
        self.requests: list[Received] = []
        self.is_ready = True
        self._gone = threading.Semaphore(0)
        self._stopped = threading.Event()

    def receive(self, received: Received) -> Iterable[Step]:
        self.requests.append(received)
        steps = self.respond(received)
        return steps if received.inputs["stream"] == [True] else as_one_response(steps)

    def client_has_gone(self) -> None:
        self._gone.release()

    def wait_until_client_has_gone(self) -> bool:
        """Whether another client has left before its answer was complete; waits for it with a generous limit."""
        return self._gone.acquire(timeout=20)

    def wait_for_request(self) -> None:
        deadline = time.monotonic() + 20
        while not self.requests:
            assert time.monotonic() < deadline, "no request has come"
            time.sleep(0.005)

    def hang(self, is_connected: Callable[[], bool]) -> None:
        while is_connected() and not self._stopped.is_set():
            time.sleep(0.005)

    def stop(self) -> None:
        self._stopped.set()


class FakeGrpcTriton(FakeTriton, service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, port: int = 0) -> None:
        super().__init__()
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.server(ThreadPoolExecutor(32), options=unlimited)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self) -> None:
        super().stop()
        self._server.stop(0).wait()

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.is_ready and request.name == "llm")

    def ModelStreamInfer(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
        request = next(request_iterator)
        # Triton does not unload a model while a client may still send: only a half-closed stream is answered here.
        assert not list(request_iterator), "one request per stream"
        raw = zip(request.inputs, request.raw_input_contents, strict=True)
        received = Received(
            inputs={tensor.name: decode(tensor.datatype, content) for tensor, content in raw},
            request_id=request.id,
            model=request.model_name,
            datatypes={tensor.name: tensor.datatype for tensor in request.inputs},
            shapes={tensor.name: list(tensor.shape) for tensor in request.inputs},
            parameters={
                name: getattr(value, value.WhichOneof("parameter_choice"))
                for name, value in request.parameters.items()
            },
            headers=dict(context.invocation_metadata()),
        )
        is_complete = False
        try:
            for step in self.receive(received):
                if not context.is_active():
                    return
                match step:
                    case Send():
                        is_complete = step.is_final
                        yield self._response(step)
                    case Fail(message, None):
                        is_complete = True
                        yield service_pb2.ModelStreamInferResponse(error_message=message)
                        return
                    case Fail(message, status):
                        is_complete = True
                        context.abort(grpc.StatusCode[str(status)], message)
                    case End():
                        is_complete = True
                        return
                    case Hang():
                        self.hang(context.is_active)
                    case Pause(seconds):
                        time.sleep(seconds)
        finally:
            if not is_complete:
                self.client_has_gone()

    def _response(self, step: Send) -> Any:
        message = service_pb2.ModelStreamInferResponse()
        for name, values in step.outputs.items():
            message.infer_response.outputs.add(name=name, datatype=DATATYPES[name], shape=[len(values)])
            message.infer_response.raw_output_contents.append(encode(DATATYPES[name], values))
        message.infer_response.parameters["triton_final_response"].bool_param = step.is_final
        return message


class FakeHttpTriton(FakeTriton):
    def __init__(self, port: int = 0) -> None:
        super().__init__()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send_response(200 if fake.is_ready and self.path == "/v2/models/llm/ready" else 400)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                fake.answer(self)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        super().stop()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        _, _, _, model, endpoint = handler.path.split("/")
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        request_id = body.pop("id", "")
        inputs = {name: value if isinstance(value, list) else [value] for name, value in body.items()}
        headers = {name.lower(): value for name, value in handler.headers.items()}
        received = Received(inputs, request_id, model, endpoint, headers=headers)
        is_stream = endpoint == "generate_stream"
        has_begun = is_complete = False

        def begin(status: int) -> None:
            nonlocal has_begun
            if not has_begun:
                handler.send_response(status)
                handler.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
                handler.send_header("Transfer-Encoding", "chunked")
                handler.end_headers()
            has_begun = True

        def write(answer: dict[str, Any]) -> None:
            text = json.dumps(answer, ensure_ascii=False)
            data = f"data: {text}\n\n".encode() if is_stream else text.encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        try:
            for step in self.receive(received):
                match step:
                    case Send(outputs, is_final):
                        begin(200)
                        write({name: v[0] if len(v) == 1 else v for name, v in outputs.items()})
                        is_complete = is_final
                    case Fail(message):
                        is_complete = True
                        begin(step.http_status)
                        write({"error": message})
                    case End():
                        is_complete = True
                        begin(200)
                    case Hang():
                        self.hang(lambda: is_connected(handler.connection))
                    case Pause(seconds):
                        time.sleep(seconds)
                if is_complete or not is_connected(handler.connection):
                    break
            if is_complete:
                handler.wfile.write(b"0\r\n\r\n")
            handler.close_connection = True
        except ConnectionError:
            handler.close_connection = True
        finally:
            if not is_complete:
                self.client_has_gone()


def is_connected(connection: socket.socket) -> bool:
    """Whether the other side still listens: a closed connection is readable and has nothing to read."""
    try:
        readable, _, _ = select.select([connection], [], [], 0)
        return not readable or connection.recv(1, socket.MSG_PEEK) != b""
    except OSError:
        return False


def encode(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "BYTES":
        encoded = [value.encode() for value in values]
        return b"".join(struct.pack("<I", len(value)) + value for value in encoded)
    return struct.pack(f"<{len(values)}{LETTERS[datatype]}", *values)


def decode(datatype: str, raw: bytes) -> list[Any]:
    if datatype != "BYTES":
        return [value for (value,) in struct.iter_unpack("<" + LETTERS[datatype], raw)]
    values = []
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        values.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    return values


def start(protocol: str, port: int = 0) -> FakeTriton:
    return FakeGrpcTriton(port) if protocol == "grpc" else FakeHttpTriton(port)


if __name__ == "__main__":
    # A server in a process of its own, for tests that kill it.
    server = start(sys.argv[1])
    server.respond = lambda received: endless()
    print(server.url, flush=True)
    sys.stdin.read()
