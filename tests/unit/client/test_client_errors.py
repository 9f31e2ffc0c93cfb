"""What goes wrong becomes the right exception, and never a text that is silently short."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fake_triton
import pytest
from client_drivers import Driver, MakeDriver
from fake_triton import End, Fail, FakeTriton, Hang, Received, Send, Step, endless, pieces

from paged_client import (
    Cancelled,
    Client,
    ConnectionFailed,
    InternalError,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "kind", "code", "message"),
    [
        (
            "INVALID_ARG: top_p must be in (0, 1], got 2",
            InvalidRequest,
            "INVALID_ARG",
            "top_p must be in (0, 1], got 2",
        ),
        ("UNAVAILABLE: the queue is full", Unavailable, "UNAVAILABLE", "the queue is full"),
        ("CANCELLED: gone", Cancelled, "CANCELLED", "gone"),
        ("INTERNAL: step failed:\nline two", InternalError, "INTERNAL", "step failed:\nline two"),
        ("NOT_FOUND: no such thing", ServerError, "NOT_FOUND", "no such thing"),
    ],
)
@pytest.mark.parametrize("position", ["first", "later"])
def test_the_code_in_the_text_decides(
    server: FakeTriton,
    driver: Driver,
    text: str,
    kind: type[ServerError],
    code: str,
    message: str,
    position: str,
) -> None:
    before: list[Step] = pieces("a ", "b ", "c ")[:2] if position == "later" else []
    server.respond = lambda received: [*before, Fail(text)]
    with pytest.raises(ServerError) as caught:
        driver.stream("x")
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.message, str(caught.value)) == (code, message, text)
    with pytest.raises(kind):
        driver.generate("x")
    server.respond = lambda received: pieces("well again")
    assert driver.generate("x").text == "well again"


def test_text_before_an_error_is_delivered(server: FakeTriton, client: Client) -> None:
    server.respond = lambda received: [*pieces("a ", "b ", "c ")[:2], Fail("INTERNAL: broken")]
    stream = client.stream("x")
    assert [next(stream).text, next(stream).text] == ["a ", "b "]
    with pytest.raises(InternalError):
        next(stream)
    with pytest.raises(InternalError):
        _ = stream.result
    assert list(stream) == []


@pytest.mark.parametrize(
    ("status", "text", "kind", "code"),
    [
        (400, "INVALID_ARG: no", InvalidRequest, "INVALID_ARG"),
        (400, "UNAVAILABLE: queue full", Unavailable, "UNAVAILABLE"),
        (400, "unexpected argument", InvalidRequest, "INVALID_ARG"),
        (404, "Request for unknown model: 'x' is not found", ServerError, "NOT_FOUND"),
        (418, "tea", ServerError, "UNKNOWN"),
        (500, "Unable to parse 'data'", InternalError, "INTERNAL"),
        (503, "queue full", Unavailable, "UNAVAILABLE"),
    ],
)
def test_http_statuses(
    make_driver: MakeDriver, status: int, text: str, kind: type[ServerError], code: str
) -> None:
    server = fake_triton.FakeHttpTriton()
    server.respond = lambda received: [Fail(text, http_status=status)]
    driver = make_driver(server.url)
    for call in (driver.stream, driver.generate):
        with pytest.raises(ServerError) as caught:
            call("x")
        assert type(caught.value) is kind
        assert (caught.value.code, caught.value.status) == (code, status)
        assert caught.value.message in text
    server.stop()


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        ("INVALID_ARGUMENT", "INVALID_ARG: no", InvalidRequest),
        ("INVALID_ARGUMENT", "no code", InvalidRequest),
        ("UNAVAILABLE", "UNAVAILABLE: queue full", Unavailable),
        ("UNAVAILABLE", "Socket closed", ConnectionFailed),
        ("INTERNAL", "INTERNAL: ours", InternalError),
        ("CANCELLED", "stream cancelled", Cancelled),
        ("DEADLINE_EXCEEDED", "too slow", TimedOut),
        ("RESOURCE_EXHAUSTED", "too large", ServerError),
    ],
)
def test_grpc_statuses(make_driver: MakeDriver, status: str, text: str, kind: type[Exception]) -> None:
    server = fake_triton.FakeGrpcTriton()
    server.respond = lambda received: [*pieces("a", "b")[:1], Fail(text, grpc_status=status)]
    with pytest.raises(Exception) as caught:
        make_driver(server.url).stream("x")
    assert type(caught.value) is kind
    assert getattr(caught.value, "status", status) == status
    server.stop()


def test_an_orderly_end_without_the_final_response_is_an_error(server: FakeTriton, driver: Driver) -> None:
    for steps in ([End()], [*pieces("a ", "b ")[:1], End()]):
        server.respond = lambda received, steps=steps: steps  # type: ignore[misc]
        with pytest.raises(ConnectionFailed, match="final response"):
            driver.stream("x")


def test_one_of_two_sequences_missing_its_end_is_an_error_over_http(make_driver: MakeDriver) -> None:
    server = fake_triton.FakeHttpTriton()
    outputs: dict[str, list[Any]] = {
        "text_output": ["a", "b"],
        "finish_reason": ["stop", "None"],
        "num_output_tokens": [1, 1],
    }
    server.respond = lambda received: [Send(outputs), End()]
    with pytest.raises(ConnectionFailed, match="final response"):
        make_driver(server.url).stream("x", n=2)
    server.stop()


def test_a_final_response_without_any_text_output_is_an_error(server: FakeTriton, driver: Driver) -> None:
    server.respond = lambda received: [Send({"finish_reason": ["stop"]}, is_final=True)]
    with pytest.raises((InternalError, ConnectionFailed)):
        driver.generate("x")


@pytest.mark.parametrize("outputs", [{"logprobs": ["{broken"]}, {"num_output_tokens": []}])
def test_an_answer_against_the_contract_is_an_error(
    server: FakeTriton, driver: Driver, outputs: dict[str, list[object]]
) -> None:
    server.respond = lambda received: [
        Send({"text_output": ["a"], "finish_reason": ["stop"], **outputs}, is_final=True)
    ]
    with pytest.raises(InternalError, match="cannot be read"):
        driver.stream("x")


def test_a_server_that_dies_in_the_middle(protocol: str, make_driver: MakeDriver) -> None:
    command = [sys.executable, str(Path(fake_triton.__file__)), protocol]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        driver = make_driver(process.stdout.readline().strip())
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        with pytest.raises(ConnectionFailed):
            driver.stream("x")
        killer.join()
    assert not driver.is_ready()


def test_nobody_listens(protocol: str, make_driver: MakeDriver) -> None:
    driver = make_driver(f"{protocol}://127.0.0.1:{free_port()}")
    for call in (driver.stream, driver.generate):
        with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1"):
            call("x")
    assert not driver.is_ready()
    with pytest.raises(TimedOut, match=r"not ready after 0\.1 seconds"):
        driver.wait_until_ready(0.1)


def test_the_wrong_protocol_is_a_failed_connection(server: FakeTriton, make_driver: MakeDriver) -> None:
    other = server.url.replace("grpc", "http") if "grpc" in server.url else server.url.replace("http", "grpc")
    with pytest.raises(ConnectionFailed):
        make_driver(other, timeout_s=20).generate("x")


def test_readiness(server: FakeTriton, driver: Driver, make_driver: MakeDriver) -> None:
    assert driver.is_ready()
    driver.wait_until_ready(20)
    assert not make_driver(server.url, model="other").is_ready()
    server.is_ready = False
    assert not driver.is_ready()
    with pytest.raises(TimedOut, match="says that the model is not ready"):
        driver.wait_until_ready(0.1)


def test_waiting_for_a_server_that_starts_later(protocol: str, make_driver: MakeDriver) -> None:
    port = free_port()
    driver = make_driver(f"{protocol}://127.0.0.1:{port}")
    assert not driver.is_ready()
    servers: list[FakeTriton] = []
    starter = threading.Timer(0.2, lambda: servers.append(fake_triton.start(protocol, port)))
    starter.start()
    driver.wait_until_ready(30)
    assert driver.generate("x").text == "ok"
    starter.join()
    servers[0].stop()


@pytest.mark.parametrize("num_deltas_before", [0, 2])
def test_a_client_side_timeout_ends_the_request(
    server: FakeTriton, driver: Driver, num_deltas_before: int
) -> None:
    server.respond = lambda received: [*pieces("a", "b", "c")[:num_deltas_before], Hang()]
    for call in (driver.stream, driver.generate) if num_deltas_before == 0 else (driver.stream,):
        with pytest.raises(TimedOut, match=r"0\.5 seconds"):
            call("x", timeout_s=0.5)
        assert server.wait_until_client_has_gone()
    assert not server.requests[0].inputs.get("timeout_ms")


def test_the_timeout_is_for_the_whole_answer_not_for_a_pause(
    server: FakeTriton, make_driver: MakeDriver
) -> None:
    server.respond = lambda received: endless()
    driver = make_driver(server.url, timeout_s=0.5)
    with pytest.raises(TimedOut):
        driver.stream("x")
    assert server.wait_until_client_has_gone()
    with pytest.raises(TimedOut):
        driver.stream("x", timeout_s=0.1)


def test_retries_until_the_server_has_room(server: FakeTriton, make_driver: MakeDriver) -> None:
    full: list[Step] = [Fail("UNAVAILABLE: queue full")]
    answers = iter([full, full, pieces("a", "b")])
    server.respond = lambda received: next(answers)
    deltas, result = make_driver(server.url, retries=3, retry_delay_s=0.01).stream("x")
    assert (len(deltas), result.text, len(server.requests)) == (2, "ab", 3)


def test_retries_until_the_server_can_be_reached(protocol: str, make_driver: MakeDriver) -> None:
    port = free_port()
    driver = make_driver(f"{protocol}://127.0.0.1:{port}", retries=8, retry_delay_s=0.1)
    servers: list[FakeTriton] = []
    starter = threading.Timer(0.2, lambda: servers.append(fake_triton.start(protocol, port)))
    starter.start()
    assert driver.generate("x").text == "ok"
    starter.join()
    servers[0].stop()


@pytest.mark.parametrize(
    ("retries", "steps", "num_requests"),
    [
        (0, [Fail("UNAVAILABLE: queue full")], 1),
        (2, [Fail("UNAVAILABLE: queue full")], 3),
        (2, [Fail("INVALID_ARG: no")], 1),
        (2, [Fail("INTERNAL: no")], 1),
        (2, [*pieces("a", "b")[:1], Fail("UNAVAILABLE: shutting down")], 1),
        (2, [*pieces("a", "b")[:1], End()], 1),
        (2, [End()], 3),
    ],
)
def test_what_is_retried_and_how_often(
    server: FakeTriton, make_driver: MakeDriver, retries: int, steps: list[Step], num_requests: int
) -> None:
    server.respond = lambda received: steps
    with pytest.raises((ServerError, ConnectionFailed)):
        make_driver(server.url, retries=retries, retry_delay_s=0.01).stream("x")
    assert len(server.requests) == num_requests


def test_the_time_limit_covers_the_retries(server: FakeTriton, make_driver: MakeDriver) -> None:
    server.respond = lambda received: [Fail("UNAVAILABLE: queue full")]
    driver = make_driver(server.url, retries=1000, retry_delay_s=0.1)
    with pytest.raises(TimedOut):
        driver.stream("x", timeout_s=0.3)


def test_wrong_values_are_refused_before_anything_is_sent(server: FakeTriton, driver: Driver) -> None:
    with pytest.raises(InvalidRequest, match="temperature") as caught:
        driver.stream("x", temperature=float("nan"))
    assert caught.value.status is None
    with pytest.raises(TypeError, match="'max_token'; did you mean 'max_tokens'"):
        driver.generate("x", max_token=3)
    assert server.requests == []


def test_errors_survive_pickling_and_have_the_usual_bases() -> None:
    error = pickle.loads(pickle.dumps(InvalidRequest("INVALID_ARG", "no", 400)))
    assert (type(error), error.code, error.message, error.status) == (
        InvalidRequest,
        "INVALID_ARG",
        "no",
        400,
    )
    assert isinstance(error, ValueError)
    assert issubclass(TimedOut, TimeoutError) and issubclass(ConnectionFailed, ConnectionError)


def test_an_error_page_of_a_gateway(make_driver: MakeDriver) -> None:
    def respond(received: Received) -> list[Step]:
        raise AssertionError("not reached")

    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(502)
            self.end_headers()
            self.wfile.write(b"<html>Bad Gateway</html>")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, args=(0.02,))
        thread.start()
        try:
            with pytest.raises(Unavailable, match="HTTP status 502: <html>Bad Gateway</html>"):
                make_driver(f"http://127.0.0.1:{gateway.server_address[1]}").generate("x")
        finally:
            gateway.shutdown()
            thread.join()
