"""What takes minutes: a soak, NVIDIA's load generator, and doing nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import CACHE_DIR
from triton_server import TritonServer
from wire import generate

TESTS = Path(__file__).parents[1]
IDLE_S = 30.0

pytestmark = pytest.mark.slow


def run(*command: str, timeout_s: float = 280.0) -> str:
    """What a Python program prints; AssertionError with it where it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CACHE_DIR": str(CACHE_DIR)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_soak():
    assert "passed" in run(str(TESTS / "bench" / "soak.py"), "--requests", "3000")


def test_perf_analyzer_at_concurrency_1_to_8(tiny_server):
    table = run(
        "-m",
        "paged_engine.tools.perf",
        *("--url", tiny_server.grpc_url, "--cache-dir", str(CACHE_DIR / "perf_analyzer")),
        *("--concurrency", "1:8", "--output-tokens", "16"),
    )
    rows = [line.split() for line in table.splitlines() if re.match(r"\s*\d+\s", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 9)), table
    assert all(float(row[1].replace(",", "")) > 0 for row in rows), table


def test_an_idle_server_is_idle(server):
    """Under 2 % of a core, in the time of the processor and not of the clock."""
    assert generate(server, {"text_input": "Hello", "max_tokens": 4}).checked()
    server.wait_pool_clean()
    before = processor_seconds(server)
    time.sleep(IDLE_S)
    assert processor_seconds(server) - before < 0.02 * IDLE_S
    assert generate(server, {"text_input": "Hello", "max_tokens": 4}).checked()


def processor_seconds(server: TritonServer) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in server.process.group_pids()]
    return sum(t.user + t.system for t in times)
