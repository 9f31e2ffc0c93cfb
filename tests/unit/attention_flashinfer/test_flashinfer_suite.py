"""The common attention suite over the FlashInfer backend, with FlashInfer's documented behaviour in plain torch."""

from __future__ import annotations

import flashinfer_double
import pytest
from attention_suite import BACKENDS
from test_attention_backends import *  # noqa: F403

from paged_engine.attention.flashinfer import FlashInferAttention

BACKENDS["flashinfer"] = lambda setup: FlashInferAttention(setup, flashinfer_double)
pytestmark = pytest.mark.parametrize("backend", ["flashinfer"])
