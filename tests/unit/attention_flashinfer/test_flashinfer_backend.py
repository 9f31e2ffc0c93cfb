"""What the FlashInfer backend asks of FlashInfer, what it refuses, and what it finds out before it is used."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flashinfer_double
import pytest
import torch
from attention_suite import MIXED, Case, PagedRun, history_then_step

from paged_engine.attention.flashinfer import FlashInferAttention, load_flashinfer, why_unsupported
from paged_engine.attention.flashinfer_wrappers import (
    captured_partial_result_bytes,
    make_captured_workspace,
    partial_result_bytes,
)
from paged_engine.attention.interface import AttentionSetup, AttentionSpec, BackendUnsupported
from paged_engine.attention.trial import try_out
from paged_engine.errors import ConfigurationError

CUDA = torch.device("cuda", 0)
SPEC = AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=128, scale=0.1)
SETUP = AttentionSetup((SPEC,), page_size=16, device=CUDA, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
H200 = 132
"""Its multiprocessors."""


class Counting:
    """FlashInfer, with the calls to its wrappers counted and their arguments kept."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.planned: list[dict[str, Any]] = []
        self.append_paged_kv_cache = flashinfer_double.append_paged_kv_cache
        self.BatchPrefillWithPagedKVCacheWrapper = self._counted(
            flashinfer_double.BatchPrefillWithPagedKVCacheWrapper
        )
        self.BatchDecodeWithPagedKVCacheWrapper = self._counted(
            flashinfer_double.BatchDecodeWithPagedKVCacheWrapper
        )

    def _counted(self, wrapper: type[Any]) -> type[Any]:
        made, planned = self.made, self.planned

        class Wrapper(wrapper):  # type: ignore[misc,valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                made.append({"name": wrapper.__name__, **kwargs})

            def plan(self, *args: Any, **kwargs: Any) -> None:
                super().plan(*args, **kwargs)
                planned.append({"name": wrapper.__name__, **kwargs})

        return Wrapper


def on_double(setup: AttentionSetup) -> FlashInferAttention:
    return FlashInferAttention(setup, flashinfer_double)


# ---- What is asked of it ----


def test_layers_that_attend_alike_are_planned_once() -> None:
    spec = Case(head_dim=64, sliding_window=8).spec
    specs = (spec, replace(spec, sliding_window=None), spec, replace(spec, sliding_window=None), spec)
    library = Counting()
    backend = FlashInferAttention(replace(Case(head_dim=64).setup, specs=specs), library)
    run = PagedRun(on_double, Case(head_dim=64, ranges=((3, 1), (0, 5))))
    backend.plan(run.batch([(0, 0, 3), (1, 0, 5)]))
    backend.plan(run.batch([(0, 3, 4)]))
    assert [call["name"] for call in library.planned] == [
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
    ]
    assert [call["window_left"] for call in library.planned] == [7, -1, 7, -1]


@pytest.mark.parametrize("group_size", range(1, 9))
def test_small_groups_decode_without_tensor_cores(group_size: int) -> None:
    library = Counting()
    case = Case(head_dim=64, group_size=group_size, ranges=((9, 1), (3, 1)))
    history_then_step(case, PagedRun(lambda setup: FlashInferAttention(setup, library), case))
    decode = [made for made in library.made if made["name"].startswith("BatchDecode")]
    assert {made["use_tensor_cores"] for made in decode} == {group_size > 3}


def test_windows_decode_on_tensor_cores() -> None:
    """Whose kernel begins at the window; the other one reads a long context in vain."""
    library = Counting()
    case = Case(head_dim=64, sliding_window=4, ranges=((9, 1), (3, 1)))
    history_then_step(case, PagedRun(lambda setup: FlashInferAttention(setup, library), case))
    decode = [made["use_tensor_cores"] for made in library.made if made["name"].startswith("BatchDecode")]
    assert decode == [True, False], "the second layer has no window"


def test_pages_have_a_head_size_that_the_kernels_have() -> None:
    shapes = {}
    for head_dim in (16, 64, 80, 128, 192, 256):
        shapes[head_dim] = on_double(Case(num_kv_heads=2, head_dim=head_dim, page_size=5).setup).page_shape(0)
    assert shapes == {
        16: (2, 5, 2, 64),
        64: (2, 5, 2, 64),
        80: (2, 5, 2, 128),
        128: (2, 5, 2, 128),
        192: (2, 5, 2, 256),
        256: (2, 5, 2, 256),
    }


def test_a_float8_cache_cuts_off_what_it_cannot_hold() -> None:
    setup = replace(Case(head_dim=64, ranges=((0, 2),)).setup, cache_dtype=torch.float8_e4m3fn)
    backend = on_double(setup)
    run = PagedRun(on_double, Case(head_dim=64, ranges=((0, 2),)))
    cache = torch.zeros(8, *backend.page_shape(0)).to(torch.float8_e4m3fn)
    backend.bind(0, cache)
    batch = run.batch([(0, 0, 2)])
    backend.plan(batch)
    query, key, value = (part.clone() for part in run.dense[0][0])
    key[0, 0, 0], value[1, 1, 1] = 1e6, -1e6
    backend.attend(0, query, key, value)
    (page,) = run.sequences[0].page_table
    assert cache[page, 0, 0, 0, 0].float() == 448
    assert cache[page, 1, 1, 1, 1].float() == -448
    torch.testing.assert_close(cache[page, 0, :, 1].float(), key[1], atol=0.05, rtol=0.07)


@pytest.mark.parametrize("ranges", [MIXED, ((17, 1), (40, 1), (3, 1))], ids=["mixed", "decode"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_float8_cache(page_size: int, ranges: tuple[tuple[int, int], ...]) -> None:
    """Its pages have the heads outside; the rounding is the oracle's, too."""
    case = Case(
        group_size=3, head_dim=64, page_size=page_size, cache_dtype=torch.float8_e4m3fn, ranges=ranges
    )
    assert on_double(case.setup).page_shape(0) == (2, 2, page_size, 64)
    history_then_step(case, PagedRun(on_double, case))


def test_heads_in_any_order_of_memory() -> None:
    """Models hand their heads over transposed, and sometimes with the values of a head apart."""
    case = Case(head_dim=64, ranges=((0, 6),))
    run = PagedRun(on_double, case)
    expected = run.step([(0, 0, 6)])[0][0]
    query, key, value = run.dense[0][0]
    run.backend.plan(run.batch([(0, 0, 6)]))
    apart = [heads.permute(2, 0, 1).contiguous().permute(1, 2, 0) for heads in (query, key, value)]
    swapped = [heads.transpose(0, 1).contiguous().transpose(0, 1) for heads in (query, key, value)]
    assert all(heads.stride(-1) != 1 for heads in apart)
    for heads in (apart, swapped):
        assert torch.equal(run.backend.attend(0, *heads), expected)


MANY_HEADS = replace(SPEC, num_query_heads=64, num_kv_heads=1, head_dim=64)


@pytest.mark.parametrize(
    ("spec", "num_tiles"),
    [
        (SPEC, 33),  # 2 · 132 multiprocessors / 8 key-value heads
        (replace(SPEC, num_query_heads=16, num_kv_heads=2), 132),
        (MANY_HEADS, 264),
    ],
)
def test_the_workspace_holds_what_the_scheduler_wants(spec: AttentionSpec, num_tiles: int) -> None:
    """num_qo_heads · padded_batch_size · cta_tile_q · (head_dim + 1) · 4 bytes of 0.6's PrefillPlan."""
    row_bytes = spec.num_query_heads * (spec.head_dim + 1) * 4
    assert partial_result_bytes(spec, H200) == num_tiles * 128 * row_bytes


@pytest.mark.parametrize(
    ("spec", "batch_size", "num_tiles", "tile"),
    [
        (SPEC, 512, 512 * 4 // 16 + 511, 16),
        (SPEC, 4, 33, 16),  # no fewer than it may split
        (replace(SPEC, num_query_heads=40), 512, 512 * 5 // 16 + 511, 16),
        (MANY_HEADS, 512, 512 + 511, 64),
        (replace(MANY_HEADS, num_query_heads=71), 100, 264, 128),
    ],
)
def test_the_workspace_of_captured_steps(
    spec: AttentionSpec, batch_size: int, num_tiles: int, tile: int
) -> None:
    row_bytes = spec.num_query_heads * (spec.head_dim + 1) * 4
    assert captured_partial_result_bytes(spec, H200, batch_size) == num_tiles * tile * row_bytes


def test_captured_steps_share_the_workspace_where_it_suffices() -> None:
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    spec = replace(SPEC, num_query_heads=4, num_kv_heads=2, head_dim=64)
    assert make_captured_workspace([spec], 4, workspace) is workspace
    larger = make_captured_workspace([spec], 512, workspace)
    assert larger.numel() > workspace.numel() and not larger.any()


# ---- What is refused ----


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that this version of FlashInfer is installed on a machine with such a GPU."""

    def pretend(version: str | None = "0.7.4", capability: tuple[int, int] = (9, 0)) -> None:
        def version_of(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


@pytest.mark.parametrize("version", ["0.6.0", "0.6.18.post1", "0.7.0", "0.7.4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_it_takes(installed: Callable[..., None], version: str, dtype: torch.dtype) -> None:
    installed(version)
    for cache_dtype in (dtype, torch.float8_e4m3fn):
        for page_size in (1, 7, 1024):
            assert (
                why_unsupported(replace(SETUP, dtype=dtype, cache_dtype=cache_dtype, page_size=page_size))
                is None
            )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("cpu")}, "needs an NVIDIA GPU, and the model is on cpu"),
        ({"dtype": torch.float32, "cache_dtype": torch.float32}, "the model is in float32"),
        (
            {"cache_dtype": torch.float16},
            "the KV cache must be bfloat16 like the model or float8_e4m3fn, not float16",
        ),
        (
            {"cache_dtype": torch.int8},
            "the KV cache must be bfloat16 like the model or float8_e4m3fn, not int8 (parameter kv_cache_dtype)",
        ),
        ({"specs": (SPEC, replace(SPEC, head_dim=320))}, "at most 256, and the model has 320"),
        ({"specs": (replace(SPEC, num_kv_heads=48, num_query_heads=48, head_dim=256),)}, "at most 8192"),
    ],
)
def test_setups_that_it_refuses(installed: Callable[..., None], changes: dict[str, Any], reason: str) -> None:
    installed()
    assert reason in (why_unsupported(replace(SETUP, **changes)) or "")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"version": None}, "flashinfer-python is not installed"),
        ({"version": "0.5.3"}, "must be 0.6 or 0.7, and 0.5.3 is installed"),
        ({"version": "0.8.0"}, "must be 0.6 or 0.7, and 0.8.0 is installed"),
        ({"capability": (7, 5)}, "compute capability 8.0 or higher, and this one has 7.5"),
    ],
)
def test_machines_that_it_refuses(
    installed: Callable[..., None], machine: dict[str, Any], reason: str
) -> None:
    installed(**machine)
    assert reason in (why_unsupported(SETUP) or "")


def test_loading_it_without_a_gpu_says_why() -> None:
    with pytest.raises(BackendUnsupported, match="needs an NVIDIA GPU"):
        load_flashinfer(replace(SETUP, device=torch.device("cpu")))


def test_whatever_fails_at_load_means_that_it_cannot_be_used(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one, the kernels are compiled at their first run, on a machine that may have no compiler."""

    def no_compiler(*_: Any) -> None:
        raise RuntimeError("nvcc: not found")

    installed()
    monkeypatch.setattr(torch.cuda, "device", no_compiler)
    with pytest.raises(BackendUnsupported, match="does not run here: RuntimeError: nvcc: not found"):
        load_flashinfer(SETUP)


def test_no_memory_is_no_reason_to_be_slow(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit beside the weights ends the load; plain torch would come to the same end later."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 128.00 MiB")

    installed()
    monkeypatch.setattr(torch.cuda, "device", full)
    with pytest.raises(ConfigurationError, match=r"no room on cuda:0 .*tried to allocate"):
        load_flashinfer(SETUP)


# ---- The trial before it is used ----

TRIED = Case(head_dim=64, group_size=3, page_size=5, sliding_window=6, soft_cap=2.0, has_sinks=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_passes(dtype: torch.dtype) -> None:
    setup = replace(TRIED, dtype=dtype).setup
    try_out(on_double(setup), setup)


def broken(name: str, change: Callable[..., Any]) -> types.SimpleNamespace:
    """FlashInfer with the method `name` of both wrappers changed."""
    library = types.SimpleNamespace(append_paged_kv_cache=flashinfer_double.append_paged_kv_cache)
    for wrapper in (
        flashinfer_double.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer_double.BatchDecodeWithPagedKVCacheWrapper,
    ):
        original = getattr(wrapper, name)
        method = lambda self, *args, original=original, **kwargs: change(original, self, *args, **kwargs)  # noqa: E731
        setattr(library, wrapper.__name__, type(wrapper.__name__, (wrapper,), {name: method}))
    return library


def no_window(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "window_left": -1})


def natural_logarithm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output, log2_sum = original(*args, **kwargs)
    return output, log2_sum * 0.693


def nan(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output, log2_sum = original(*args, **kwargs)
    return output.fill_(torch.nan), log2_sum


@pytest.mark.parametrize(("name", "change"), [("plan", no_window), ("run", natural_logarithm), ("run", nan)])
def test_the_trial_finds_wrong_kernels(name: str, change: Callable[..., Any]) -> None:
    setup = TRIED.setup
    with pytest.raises(BackendUnsupported, match="differ from plain torch's"):
        try_out(FlashInferAttention(setup, broken(name, change)), setup)
