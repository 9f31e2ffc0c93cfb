"""Engines that are compared take turns, and one that fails does not take the others' results along."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from contenders import Contender, ContenderError, Rounds, run_rounds, start_all
from loads import Load

WORKER = Path(__file__).parent / "fake_worker.py"
LOADS = (Load(2, 4, 3), Load(1, 8, 5))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def contender(kind: str, folder: Path) -> Contender:
    return Contender(kind, kind, {}, folder / f"{kind}.log", worker=WORKER)


def wait_until_stopped(process: psutil.Process) -> None:
    """Return when the signal has arrived."""
    deadline = time.monotonic() + 60
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, process.status()
        time.sleep(0.01)


def test_an_answer_has_what_the_worker_measured(tmp_path: Path) -> None:
    with contender("works", tmp_path) as working:
        working.wait_ready(60)
        answer = working.generate([[1, 2, 3], [4, 5, 6]], 2, timeout_s=60)
        assert (answer["seconds"], answer["tokens"]) == (0.5, [[1, 2], [4, 5]])


def test_it_stands_still_between_requests_and_is_gone_in_the_end(tmp_path: Path) -> None:
    with contender("works", tmp_path) as working:
        working.wait_ready(60)
        for _ in range(3):
            process = psutil.Process(working.generate([[1]], 1, timeout_s=60)["pid"])
            wait_until_stopped(process)
    assert not process.is_running()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dies", "dies: it ended; the end of .*\n    out of memory"),
        ("reports an error", "ValueError: bad prompt"),
        ("loses tokens", r"2 outputs of \[1\] tokens, not 2 of 2"),
        ("falls silent", "no answer within 1 s"),
    ],
)
def test_a_failure_says_what_happened(kind: str, reason: str, tmp_path: Path) -> None:
    with contender(kind, tmp_path) as failing:
        failing.wait_ready(60)
        with pytest.raises(ContenderError, match=reason):
            failing.generate([[1, 2, 3], [4, 5, 6]], 2, timeout_s=1 if kind == "falls silent" else 60)


def test_those_that_fail_drop_out_and_the_others_go_on(tmp_path: Path, stack: ExitStack) -> None:
    kinds = ("does not start", "works", "dies", "loses tokens")
    rounds = Rounds()
    contenders = start_all(
        {kind: functools.partial(contender, kind, tmp_path) for kind in kinds}, rounds, stack
    )
    assert [each.name for each in contenders] == ["works", "dies", "loses tokens"]
    run_rounds(contenders, LOADS, 2, rounds)
    assert [each.name for each in contenders] == ["works"]
    assert rounds.failures.keys() == {"does not start", "dies", "loses tokens"}
    assert "the model is missing" in rounds.failures["does not start"]
    assert [rounds.speeds("works", load) for load in LOADS] == [[12.0, 12.0], [10.0, 10.0]]
    assert rounds.speeds("dies", LOADS[0]) == []


def test_an_interpreter_that_does_not_exist_is_a_failure_too(tmp_path: Path, stack: ExitStack) -> None:
    rounds = Rounds()
    start = functools.partial(
        Contender, "nobody", "works", {}, tmp_path / "log", python=str(tmp_path / "python")
    )
    assert start_all({"nobody": start}, rounds, stack) == []
    assert "No such file" in rounds.failures["nobody"]
