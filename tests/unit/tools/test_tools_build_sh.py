"""What build.sh says and refuses before it has set anything up."""

from __future__ import annotations

import os
import re
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


def without_set_up(folder: Path) -> dict[str, str]:
    """Variables with which any set-up fails at once: the environment's folder has something else in it."""
    (folder / "taken").mkdir()
    (folder / "taken" / "a letter").touch()
    return {"VENV_DIR": str(folder / "taken"), "CACHE_DIR": str(folder / "cache")}


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


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "help"])
@pytest.mark.parametrize("words", [["VERB", "--help"], ["VERB", "-h"], ["help", "VERB"]])
def test_a_verb_explains_itself_without_any_set_up(verb: str, words: list[str], tmp_path: Path) -> None:
    words = [verb if word == "VERB" else word for word in words]
    run = build_sh(*words, HTTP_PORT="abc", **without_set_up(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(f"Usage: ./build.sh {verb}")
    assert "./build.sh help" in run.stdout


@pytest.mark.parametrize(
    ("verb", "own"),
    [("chat", ["--url", "--protocol", "--raw", "--chat"]), ("perf", ["--url", "--cache-dir"])],
)
def test_every_option_of_a_program_behind_a_verb_is_explained(verb: str, own: list[str]) -> None:
    """Those of `own` are given by the verb itself, or do not go with it."""
    module = {"chat": "paged_client", "perf": "paged_engine.tools.perf"}[verb]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-m", module, "--help"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    options = set(re.findall(r"^[ │]*(--[a-z-]+)", run.stdout, re.MULTILINE)) - {"--help", *own}
    assert len(options) > 4
    explained = build_sh(verb, "--help").stdout
    assert [option for option in options if f"{option} " not in explained] == []


@pytest.mark.parametrize("verb", ["setup", "serve", "lint"])
def test_a_verb_without_arguments_refuses_any(verb: str, tmp_path: Path) -> None:
    run = build_sh(verb, "now", **without_set_up(tmp_path))
    assert run.returncode == 1
    assert f"error: {verb} takes no arguments, got now" in run.stderr


def test_demo_takes_one_prompt(tmp_path: Path) -> None:
    run = build_sh("demo", "What", "is", "this?", **without_set_up(tmp_path))
    assert run.returncode == 1
    assert "error: demo takes one prompt, in quotes, got 3 arguments: What is this?" in run.stderr


@pytest.mark.parametrize("verb", ["demo", "serve", "chat", "perf"])
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("HTTP_PORT", "abc", "from 1 to 65535"),
        ("GRPC_PORT", "0", "from 1 to 65535"),
        ("METRICS_PORT", "65536", "from 1 to 65535"),
        ("HTTP_PORT", "8000.0", "from 1 to 65535"),
        ("HTTP_PORT", "1" * 30, "from 1 to 65535"),
        ("READY_TIMEOUT", "soon", "from 1 to 86400"),
        ("EXIT_TIMEOUT", "-1", "from 0 to 86400"),
    ],
)
def test_a_variable_that_is_no_number_is_refused_before_anything_is_started(
    verb: str, name: str, value: str, allowed: str, tmp_path: Path
) -> None:
    run = build_sh(verb, **without_set_up(tmp_path), **{name: value})
    assert (run.returncode, run.stderr) == (
        1,
        f"error: {name} must be a whole number {allowed}, got '{value}'\n",
    )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that build.sh takes for an environment that is up to date, whose Python prints its arguments."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    source = 'set -- help; source "$0" >/dev/null; stamp'
    command = ["bash", "-c", source, str(ROOT / "build.sh")]
    stamp = subprocess.run(
        command, env={**os.environ, "VENV_DIR": str(folder)}, capture_output=True, check=True
    )
    (folder / ".build-base").write_bytes(stamp.stdout)
    return folder


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt2", "gpt2"),
        ("organisation/model-1.5", "organisation/model-1.5"),
        ("folder", "HERE/folder"),
        ("./folder", "HERE/./folder"),
        ("./foldr", "HERE/./foldr"),
        ("../elsewhere", "HERE/../elsewhere"),
        ("a/b/c", "HERE/a/b/c"),
        ("foldr/", "HERE/foldr/"),
        ("missing.gguf", "HERE/missing.gguf"),
        ("/missing", "/missing"),
        ("~/missing", "~/missing"),
    ],
)
def test_what_can_be_no_hub_id_is_a_path_seen_from_the_callers_folder(
    model: str, expected: str, environment: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    run = build_sh("serve", cwd=tmp_path, VENV_DIR=str(environment), CACHE_DIR="cache", MODEL=model)
    assert run.returncode == 0, run.stderr
    words = run.stdout.splitlines()
    assert words[words.index("--model") + 1] == expected.replace("HERE", str(tmp_path))


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
