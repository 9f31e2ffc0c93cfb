"""The common attention suite over the native backend."""

from __future__ import annotations

import pytest
from attention_suite import BACKENDS
from test_attention_backends import *  # noqa: F403

from paged_engine.attention.cpu_native import load_cpu_attention

BACKENDS["cpu"] = load_cpu_attention
pytestmark = pytest.mark.parametrize("backend", ["cpu"])
