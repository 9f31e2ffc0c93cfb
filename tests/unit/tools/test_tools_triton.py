"""Running a server: it is waited for, told to stop, and gone in the end, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_state import WAIT_S, is_alive, wait_until

from paged_engine.tools.ports import Ports, ServerError
from paged_engine.tools.triton import TritonProcess

Start = Callable[..., TritonProcess]


@pytest.fixture
def start(fake_server: Path, tmp_path: Path) -> Iterator[Start]:
    processes: list[TritonProcess] = []

    def start(mood: str = "good", **options: object) -> TritonProcess:
        log_file = tmp_path / "logs" / "triton.log"
        processes.append(
            TritonProcess(fake_server, Ports.free(), log_file, parameters={"mood": mood}, **options)
        )  # type: ignore[arg-type]
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_ready_stop_and_gone(start: Start) -> None:
    process = start()
    process.wait_ready(WAIT_S)
    assert process.is_model_ready()
    wait_until(lambda: len(process.group_pids()) == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert "finalized" in process.log_text()
    process.close()
    assert process.group_pids() == []
    assert not process.repository.exists()


@pytest.mark.parametrize("mood", ["good", "stubborn", "never-ready"])
def test_close_ends_the_whole_group(start: Start, mood: str) -> None:
    process = start(mood)
    wait_until(lambda: len(process.group_pids()) == 2)
    pids = process.group_pids()
    process.close()
    process.close()
    assert not any(is_alive(pid) for pid in pids)


def test_a_stub_that_is_left_is_found_and_ended(start: Start) -> None:
    process = start("leaves-its-stub")
    process.wait_ready(WAIT_S)
    process.send_signal(signal.SIGTERM)
    process.wait(WAIT_S)
    (stub,) = process.group_pids()
    process.close()
    assert not is_alive(stub)


def test_a_server_that_fails_shows_why_and_shows_it_once(start: Start) -> None:
    with pytest.raises(ServerError, match="exit code 1 while starting") as caught:
        start("fail-at-start").wait_ready(WAIT_S)
    message = str(caught.value)
    assert message.count("the disk is upside down") == message.count("model.py(36): initialize") == 1
    assert "failed to load all models" in message
    assert "starting with" not in message


def test_a_server_that_is_not_ready_in_time(start: Start) -> None:
    with pytest.raises(ServerError, match="not ready after 1 s"):
        start("never-ready").wait_ready(1.0)


def test_the_server_alone_can_be_waited_for(start: Start) -> None:
    start().wait_ready(WAIT_S, model=False)


def test_the_wait_can_be_ended_from_outside(start: Start) -> None:
    class Enough(Exception):
        pass

    def on_poll(elapsed_s: float) -> None:
        raise Enough

    with pytest.raises(Enough):
        start("never-ready").wait_ready(WAIT_S, on_poll=on_poll)


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_a_busy_port_is_named_with_its_variable(fake_server: Path, tmp_path: Path, name: str) -> None:
    free = Ports.free()
    message = rf"port \d+ \({name}\).*in use.*{name.upper()}_PORT="
    with socket.create_server(("127.0.0.1", getattr(free, name))), pytest.raises(ServerError, match=message):
        TritonProcess(fake_server, free, tmp_path / "log")


@pytest.mark.parametrize(
    ("ports", "message"),
    [
        (Ports(0, 20_001, 20_002), "HTTP_PORT must be a port from 1 to 65535, got 0"),
        (Ports(20_000, 70_000, 20_002), "GRPC_PORT must be a port from 1 to 65535, got 70000"),
        (Ports(20_000, 20_000, 20_002), "must differ"),
    ],
)
def test_ports_that_cannot_be(fake_server: Path, tmp_path: Path, ports: Ports, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        TritonProcess(fake_server, ports, tmp_path / "log")


def test_the_server_goes_when_its_parent_is_killed(fake_server: Path, tmp_path: Path) -> None:
    program = f"""
import pathlib, time
from paged_engine.tools.ports import Ports
from paged_engine.tools.triton import TritonProcess
process = TritonProcess(pathlib.Path({str(fake_server)!r}), Ports.free(), pathlib.Path({str(tmp_path / "log")!r}))
process.wait_ready({WAIT_S})
print(process.pid, flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert is_alive(server)
        parent.kill()
    wait_until(lambda: not is_alive(server))
