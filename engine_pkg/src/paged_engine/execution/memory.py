"""How much memory this process may still use: what the kernel has left, its control groups allow, and its limits permit."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from paged_engine.control_groups import control_groups, read_lines

_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""A control group's limit, its usage, and the field of its memory.stat that is page cache which can be dropped: v2, v1."""


def available_cpu_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory that this process may still take.

    The least of MemAvailable, of what every enclosing control group (v1 or v2) leaves, page cache that can be dropped
    counted as free, and of the address space that RLIMIT_AS leaves.

    Args:
        root: where /proc and /sys are found; another folder only in tests.
    """
    return max(0, min(_limits(root)))


def _limits(root: Path) -> Iterator[int]:
    meminfo = _fields(root / "proc/meminfo")
    yield meminfo.get("MemAvailable:", meminfo.get("MemFree:", 0)) * 1024
    for group in control_groups("memory", root):
        for limit, usage, cache in _GROUP_FILES:
            allowed, used = _number(group / limit), _number(group / usage)
            if allowed is not None and used is not None:
                yield allowed - used + _fields(group / "memory.stat").get(cache, 0)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        yield address_space - _fields(root / "proc/self/status").get("VmSize:", 0) * 1024


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none ("max" is no limit)."""
    first = next(iter(read_lines(file)), "")
    return int(first) if first.isdigit() else None


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in read_lines(file))
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
