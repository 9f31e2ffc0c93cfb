"""How benchmarks speak: a line of progress, a table that can be pasted into a README, results kept as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

CACHE_DIR = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache").resolve()


def say(line: str) -> None:
    """A line of progress; standard output is for the results."""
    print(f"  … {line}", file=sys.stderr, flush=True)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, aligned so that it reads well as it stands; the first column to the left."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rule = "|".join(f"{'-' * (width + 1)}{':' if index else '-'}" for index, width in enumerate(widths))
    return "\n".join([line(columns), f"|{rule}|", *(line(row) for row in rows)])


def save(name: str, results: dict[str, Any]) -> Path:
    """Keep results, with the machine they are of, as CACHE_DIR/bench/NAME.json, and return the file."""
    file = CACHE_DIR / "bench" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), **results}, indent=1), encoding="utf-8")
    return file


def machine() -> dict[str, Any]:
    """What figures depend on besides the code."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
