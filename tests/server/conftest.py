"""Fixtures for tests against a real Triton server. Without a server they fail: nothing is skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from triton_server import TritonServer

from paged_engine.tools.default_model import default_model

CACHE_DIR = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")

# Small enough that chunking, paging and batching all happen; float32, so that results can be compared exactly.
PARAMETERS = {"dtype": "float32", "page_size": 16, "max_num_tokens": 256, "max_batch_size": 16}

FAULTS = {"PAGED_ENGINE_FAULTS": "1"}
"""Makes a server fail, or be slow, where a prompt asks for it (see serving/faults.py)."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

StartServer = Callable[..., TritonServer]


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The default model, SmolLM2-135M-Instruct, as a checkpoint folder."""
    return default_model(CACHE_DIR / "models")


@pytest.fixture(scope="session")
def tiny_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two small layers with random weights (always the same) and the default model's tokenizer.

    It loads and runs in no time and says nonsense: for tests of everything but the text.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("tiny_checkpoint")
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(checkpoint / name, folder / name)
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
