"""Tiny models, each made, saved and loaded once: transformers' own as the reference, and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hand_built import load_tiny
from model_pair import Pair
from tiny_checkpoint import save_tiny_checkpoint
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM


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
