"""Tiny models, each made, saved and loaded once: transformers' own as the reference, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import engine_runs
import pytest
import torch
from deferred_device import defer
from hand_built import load_tiny
from model_pair import Pair
from tiny_checkpoint import save_tiny_checkpoint
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """By the name of a tiny model: the reference and the paged model over the same weights."""
    pairs: dict[str, Pair] = {}

    def make(name: str) -> Pair:
        if name not in pairs:
            folder = save_tiny_model(name, tmp_path_factory.mktemp(name))
            reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
            pairs[name] = Pair(reference, load_tiny(folder))
        return pairs[name]

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer, for whole engines."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With tensors as small as a tiny model's, more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["one by one", "look-ahead"])
def any_order_of_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Engines made by engine_runs take in each step before the next, or look ahead on a device that is late; whether they do."""
    looks_ahead = request.param == "look-ahead"

    def load(config: EngineConfig) -> Engine:
        engine = load_engine(config.model_copy(update={"look_ahead": True}))
        defer(engine)
        return engine

    if looks_ahead:
        monkeypatch.setattr(engine_runs, "load_engine", load)
    return looks_ahead
