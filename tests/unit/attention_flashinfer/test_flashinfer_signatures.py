"""The calls that the backend makes, and the double that it is tested with, against the real package's signatures."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flashinfer_double
import pytest
import torch
from attention_suite import Case, PagedRun
from hand_built import load_tiny
from tiny_models import save_tiny_model

from paged_engine.attention.flashinfer import FlashInferAttention
from paged_engine.execution.flashinfer_draw import load_flashinfer_draw
from paged_engine.models.fuse import fuse_modules

VERSIONS = ("0.6.0", "0.6.18.post1", "0.7.0", "0.7.4")
"""The oldest and the newest of each line that is supported."""
_NORM = ("flashinfer/norm/__init__.py", "flashinfer/norm.py")
SOURCES = {
    "append_paged_kv_cache": ("flashinfer/page.py",),
    "BatchPrefillWithPagedKVCacheWrapper": ("flashinfer/prefill.py",),
    "BatchDecodeWithPagedKVCacheWrapper": ("flashinfer/decode.py",),
    "rmsnorm": _NORM,
    "gemma_rmsnorm": _NORM,
    "fused_add_rmsnorm": _NORM,
    "gemma_fused_add_rmsnorm": _NORM,
    "silu_and_mul": ("flashinfer/activation.py",),
    "gelu_tanh_and_mul": ("flashinfer/activation.py",),
    "gelu_and_mul": ("flashinfer/activation.py",),
    "apply_rope_with_cos_sin_cache_inplace": ("flashinfer/rope.py",),
    "top_p_sampling_from_probs": ("flashinfer/sampling.py",),
    "top_k_top_p_sampling_from_probs": ("flashinfer/sampling.py",),
}
"""Where a function or class is, in the newest or in older releases."""
PLAN_BEHIND_PLAN = "_plan_impl"
"""Where decode's `plan` of 0.7 takes what it accepts as **kwargs."""

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
Signatures = dict[str, inspect.Signature]


class Recording:
    """Passes everything on and keeps the calls, by "function" or "class.method"; methods with their own `self`."""

    def __init__(self, target: Any, calls: list[Call], name: str = "") -> None:
        self._target, self._calls, self._name = target, calls, name

    def __getattr__(self, name: str) -> Callable[..., Any]:
        member = getattr(self._target, name)
        full_name = f"{self._name}.{name}" if self._name else name

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(member, type):
                self._calls.append((f"{full_name}.__init__", (None, *args), kwargs))
                return Recording(member(*args, **kwargs), self._calls, full_name)
            self._calls.append((full_name, (None, *args) if self._name else args, kwargs))
            return member(*args, **kwargs)

        return call


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Every kind of call: mixed and decode steps, eager and captured, with and without sinks; fused operations; sampling."""
    made: list[Call] = []
    assert load_flashinfer_draw(Recording(flashinfer_double, made), 50, torch.device("cpu")) is not None
    for name, overrides in (
        ("llama", {"hidden_act": "silu"}),
        ("llama", {"hidden_act": "gelu"}),
        ("gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    ):
        folder = save_tiny_model(name, tmp_path_factory.mktemp(name), overrides=overrides)
        fuse_modules(load_tiny(folder), Recording(flashinfer_double, made))
    for has_sinks in (False, True):
        case = Case(head_dim=64, sliding_window=4, soft_cap=2.0, has_sinks=has_sinks, ranges=((5, 1), (3, 1)))
        run = PagedRun(lambda setup: FlashInferAttention(setup, Recording(flashinfer_double, made)), case)
        run.step([(0, 0, 5), (1, 0, 3)])
        run.step([(0, 5, 6), (1, 3, 4)])
        run.backend.allocate_for_capture(2, 10)  # type: ignore[attr-defined]
        run.backend.plan_captured(run.batch([(0, 5, 6), (1, 3, 4)]))  # type: ignore[attr-defined]
    assert {name for name, _, _ in made} == {
        *(name for name in SOURCES if not name.startswith("Batch")),
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer",
    }
    return made


def check(calls: list[Call], signatures: Signatures) -> None:
    """Each call must bind, and the double must declare nothing that the real one does not have, with other defaults."""
    for name, args, kwargs in calls:
        signature = signatures[name]
        assert not any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
        ), name
        signature.bind(*args, **kwargs)
    for name in {name for name, _, _ in calls}:
        real = signatures[name].parameters
        declared = inspect.signature(_member(flashinfer_double, name)).parameters
        positional = [key for key, value in declared.items() if value.kind is not value.KEYWORD_ONLY]
        assert list(real)[: len(positional)] == positional, name
        for key, parameter in declared.items():
            assert parameter.default == real[key].default, (name, key)


def _member(module: Any, name: str) -> Callable[..., Any]:
    for part in name.split("."):
        module = getattr(module, part)
    member: Callable[..., Any] = module
    return member


def test_against_the_installed_package(calls: list[Call]) -> None:
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed here")
    signatures: Signatures = {}
    for name, _, _ in calls:
        owner, _, method = name.partition(".")
        member = _member(flashinfer, name)
        if method == "plan" and hasattr(getattr(flashinfer, owner), PLAN_BEHIND_PLAN):
            member = getattr(getattr(flashinfer, owner), PLAN_BEHIND_PLAN)
        signatures[name] = inspect.signature(inspect.unwrap(member))
    check(calls, signatures)


def test_the_kernels_to_compile_ahead(tmp_path: Path) -> None:
    """In a process of its own, in which FlashInfer never gets to load any of them."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed here")
    command = [sys.executable, "-m", "paged_engine.attention.flashinfer_kernels", "--list"]
    command += ["--dtypes", "bfloat16", "--head-dims", "64", "128"]
    paths = os.pathsep.join(path for path in sys.path if path)
    machine = {
        "PYTHONPATH": paths,
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    result = subprocess.run(command, env={**os.environ, **machine}, capture_output=True, text=True)
    names = result.stdout.split()
    assert len(names) == len(set(names)) == 7 + 2 * (2 + 4), result.stderr
    for beginning, number in {
        "page": 1,
        "norm": 1,
        "rope": 1,
        "sampling": 1,
        "silu_and_mul": 1,
        "gelu_tanh_and_mul": 1,
        "gelu_and_mul": 1,
        "batch_decode": 4,
        "batch_prefill": 8,
    }.items():
        assert sum(name.startswith(beginning) for name in names) == number


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_against_the_source_of_a_release(calls: list[Call], version: str, tmp_path: Path) -> None:
    """Nothing is imported, so that it takes neither a GPU nor the package's gigabytes of dependencies."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(tmp_path),
    ]
    subprocess.run([*pip, f"flashinfer-python=={version}"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    signatures: Signatures = {}
    with zipfile.ZipFile(wheel) as archive:
        for name, files in SOURCES.items():
            file = next(file for file in files if file in archive.namelist())
            signatures.update(signatures_in(archive.read(file).decode(), name))
    check(calls, signatures)


def signatures_in(source: str, name: str) -> Signatures:
    """The signature of the function `name`, or of the methods of the class `name`; the last of overloads."""
    found: Signatures = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found[name] = signature_of(node)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            if PLAN_BEHIND_PLAN in methods:
                methods["plan"] = methods[PLAN_BEHIND_PLAN]
            found.update({f"{name}.{method}": signature_of(item) for method, item in methods.items()})
    assert found, name
    return found


def signature_of(function: ast.FunctionDef) -> inspect.Signature:
    return inspect.Signature(list(parameters_of(function.args)))


def parameters_of(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    def parameter(node: ast.arg, kind: Any, default: ast.expr | None = None) -> inspect.Parameter:
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        return inspect.Parameter(node.arg, kind, default=value)

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for node, default in zip(positional, defaults, strict=True):
        yield parameter(node, inspect.Parameter.POSITIONAL_OR_KEYWORD, default)
    if arguments.vararg:
        yield parameter(arguments.vararg, inspect.Parameter.VAR_POSITIONAL)
    for node, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield parameter(node, inspect.Parameter.KEYWORD_ONLY, default)
    if arguments.kwarg:
        yield parameter(arguments.kwarg, inspect.Parameter.VAR_KEYWORD)
