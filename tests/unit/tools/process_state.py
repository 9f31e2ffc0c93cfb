"""Waiting for processes to come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 60.0
"""Bound against hangs; nothing here takes more than a second or two."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; AssertionError if it never does."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor a zombie that nobody has reaped."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
