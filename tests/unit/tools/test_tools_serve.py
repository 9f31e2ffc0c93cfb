"""The commands behind `serve`, `demo` and `chat`: exit codes, signals, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_state import WAIT_S, is_alive, wait_until

from paged_engine.tools.ports import Ports


class Command:
    """A run of the command line, with what it has printed on stderr and the pid of the stand-in's stub."""

    def __init__(self, folder: Path, repository: Path, verb: str, *words: str, mood: str) -> None:
        self.ports = Ports.free()
        self._log, self._errors = folder / "triton.log", folder / "errors"
        command = [sys.executable, "-m", "paged_engine.tools.serve", verb, f"--repository={repository}"]
        command += [f"--log-file={self._log}", f"--parameters=mood={mood}", "--exit-timeout=1"]
        command += [f"--http-port={self.ports.http}", f"--grpc-port={self.ports.grpc}"]
        command += [f"--metrics-port={self.ports.metrics}", *words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment
            )

    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for(self, pattern: str) -> None:
        wait_until(lambda: re.search(pattern, self.errors()) is not None)

    def finish(self) -> tuple[int, str]:
        """Exit code and standard output."""
        output, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, output.decode()

    def stub_is_alive(self) -> bool:
        found = re.search(r"stub (\d+)", self._log.read_text())
        assert found, "the server did not get as far as its stub"
        return is_alive(int(found[1]))


Run = Callable[..., Command]


@pytest.fixture
def run(fake_server: Path, tmp_path: Path) -> Iterator[Run]:
    commands: list[Command] = []

    def run(verb: str, *words: str, mood: str = "good") -> Command:
        folder = tmp_path / f"run{len(commands)}"
        folder.mkdir()
        commands.append(Command(folder, fake_server, verb, *words, mood=mood))
        return commands[-1]

    yield run
    for command in commands:
        command.process.kill()
        command.process.wait()


def test_run_returns_what_the_command_returns(run: Run) -> None:
    command = run("run", "--", "sh", "-c", "echo the answer; exit 3")
    assert command.finish() == (3, "the answer\n")
    assert not command.stub_is_alive()


def test_run_can_use_a_server_that_is_there(run: Run) -> None:
    server = run("serve")
    server.wait_for("ready: ")
    command = run("run", f"--http-port={server.ports.http}", "--reuse-running", "--", "echo", "hello")
    assert command.finish() == (0, "hello\n")
    assert f"port {server.ports.http}" in command.errors()
    assert server.process.poll() is None


def test_who_names_a_model_is_told_that_the_running_server_has_another(run: Run, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").touch()
    model = str(tmp_path / "checkpoint")
    server = run("serve", f"--model={model}")
    server.wait_for("ready: ")
    reuse = [f"--http-port={server.ports.http}", "--reuse-running"]
    for wanted, has_effect in ((f"--model={model}", True), ("--model=organisation/other", False)):
        command = run("run", *reuse, "--parameters=", wanted, "--", "true")
        assert command.finish()[0] == 0
        assert f"which serves the model {model}" in command.errors()
        assert ("not used" not in command.errors()) == has_effect
    assert "MODEL='organisation/other'" in command.errors()
    command = run("run", *reuse, "--parameters=page_size=8", "--", "true")
    assert command.finish()[0] == 0
    assert "not used, being for a server that is started here: PARAMETERS='page_size=8'" in command.errors()


@pytest.fixture
def hang_up_ends_processes() -> Iterator[None]:
    """Also where the tests themselves were started to ignore it, as by nohup: what they start would inherit that."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up_ends_processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_stops_in_good_order_on_a_signal(run: Run, number: int) -> None:
    command = run("serve")
    command.wait_for("ready: ")
    command.process.send_signal(number)
    assert command.finish()[0] == 0
    assert not command.stub_is_alive()


@pytest.mark.parametrize("verb", ["serve", "run"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads(run: Run, verb: str, number: int) -> None:
    command = run(verb, *(["--", "true"] if verb == "run" else []), mood="never-ready")
    command.wait_for("loading the model")
    time.sleep(1.0)  # let the server get somewhere
    command.process.send_signal(number)
    assert command.finish()[0] == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_command_runs(run: Run, tmp_path: Path, number: int) -> None:
    command = run("run", "--", "sh", "-c", "echo ready >&2; sleep 600")
    command.wait_for("ready")
    command.process.send_signal(number)
    assert command.finish()[0] == 128 + number
    assert not command.stub_is_alive()


def test_a_second_signal_ends_a_server_that_does_not_want_to(run: Run) -> None:
    command = run("serve", "--exit-timeout=600", mood="stubborn")
    command.wait_for("ready: ")
    command.process.send_signal(signal.SIGTERM)
    command.wait_for("again to end at once")
    command.process.send_signal(signal.SIGTERM)
    assert command.finish()[0] == 1
    assert not command.stub_is_alive()


def test_a_server_that_ends_by_itself_ends_the_command(run: Run) -> None:
    command = run("run", "--", "sleep", "600", mood="ends-by-itself")
    assert command.finish()[0] == 1
    assert "out of everything" in command.errors()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repository=/nowhere"], "error: there is no model repository at /nowhere"),
        (["--parameters=page_size"], "error: cannot read 'page_size' among the parameters"),
        (["--http-port=0"], "error: HTTP_PORT must be a port from 1 to 65535, got 0"),
        (["--model=/no/such/checkpoint"], "/no/such/checkpoint does not exist"),
        (["--parameters=model=./no-such-checkpoint"], "no-such-checkpoint does not exist"),
    ],
)
def test_wrong_options_are_one_clear_line(run: Run, words: list[str], message: str) -> None:
    command = run("serve", *words)
    assert command.finish()[0] == 1
    assert message in command.errors()
    assert "Traceback" not in command.errors()


def test_a_name_that_is_no_path_is_said_to_be_looked_up_on_a_hub(run: Run) -> None:
    command = run("run", "--parameters=", "--model=organisation/model", "--", "true")
    assert command.finish()[0] == 0
    assert "there is no file or folder organisation/model here, so it is looked up" in command.errors()


def test_run_needs_a_command(run: Run) -> None:
    assert run("run").finish()[0] == 2
