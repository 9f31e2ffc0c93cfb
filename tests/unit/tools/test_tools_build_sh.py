"""What build.sh says and refuses before it has set anything up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
VERBS = (
    "setup",
    "demo",
    "serve",
    "chat",
    "test",
    "sanitize",
    "lint",
    "perf",
    "bench",
    "models",
    "image",
    "help",
)
VARIABLES = (
    "HTTP_PORT=8000",
    "GRPC_PORT=8001",
    "METRICS_PORT=8002",
    "MODEL=",
    "PARAMETERS=",
    "TORCH_INDEX_URL=",
)
NEEDED = (
    "bash",
    "basename",
    "cat",
    "dirname",
    "find",
    "flock",
    "ls",
    "mkdir",
    "sed",
    "sha256sum",
    "sort",
    "touch",
    "xargs",
)


def build_sh(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "build.sh"), *words],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]])
def test_help_explains_every_verb_and_variable(words: list[str], tmp_path: Path) -> None:
    run = build_sh(*words, cwd=tmp_path)
    assert run.returncode == 0
    for word in (*(f"  {verb} " for verb in VERBS), *VARIABLES):
        assert word in run.stdout


def test_an_unknown_verb() -> None:
    run = build_sh("deploy")
    assert run.returncode == 1
    assert "there is no verb deploy" in run.stderr


def test_benchmarks_are_listed_and_an_unknown_one_is_refused() -> None:
    names = [line.split()[0] for line in build_sh("bench").stdout.splitlines()]
    assert {"simulate_scheduler", "offline", "served", "peers"} <= set(names)
    assert build_sh("help").stdout.endswith(build_sh("bench").stdout)
    for name in ("no_such_benchmark", "loads"):  # the second is a module that benchmarks share
        assert name not in names
        run = build_sh("bench", name)
        assert run.returncode == 1
        assert f"there is no benchmark {name}" in run.stderr


def test_a_folder_that_is_no_environment_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a letter").write_text("dear")
    run = build_sh("setup", cwd=tmp_path, VENV_DIR="letters", CACHE_DIR="cache")
    assert run.returncode == 1
    assert f"{tmp_path}/letters, which is neither empty nor a virtual environment" in run.stderr
    assert [file.name for file in (tmp_path / "letters").iterdir()] == ["a letter"]


def test_without_a_suitable_python_the_apt_line_is_named(tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found, name
        (commands / name).symlink_to(found)
    (commands / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.13.5"\n')
    (commands / "python3").chmod(0o755)
    run = build_sh("setup", cwd=tmp_path, PATH=str(commands), VENV_DIR="venv", CACHE_DIR="cache")
    assert run.returncode == 1
    assert "there is Python 3.13.5" in run.stderr
    assert "apt-get install python3 python3-venv libpython3-dev" in run.stderr


def test_the_interpreter_that_runs_this_has_what_is_needed() -> None:
    script = ROOT / "engine_pkg" / "src" / "paged_engine" / "tools" / "interpreter.py"
    run = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
