"""Building the library and choosing a variant."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_variants import library, make_kernels

from paged_engine.attention.cpu_native import load_cpu_attention
from paged_engine.attention.interface import AttentionSetup, AttentionSpec, BackendUnsupported
from paged_engine.kernels import build, load
from paged_engine.kernels.library import Library, LibraryUnavailable
from paged_engine.kernels.load import VARIANT_VARIABLE, load_kernels
from paged_engine.kernels.native import NativeKernels
from paged_engine.kernels.self_check import find_fault

SETUP = AttentionSetup(
    (AttentionSpec(2, 1, 16, 0.25),), 16, torch.device("cpu"), torch.float32, torch.float32
)


@pytest.fixture(autouse=True)
def forget_choice() -> Iterator[None]:
    load._choose.cache_clear()
    yield
    load._choose.cache_clear()


def test_the_best_variant_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIANT_VARIABLE, raising=False)
    assert load_kernels(1).variant == library().variants()[0]


def test_every_variant_passes_its_check(kernels: NativeKernels) -> None:
    assert find_fault(kernels) is None


def test_a_variable_forces_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIANT_VARIABLE, "generic")
    assert load_kernels(1).variant == "generic"
    monkeypatch.setenv(VARIANT_VARIABLE, "sse9")
    with pytest.raises(LibraryUnavailable, match=r"must be one of .*generic on this machine .*, got sse9"):
        load_kernels(1)


def test_a_wrong_variant_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best = library().variants()[0]
    monkeypatch.delenv(VARIANT_VARIABLE, raising=False)
    monkeypatch.setattr(
        load, "find_fault", lambda kernels: "attention" if kernels.variant == best != "generic" else None
    )
    with caplog.at_level(logging.WARNING):
        assert load_kernels(1).variant == [*library().variants(), "generic"][1]
    if best != "generic":
        assert caplog.messages == [
            f"the native kernels' variant {best} is wrong on this machine (attention); not used"
        ]


@pytest.mark.parametrize(
    "kernel", ["attention", "rotate_and_write", "rms_norm", "gate", "linear", "argmax", "log_sum_exp"]
)
def test_the_check_notices_a_kernel_that_does_nothing(kernel: str) -> None:
    kernels = make_kernels("generic")
    setattr(kernels, f"_{kernel}", lambda *_: None)
    assert find_fault(kernels) == kernel


def test_without_a_compiler_plain_torch_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    with pytest.raises(BackendUnsupported, match="no C\\+\\+ compiler: install g\\+\\+"):
        load_cpu_attention(SETUP)


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho it is monday\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="it is monday"):
        build.build(tmp_path / "out" / "lib.so")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_variant_that_the_compiler_cannot_make_is_left_out(tmp_path: Path) -> None:
    target = tmp_path / "lib.so"
    build.build(target, {"avx2": ("-msuch-a-thing-does-not-exist",), "generic": ()})
    assert Library(target).variants() == ["generic"]


def test_the_library_changes_its_name_with_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    name = build.library_name()
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-g")
    assert build.library_name() != name


def test_something_else_is_not_taken_for_the_library(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"not a library")
    with pytest.raises(LibraryUnavailable, match="cannot open"):
        Library(path)


@pytest.mark.parametrize("change", [{"device": torch.device("cuda")}, {"dtype": torch.float64}], ids=str)
def test_what_the_backend_does_not_take(change: dict[str, object]) -> None:
    setup = AttentionSetup(**{**vars(SETUP), **change})  # type: ignore[arg-type]
    with pytest.raises(BackendUnsupported):
        load_cpu_attention(setup)
