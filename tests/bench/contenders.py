"""The engines that a benchmark compares: each a process that stays loaded, of which only one computes at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from loads import Load
from report import say

from paged_engine.tools.triton import die_with_parent

WORKER = Path(__file__).parent / "worker.py"
_TAIL_LINES = 15


class ContenderError(RuntimeError):
    """A contender could not be started, or failed at a load; the message says why."""


class Contender:
    """A worker process. While it is not asked it is stopped, so that it takes no time from the others."""

    def __init__(
        self,
        name: str,
        kind: str,
        options: Mapping[str, Any],
        log_file: Path,
        *,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        worker: Path = WORKER,
    ) -> None:
        """Start the process; `wait_ready` comes next.

        Args:
            name: for tables and messages.
            kind: of worker.py's.
            options: of that kind.
            log_file: gets what the process prints; overwritten.
            python: the interpreter whose packages it needs.
            environment: all variables of the process; those of this one if not given.
            worker: the program, where it is not worker.py.
        """
        self.name = name
        self._log_file = log_file
        self._closed = False
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(worker), kind, json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=None if environment is None else dict(environment),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_ready(self, timeout_s: float = 1200) -> None:
        """Return once the model is loaded. Raises ContenderError if it does not come to that."""
        began = time.monotonic()
        self._read(timeout_s)
        self._signal(signal.SIGSTOP)
        say(f"{self.name} is loaded after {time.monotonic() - began:.0f} s")

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, timeout_s: float = 600, **options: Any
    ) -> dict[str, Any]:
        """Compute the prompts together, each to `max_tokens` tokens.

        Returns:
            "seconds", "tokens" [request][position], and what else the kind measures.

        Raises:
            ContenderError: it failed, gave another number of tokens, or took longer than `timeout_s`.
        """
        assert self._process.stdin is not None, "it is a pipe"
        request = {"prompts": prompts, "max_tokens": max_tokens, **options}
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failure(f"it is gone ({error})") from error
        answer = self._read(timeout_s)
        self._signal(signal.SIGSTOP)
        lengths = {len(tokens) for tokens in answer["tokens"]}
        if lengths != {max_tokens} or len(answer["tokens"]) != len(prompts):
            raise self._failure(
                f"{len(answer['tokens'])} outputs of {sorted(lengths)} tokens, "
                f"not {len(prompts)} of {max_tokens}"
            )
        return answer

    def close(self) -> None:
        """End the process and what it has started, at once. May be repeated."""
        if not self._closed:
            self._closed = True
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next line of the process. There is never a second one waiting, so `select` sees all there is."""
        output = self._process.stdout
        assert output is not None, "it is a pipe"
        if not select.select([output], [], [], timeout_s)[0]:
            raise self._failure(f"no answer within {timeout_s:.0f} s")
        line = output.readline()
        if not line.endswith(b"\n"):
            raise self._failure("it ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failure(answer["error"])
        return answer

    def _failure(self, reason: str) -> ContenderError:
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return ContenderError("\n    ".join([f"{self.name}: {reason}; the end of {self._log_file}:", *lines]))

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@dataclass
class Rounds:
    """What the rounds brought, by contender and load."""

    answers: dict[tuple[str, Load], list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Why a contender dropped out, by its name; what it did before stays in `answers`."""

    def speeds(self, name: str, load: Load) -> list[float]:
        """Tokens per second of each round."""
        return [load.num_counted_tokens / answer["seconds"] for answer in self.answers.get((name, load), ())]


def start_all(
    starters: Mapping[str, Callable[[], Contender]], rounds: Rounds, stack: ExitStack
) -> list[Contender]:
    """Start contenders one after another, to be closed by `stack`.

    Returns:
        Those that came up; the others are noted in `rounds`.
    """
    contenders = []
    for name, start in starters.items():
        say(f"starting {name}")
        contender = None
        try:
            contender = stack.enter_context(start())
            contender.wait_ready()
        except (ContenderError, OSError) as error:
            drop(name, error, rounds, contender)
        else:
            contenders.append(contender)
    return contenders


def run_rounds(contenders: list[Contender], loads: Sequence[Load], num_rounds: int, rounds: Rounds) -> None:
    """Run each load with each contender in turn, `num_rounds` times after one round to warm up.

    One that fails drops out; it is closed and taken out of `contenders`, and the others go on.
    """
    for number in range(num_rounds + 1):
        for load in loads:
            prompts = load.prompts(seed=number)
            for contender in list(contenders):
                try:
                    answer = contender.generate(prompts, load.num_output_tokens)
                except ContenderError as error:
                    drop(contender.name, error, rounds, contender)
                    contenders.remove(contender)
                    continue
                kind = f"round {number} of {num_rounds}" if number else "warming up"
                say(
                    f"{kind}, {load.name}: {contender.name} {load.num_counted_tokens / answer['seconds']:.0f} tokens/s"
                )
                if number:
                    rounds.answers.setdefault((contender.name, load), []).append(answer)


def drop(name: str, error: Exception, rounds: Rounds, contender: Contender | None) -> None:
    """Note that a contender failed, and end what is left of it."""
    rounds.failures[name] = str(error)
    say(f"{name} drops out: {error}")
    if contender is not None:
        contender.close()


def unwind_on_terminate() -> None:
    """Let SIGTERM end this process by way of its `with` blocks, so that no contender is left behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
