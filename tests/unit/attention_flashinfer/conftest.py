"""Lets the tests of this folder use the common attention suite and the tiny models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged_engine.attention import flashinfer_wrappers

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "unit/attention"), str(TESTS / "parity")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread and a small workspace: the tensors here are tiny, and zeroing 128 MiB for each test is not."""
    monkeypatch.setattr(flashinfer_wrappers, "_MIN_WORKSPACE_BYTES", 1 << 20)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
