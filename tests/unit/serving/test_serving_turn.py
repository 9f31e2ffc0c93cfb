"""Turn: one process of a server at a time."""

from __future__ import annotations

import os
import subprocess
import sys

from paged_engine.serving.turn import Turn

CHILD = """
import os, sys
os.getppid = lambda: int(sys.argv[1])  # a sibling of this process
from paged_engine.serving.turn import Turn
turn = Turn("a")
print(turn.take(), flush=True)
sys.stdin.read()
"""


def test_a_turn_is_one_holders_until_it_is_given_back() -> None:
    first, second, other = Turn("a"), Turn("a"), Turn("b")
    assert first.take() and first.take()
    assert not second.take()
    assert other.take()
    first.give_back()
    first.give_back()
    assert second.take()
    assert not first.take()
    second.give_back()
    other.give_back()


def test_a_turn_ends_with_its_process() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(os.getppid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None and child.stdout.readline() == b"True\n"
    turn = Turn("a")
    assert not turn.take()
    child.kill()
    child.communicate()
    assert turn.take()
    turn.give_back()
