"""The command that `build.sh` starts a server with: in the foreground, or around another command.

    python -m paged_engine.tools.serve serve …              until SIGINT or SIGTERM
    python -m paged_engine.tools.serve run … -- COMMAND     while COMMAND runs

Both leave no process behind, whatever ends them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paged_engine.errors import ConfigurationError
from paged_engine.models.locate import locate_checkpoint
from paged_engine.tools.ports import Ports, ServerError
from paged_engine.tools.render_repository import MODEL_NAME, RepositoryError, parse_parameters
from paged_engine.tools.triton import TritonProcess, answers_ok, served_parameters

_PROGRESS_S = 5.0
_POLL_S = 0.1
_STOP_MARGIN_S = 30.0


class _Stopped(Exception):
    """A signal has asked for the end."""


class _Signals:
    """Remembers the signals that ask for the end, instead of letting them end the program half-way."""

    def __init__(self) -> None:
        self.received: list[int] = []
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and shall stay so
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, lambda signum, _frame: self.received.append(signum))

    def check(self) -> None:
        """Raise _Stopped if one has come."""
        if self.received:
            raise _Stopped


def main(arguments: Sequence[str]) -> int:
    """Run one of the two commands and return the exit code for the shell."""
    options, command = _parse(arguments)
    signals = _Signals()
    try:
        if options.verb == "serve":
            return _serve(options, signals)
        return _run(options, command, signals)
    except (ServerError, RepositoryError, ConfigurationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except _Stopped:
        return 128 + signals.received[0]


def _serve(options: argparse.Namespace, signals: _Signals) -> int:
    """Serve until a signal comes; then let the requests in flight finish. A second signal ends at once."""
    process = _start(options, signals)
    try:
        _wait_ready(process, options, signals)
        url = f"http://{process.host}:{process.ports.http}"
        _say(
            f"ready: {url} (HTTP), {process.host}:{process.ports.grpc} (gRPC), metrics on {process.ports.metrics}"
        )
        prompt = '{"text_input": "The capital of France is", "max_tokens": 16, "temperature": 0}'
        _say(f"try: curl -s {url}/v2/models/{process.model_name}/generate -d {shlex.quote(prompt)}")
        while not signals.received:
            code = process.exit_code()
            if code is not None:
                raise ServerError(f"the server ended by itself with exit code {code}\n{process.log_tail()}")
            time.sleep(_POLL_S)
        return _stop(process, options, signals)
    finally:
        process.close()


def _run(options: argparse.Namespace, command: Sequence[str], signals: _Signals) -> int:
    """Run ``command`` beside a server, which is started unless a ready one is to be reused and there."""
    ready = f"/v2/models/{MODEL_NAME}/ready"
    if options.reuse_running and answers_ok("127.0.0.1", options.http_port, ready):
        _say_what_is_reused(options)
        return _run_command(command, None, signals)
    process = _start(options, signals)
    try:
        _wait_ready(process, options, signals)
        code = _run_command(command, process, signals)
        _stop(process, options, signals)
        return code
    finally:
        process.close()


def _say_what_is_reused(options: argparse.Namespace) -> None:
    """Which model answers, since it need not be the one that was asked for."""
    model = served_parameters("127.0.0.1", options.http_port, MODEL_NAME).get("model")
    _say(
        f"using the server that is running on port {options.http_port}"
        + ("" if model is None else f", which serves the model {model}")
    )
    wanted = {"MODEL": options.model, "PARAMETERS": options.parameters}
    ignored = " and ".join(f"{name}={value!r}" for name, value in wanted.items() if value not in ("", model))
    if ignored:
        _say(
            f"warning: not used, being for a server that is started here: {ignored}. Stop the one that is running, or "
            "have another beside it on other ports (HTTP_PORT, GRPC_PORT, METRICS_PORT)"
        )


def _run_command(command: Sequence[str], process: TritonProcess | None, signals: _Signals) -> int:
    """Run ``command`` to its end and return its exit code. It is ended when the server ends or a signal comes.

    At a terminal, Ctrl-C reaches the command by itself, and what it means there is the command's to say. Elsewhere
    the command gets a process group of its own, so that what it has started ends with it.
    """
    at_terminal = sys.stdin.isatty()
    child = subprocess.Popen(command, start_new_session=not at_terminal)
    try:
        while child.poll() is None:
            if process is not None and process.exit_code() is not None:
                raise ServerError(
                    f"the server ended with exit code {process.exit_code()}\n{process.log_tail()}"
                )
            if at_terminal:
                signals.received = [number for number in signals.received if number != signal.SIGINT]
            signals.check()
            time.sleep(_POLL_S)
    finally:
        end = child.send_signal if at_terminal else partial(os.killpg, child.pid)
        if child.poll() is None:
            end(signal.SIGTERM)
            try:
                child.wait(_STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                end(signal.SIGKILL)
                child.wait()
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _start(options: argparse.Namespace, signals: _Signals) -> TritonProcess:
    """Start the server with what the command line asks for."""
    parameters = parse_parameters(options.parameters)
    if options.model:
        parameters.setdefault("model", options.model)
    model = parameters.get("model")
    # Asked here, too: a typo in a path shall not have to wait for the server to find it.
    if model and locate_checkpoint(model) is None:
        _say(f"there is no file or folder {model} here, so it is looked up as the id of a model on a hub")
    return TritonProcess(
        options.repository,
        Ports(options.http_port, options.grpc_port, options.metrics_port),
        options.log_file,
        parameters=parameters,
        default_model=options.default_model,
        address=options.address,
        exit_timeout_s=options.exit_timeout,
        arguments=shlex.split(options.triton_arguments),
    )


def _wait_ready(process: TritonProcess, options: argparse.Namespace, signals: _Signals) -> None:
    """Wait for the server, with a line now and then so that nobody wonders."""
    next_line_s = _PROGRESS_S

    def on_poll(elapsed_s: float) -> None:
        nonlocal next_line_s
        signals.check()
        if elapsed_s >= next_line_s:
            next_line_s += _PROGRESS_S
            _say(f"  … {elapsed_s:.0f} s")

    explicit = any("explicit" in word for word in shlex.split(options.triton_arguments))
    _say(f"starting Triton and loading the model (log: {process.log_file})")
    process.wait_ready(options.ready_timeout, model=not explicit, on_poll=on_poll)


def _stop(process: TritonProcess, options: argparse.Namespace, signals: _Signals) -> int:
    """Ask the server to end, wait for the requests in flight, and return its exit code (1 if it had to be killed)."""
    before = len(signals.received)
    _say(
        "stopping the server"
        if before == 0
        else "stopping: requests in flight are finished; again to end at once"
    )
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + options.exit_timeout + _STOP_MARGIN_S
    while (code := process.exit_code()) is None:
        if len(signals.received) > before or time.monotonic() > deadline:
            _say("ended before all requests were finished")
            return 1
        time.sleep(_POLL_S)
    return 0 if code == 0 else 1


def _say(line: str) -> None:
    """A line for the person at the terminal; standard output belongs to the command that runs."""
    print(line, file=sys.stderr, flush=True)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    """Split off what follows ``--`` and parse the rest."""
    ours, command = list(arguments), []
    if "--" in ours:
        split = ours.index("--")
        ours, command = ours[:split], ours[split + 1 :]
    parser = argparse.ArgumentParser(prog="python -m paged_engine.tools.serve", description=__doc__)
    parser.add_argument("verb", choices=["serve", "run"])
    parser.add_argument(
        "--repository", type=Path, required=True, help="model repository; a copy of it is served"
    )
    parser.add_argument("--log-file", type=Path, required=True, help="where the server's output goes")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    parser.add_argument(
        "--model", default="", help="checkpoint to serve, in place of the one in config.pbtxt"
    )
    parser.add_argument("--default-model", help="checkpoint to serve where config.pbtxt names none")
    parser.add_argument(
        "--parameters", default="", help='model parameters, as in "page_size=32 dtype=float32"'
    )
    parser.add_argument(
        "--ready-timeout", type=float, default=600, help="seconds until the model must be ready"
    )
    parser.add_argument(
        "--exit-timeout", type=int, default=600, help="seconds that requests have to finish at the end"
    )
    parser.add_argument(
        "--triton-arguments", default="", help="further arguments for tritonserver, in one string"
    )
    parser.add_argument(
        "--reuse-running", action="store_true", help="run: use a server that is ready on the port"
    )
    options = parser.parse_args(ours)
    if options.verb == "run" and not command:
        parser.error("run needs a command after --")
    return options, command


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
