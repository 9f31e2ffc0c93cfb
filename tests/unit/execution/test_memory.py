"""The memory that a process may still use, from the files that a kernel shows."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from paged_engine.execution.memory import available_cpu_memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_address_space_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 8192000 kB\nMemAvailable: 4096000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_the_kernel_has_left(tmp_path: Path) -> None:
    assert available_cpu_memory(machine(tmp_path, {})) == 4096000 * 1024


def test_control_group_v2_and_those_around_it(tmp_path: Path) -> None:
    """The outer group leaves less than the inner one; page cache that can be dropped is not counted as used."""
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/memory.max": f"{1000 * MIB}\n",
        "sys/fs/cgroup/outer/memory.current": f"{800 * MIB}\n",
        "sys/fs/cgroup/outer/memory.stat": f"anon {500 * MIB}\ninactive_file {100 * MIB}\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/inner/memory.current": f"{700 * MIB}\n",
    }
    assert available_cpu_memory(machine(tmp_path, files)) == 300 * MIB


def test_control_group_v2_seen_from_inside_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{512 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{12 * MIB}\n",
    }
    assert available_cpu_memory(machine(tmp_path, files)) == 500 * MIB


def test_control_group_v1_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{600 * MIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 * MIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {50 * MIB}\n",
    }
    assert available_cpu_memory(machine(tmp_path, files)) == 150 * MIB


def test_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{1 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * MIB}\n",
    }
    assert available_cpu_memory(machine(tmp_path, files)) == 0


def test_address_space_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (900 * MIB, resource.RLIM_INFINITY))
    files = {"proc/self/status": f"Name:\tserver\nVmSize:\t  {400 * 1024} kB\n"}
    assert available_cpu_memory(machine(tmp_path, files)) == 500 * MIB


def test_this_machine() -> None:
    assert 0 < available_cpu_memory() < 1 << 50
