"""Finds in Triton's log what a person wants to read when a server has failed."""

from __future__ import annotations

import re

_MAX_LINES = 40
_FAILURE = re.compile(r"Traceback|(?i:failed to (load|start|create))|^error:")
_REASON = re.compile(r"\w+(?:Exception|Error): .*")
_TABLE_OR_INFO = re.compile(r"[+|]|I\d{4} |\s*$")


def telling_lines(log: str) -> list[str]:
    """The lines that tell why something failed: those from the first failure on, else the last ones; at most 40.

    What a model raises is in the log once for each of Triton's layers; here it stands once, on lines of its own.
    """
    lines = log.splitlines()
    first = next(
        (i for i, line in enumerate(lines) if _FAILURE.search(line)), max(0, len(lines) - _MAX_LINES)
    )
    reasons: set[str] = set()
    telling = []
    for line in lines[first:]:
        reason = _REASON.search(line)
        if _TABLE_OR_INFO.match(line) or (reason is not None and reason[0] in reasons):
            continue
        if reason is not None:
            reasons.add(reason[0])
        telling.append(line.replace("\\n", "\n    "))
    return telling[:_MAX_LINES]
