"""Which attention backend is taken, and what is said about it."""

from __future__ import annotations

import logging

import pytest
import torch
from attention_suite import Case

from paged_engine.attention import select
from paged_engine.attention.interface import AttentionBackend, AttentionSetup, BackendUnsupported
from paged_engine.attention.select import select_backend
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.errors import ConfigurationError

SETUP = Case().setup


class Picky(TorchAttention):
    name = "picky"


def make_picky(setup: AttentionSetup) -> AttentionBackend:
    if setup.page_size != 16:
        raise BackendUnsupported(f"page_size is {setup.page_size}")
    return Picky(setup.specs, setup.page_size)


@pytest.fixture
def with_picky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_BACKENDS", {"picky": make_picky, "torch": select._BACKENDS["torch"]})


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_plain_torch_takes_what_nothing_faster_can(name: str) -> None:
    """Head size 20 in float64 on a CPU."""
    setup = Case(head_dim=20, dtype=torch.float64).setup
    assert select_backend(name, setup).name == "torch"


def test_gpu_kernels_asked_for_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_backend("flashinfer", SETUP).name == "torch"
    assert "flashinfer cannot be used: it needs an NVIDIA GPU" in caplog.text


@pytest.mark.usefixtures("with_picky")
def test_auto_takes_the_first_that_can() -> None:
    assert select_backend("auto", SETUP).name == "picky"
    assert select_backend("auto", Case(page_size=5).setup).name == "torch"


@pytest.mark.usefixtures("with_picky")
def test_named_backend_that_cannot_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_backend("picky", Case(page_size=5).setup).name == "torch"
    assert caplog.messages == ["the attention backend picky cannot be used: page_size is 5"]


@pytest.mark.usefixtures("with_picky")
def test_named_backend_that_can_is_taken() -> None:
    assert select_backend("picky", SETUP).name == "picky"
    assert select_backend("torch", SETUP).name == "torch"


def test_backend_that_nobody_knows() -> None:
    with pytest.raises(
        ConfigurationError, match=r"attention_backend must be one of auto, .*torch, got abacus"
    ):
        select_backend("abacus", SETUP)
