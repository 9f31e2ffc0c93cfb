"""The command line, in this process and as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fake_triton import Fail, FakeTriton, Hang, Received, Step, pieces
from typer.testing import CliRunner

from paged_client.cli import app


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def messages(received: Received) -> Any:
    return json.loads(received.inputs["messages"][0])


PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # Whoever runs the tests may have it ignored.
from paged_client.__main__ import main
main()
"""


@pytest.fixture
def start_process() -> Iterator[Any]:
    """Starts the command line with pipes, as a process that can be sent signals."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_prompt_is_sent_as_a_chat_message_and_the_text_streamed(server: FakeTriton) -> None:
    server.respond = lambda received: pieces("Pa", "ris [bold] 😀")
    result = run("What is the capital?", "--url", server.url, "--system", "Be brief.")
    assert result.exit_code == 0
    assert result.stdout == "Paris [bold] 😀\n"
    (line,) = result.stderr.splitlines()
    assert "2 tokens" in line and "tokens/s" in line and "first token after" in line
    (received,) = server.requests
    assert messages(received) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital?"},
    ]
    assert received.inputs["stream"] == [True]
    assert not {"max_tokens", "temperature", "stop"} & set(received.inputs)


def test_raw_text_from_stdin_whole_with_options(server: FakeTriton) -> None:
    server.respond = lambda received: pieces(" time")
    options = "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 3 --seed 7 --stop A --stop B --timeout 30"
    result = run("-", "--raw", "--no-stream", "--url", server.url, *options.split(), stdin="Once\nupon a")
    assert (result.exit_code, result.stdout) == (0, " time\n")
    assert "1 token ·" in result.stderr and "first token" not in result.stderr
    inputs = server.requests[0].inputs
    assert inputs["text_input"] == ["Once\nupon a"] and inputs["stream"] == [False]
    assert (inputs["max_tokens"], inputs["top_k"], inputs["seed"], inputs["stop"]) == (
        [5],
        [3],
        [7],
        ["A", "B"],
    )
    assert (inputs["temperature"], inputs["top_p"]) == ([0], [0.5])


def test_an_error_is_one_line_on_stderr(server: FakeTriton) -> None:
    server.respond = lambda received: [Fail("INVALID_ARG: top_p must be\nin (0, 1]")]
    result = run("x", "--url", server.url, "--top-p", "5")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: INVALID_ARG: top_p must be in (0, 1]\n"


def test_an_error_after_some_text_leaves_the_text_on_its_own_line(server: FakeTriton) -> None:
    server.respond = lambda received: [*pieces("some", "x")[:1], Fail("INTERNAL: broken")]
    result = run("x", "--url", server.url)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "some\n", "error: INTERNAL: broken\n")


def test_nobody_listens() -> None:
    result = run("x", "--url", "127.0.0.1:1", "--protocol", "http")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: http://127.0.0.1:1: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x", "--chat"],
        ["--chat", "--raw"],
        ["x", "--raw", "--system", "s"],
        ["x", "--url", "ftp://host"],
        ["x", "--url", "http://host", "--protocol", "grpc"],
        ["x", "--timeout", "0"],
        ["x", "--max-tokens", "many"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_a_conversation_remembers_until_it_is_cleared(server: FakeTriton) -> None:
    def respond(received: Received) -> list[Step]:
        question = messages(received)[-1]["content"]
        return [Fail("UNAVAILABLE: queue full")] if question == "fail" else pieces("re:", question)

    server.respond = respond
    stdin = "one\n\n/unknown\nfail\ntwo\n/clear\nthree\n/exit\nnever\n"
    result = run("--chat", "--url", server.url, "--system", "S", stdin=stdin)
    assert result.exit_code == 0
    assert all(text in result.stdout for text in ("re:one", "re:two", "re:three"))
    assert "error: UNAVAILABLE: queue full" in result.stderr
    assert "no command /unknown" in result.stderr
    asked = [[message["content"] for message in messages(received)] for received in server.requests]
    assert asked == [
        ["S", "one"],
        ["S", "one", "re:one", "fail"],
        ["S", "one", "re:one", "two"],
        ["S", "three"],
    ]


def test_the_end_of_the_input_ends_a_conversation(server: FakeTriton) -> None:
    result = run("--chat", "--url", server.url, stdin="hello\n")
    assert result.exit_code == 0
    assert "ok" in result.stdout


def test_interrupting_an_answer(server: FakeTriton, start_process: Any) -> None:
    server.respond = lambda received: [*pieces("partial", "x")[:1], Hang()]
    process = start_process("x", "--url", server.url)
    assert process.stdout.read(len("partial")) == "partial"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout, stderr) == (130, "\n", "")
    assert server.wait_until_client_has_gone()


def test_interrupting_an_answer_in_a_conversation(server: FakeTriton, start_process: Any) -> None:
    def respond(received: Received) -> list[Step]:
        return [*pieces("partial", "x")[:1], Hang()] if len(server.requests) == 1 else pieces("second")

    server.respond = respond
    process = start_process("--chat", "--url", server.url)
    process.stdin.write("one\n")
    process.stdin.flush()
    expected = "› partial"
    assert process.stdout.read(len(expected)) == expected
    process.send_signal(signal.SIGINT)
    assert server.wait_until_client_has_gone()
    stdout, stderr = process.communicate("two\n/exit\n", timeout=30)
    assert process.returncode == 0
    assert "second" in stdout and "Stopped." in stderr
    assert [message["content"] for message in messages(server.requests[1])] == ["one", "partial", "two"]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_extra_is_named_with_its_remedy(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; sys.modules['{package}.console'] = None; "
        "from paged_client.__main__ import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 1
    assert "pip install 'paged-client[cli]'" in result.stderr and result.stderr.count("\n") == 1
