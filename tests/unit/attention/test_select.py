"""Which attention backend is taken, and what is said about it."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import replace

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
    return Picky(setup)


@pytest.fixture
def with_picky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_BACKENDS", {"picky": make_picky, "torch": select._BACKENDS["torch"]})
    monkeypatch.setattr(select, "_FASTEST", {"cpu": "picky"})


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_plain_torch_takes_what_nothing_faster_can(name: str) -> None:
    """Head size 20 in float64 on a CPU."""
    setup = Case(head_dim=20, dtype=torch.float64).setup
    assert select_backend(name, setup).name == "torch"


def test_gpu_kernels_asked_for_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_backend("flashinfer", SETUP).name == "torch"
    assert "flashinfer cannot be used; plain torch takes its place" in caplog.text
    assert "it needs an NVIDIA GPU, and the model is on cpu" in caplog.text


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_a_gpu_without_its_kernels_is_one_warning(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody who pays for a GPU should have to find out from the clock that it is served by plain torch."""

    def missing(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    setup = Case(dtype=torch.bfloat16).setup
    with caplog.at_level(logging.INFO):
        assert select_backend(name, replace(setup, device=torch.device("cuda:1"))).name == "torch"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "the attention backend flashinfer cannot be used; plain torch takes its place, many times slower: the "
            "package flashinfer-python is not installed (it comes with paged-engine[gpu])",
        )
    ]


def test_a_cpu_is_not_told_about_gpus(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        select_backend("auto", SETUP)
    assert "flashinfer" not in caplog.text


@pytest.mark.usefixtures("with_picky")
def test_auto_takes_the_devices_own_if_it_can() -> None:
    assert select_backend("auto", SETUP).name == "picky"
    assert select_backend("auto", Case(page_size=5).setup).name == "torch"


@pytest.mark.usefixtures("with_picky")
def test_named_backend_that_cannot_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert select_backend("picky", Case(page_size=5).setup).name == "torch"
    assert caplog.messages == [
        "the attention backend picky cannot be used; plain torch takes its place, several times slower: page_size is 5"
    ]


@pytest.mark.usefixtures("with_picky")
def test_named_backend_that_can_is_taken() -> None:
    assert select_backend("picky", SETUP).name == "picky"
    assert select_backend("torch", SETUP).name == "torch"


def test_backend_that_nobody_knows() -> None:
    with pytest.raises(
        ConfigurationError, match=r"attention_backend must be one of auto, .*torch, got abacus"
    ):
        select_backend("abacus", SETUP)
