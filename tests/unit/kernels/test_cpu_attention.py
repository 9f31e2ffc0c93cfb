"""The common attention suite over the native backend."""

from __future__ import annotations

import pytest
import torch
from attention_suite import BACKENDS, Case, PagedRun
from test_attention_backends import *  # noqa: F403
from test_int8_pages import *  # noqa: F403

from paged_engine.attention.cpu_native import load_cpu_attention
from paged_engine.attention.interface import BackendUnsupported

BACKENDS["cpu"] = load_cpu_attention
pytestmark = pytest.mark.parametrize("backend", ["cpu"])


def test_cache_in_float8(backend: str) -> None:  # type: ignore[no-redef]
    """The one case of the suite that this backend does not take, and says so."""
    with pytest.raises(
        BackendUnsupported, match=r"must be float32, bfloat16, float16 or int8, got torch\.float8"
    ):
        PagedRun(BACKENDS[backend], Case(cache_dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("sizes", [{"page_size": 5}, {"head_dim": 20}], ids=str)
def test_int8_pages_of_odd_sizes(backend: str, sizes: dict[str, int]) -> None:
    """Are left to plain torch, with a reason that names the sizes."""
    with pytest.raises(BackendUnsupported, match="multiples of 16"):
        PagedRun(BACKENDS[backend], Case(cache_dtype=torch.int8, **sizes))
