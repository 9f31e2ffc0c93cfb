"""Fixtures for tests against a real Triton server. Without a server they fail: nothing is skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from served_checkpoint import write_tiny_checkpoint
from triton_server import TritonServer

from paged_engine.tools.default_model import default_model

CACHE_DIR = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")

# Small enough that chunking, paging and batching all happen; float32, so that results can be compared exactly.
PARAMETERS = {"dtype": "float32", "page_size": 16, "max_num_tokens": 256, "max_batch_size": 16}

FAULTS = {"PAGED_ENGINE_FAULTS": "1"}
"""Makes a server fail, or be slow, where a prompt asks for it (see serving/faults.py)."""

StartServer = Callable[..., TritonServer]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The default model, SmolLM2-135M-Instruct, as a checkpoint folder."""
    return default_model(CACHE_DIR / "models")


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is quick to load and run, with the default model's tokenizer: for all but the text."""
    folder = tmp_path_factory.mktemp("tiny_checkpoint")
    write_tiny_checkpoint(folder, tokenizer_of=checkpoint)
    return folder


@pytest.fixture(scope="session")
def session_servers() -> Iterator[list[TritonServer]]:
    """The servers that live as long as the session, as they are started; they are ended here."""
    servers: list[TritonServer] = []
    yield servers
    for running in servers:
        running.close()


@pytest.fixture(scope="session")
def start_session_server(
    tiny_checkpoint: Path, session_servers: list[TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> StartServer:
    """Like `start_server`, for a server that lives as long as the session and has faults on demand."""

    def start(parameters: Mapping[str, Any] | None = None) -> TritonServer:
        changed = {**PARAMETERS, **(parameters or {})}
        session_servers.append(
            TritonServer(tmp_path_factory.mktemp("server"), tiny_checkpoint, changed, environment=FAULTS)
        )
        return session_servers[-1].wait_ready()

    return start


@pytest.fixture(scope="session")
def server(
    checkpoint: Path, session_servers: list[TritonServer], tmp_path_factory: pytest.TempPathFactory
) -> TritonServer:
    """A server for the whole session, as in production but for float32: the default model, no faults on demand."""
    session_servers.append(TritonServer(tmp_path_factory.mktemp("server"), checkpoint, PARAMETERS))
    return session_servers[-1].wait_ready()


@pytest.fixture(scope="session")
def tiny_server(start_session_server: StartServer) -> TritonServer:
    """A server for the whole session with the tiny model in float32."""
    return start_session_server()


@pytest.fixture(scope="session")
def ahead_server(start_session_server: StartServer) -> TritonServer:
    """A server for the whole session with the tiny model, which looks ahead."""
    return start_session_server({"look_ahead": True})


@pytest.fixture(scope="session")
def queue_server(start_session_server: StartServer) -> TritonServer:
    """A server for the whole session with the tiny model, where two requests run and four wait."""
    return start_session_server({"max_batch_size": 2, "max_queue_size": 4})


@pytest.fixture(scope="session")
def cramped_server(start_session_server: StartServer) -> TritonServer:
    """A server for the whole session with the tiny model and a pool of 8 pages of 16 tokens."""
    return start_session_server({"num_pages": 8})


@pytest.fixture
def start_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """A function that starts a server for this test alone, with the tiny model unless told otherwise.

    ``start_server({"page_size": 32}, explicit=True)``: the parameters change those of the session's server; the
    keywords are TritonServer's, ``model`` among them, and ``ready=False`` to return before the server is ready.
    """
    servers: list[TritonServer] = []

    def start(
        parameters: Mapping[str, Any] | None = None,
        *,
        model: Path | str | None = None,
        ready: bool = True,
        **options: Any,
    ) -> TritonServer:
        changed = {**PARAMETERS, **(parameters or {})}
        started = TritonServer(
            tmp_path_factory.mktemp("server"), model or tiny_checkpoint, changed, **options
        )
        servers.append(started)
        return started.wait_ready() if ready else started

    yield start
    for running in servers:
        running.close()


@pytest.fixture(autouse=True)
def pool_stays_clean(session_servers: list[TritonServer]) -> Iterator[None]:
    """After every test the session's servers hold no page and have nothing running or waiting."""
    yield
    with ThreadPoolExecutor() as pool:
        list(pool.map(TritonServer.wait_pool_clean, session_servers))
