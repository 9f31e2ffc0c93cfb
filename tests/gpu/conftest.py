"""Marks everything here `gpu`, and skips it, with the reason, where there is no CUDA device or no FlashInfer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("unit/attention", "unit/sampling", "parity")]


def why_not() -> str | None:
    """What is missing here."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed (paged-engine[gpu])"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The last GPU: what works on it alone works on the first one, too, but not the other way round."""
    return torch.device("cuda", torch.cuda.device_count() - 1)
