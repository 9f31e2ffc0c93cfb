"""The control groups (cgroups, v1 or v2) that this process is in: what a container or a service may use of its machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the groups that this process is in, and of each of those around them.

    Args:
        controller: "memory" or "cpu"; of v1, whose groups are by controller, only its own count.
        root: where /proc and /sys are found; another folder than / only in tests.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        # In a container the mount may be the group itself, and this folder be missing.
        folder = mount / path.strip("/")
        yield folder
        yield from (parent for parent in folder.parents if parent == mount or mount in parent.parents)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its CPU affinity, or less where the quota of a control group allows less; at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = min((_core_quota(group) for group in control_groups("cpu", root)), default=math.inf)
    return affinity if quota >= affinity else max(1, round(quota))


def _core_quota(group: Path) -> float:
    """Cores' worth of time that a group gets; infinity where it has no quota ("max" in v2, -1 in v1)."""
    words = " ".join(read_lines(group / "cpu.max")).split() or [
        line for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us") for line in read_lines(group / name)
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return math.inf
    quota, period = map(int, words)
    return quota / period


def read_lines(file: Path) -> list[str]:
    """The lines of one of the kernel's files; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
