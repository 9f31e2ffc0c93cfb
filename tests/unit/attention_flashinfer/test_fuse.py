"""Fused operations in a model's modules, with FlashInfer's documented behaviour in plain torch."""

from __future__ import annotations

import contextlib
import logging
import types
from pathlib import Path
from typing import Any

import flashinfer_double
import pytest
import torch
from hand_built import HandBuilt, load_tiny
from tiny_models import save_tiny_model

from paged_engine import loading
from paged_engine.attention.flashinfer import FlashInferAttention
from paged_engine.attention.interface import AttentionSetup
from paged_engine.config import EngineConfig
from paged_engine.models.fuse import fuse_modules
from paged_engine.models.fuse_trial import row_errors
from paged_engine.models.fused_ops import FusedNorm, RotaryAngles
from paged_engine.models.load import LoadedModel

KINDS = ("norms", "gated MLPs", "attention modules", "residual sums")


OVERRIDES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "granite": {"residual_multiplier": 0.4},
}


def model_of(name: str, folder: Path) -> LoadedModel:
    overrides = OVERRIDES.get(name, {})
    return load_tiny(save_tiny_model(name, folder, overrides=overrides))


def library(**replaced: Any) -> Any:
    """The double, some of its functions replaced."""
    return types.SimpleNamespace(**{**vars(flashinfer_double), **replaced})


def steps(model: LoadedModel) -> list[torch.Tensor]:
    """Logits of two prompts in chunks, and of tokens that follow them."""
    built = HandBuilt(model, page_size=4, backend_name="torch")
    first, second = built.sequence(list(range(3, 26))), built.sequence(list(range(40, 60)))
    logits = [
        built.step((first, 10)),
        built.step((first, 12), (second, 9)),
        built.step((first, 1), (second, 10)),
    ]
    return [*logits, built.step((second, 1))]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llama", (5, 2, 2, 2)),
        ("llama-rope-yarn", (5, 2, 2, 2)),
        ("mistral", (5, 2, 2, 2)),
        ("mixtral", (5, 0, 2, 2)),  # its MLPs are experts
        ("qwen2", (5, 2, 2, 2)),
        ("qwen3", (9, 2, 2, 2)),  # norms of heads
        ("qwen3_moe", (9, 0, 2, 2)),
        ("gemma", (5, 2, 2, 2)),  # norms that add one
        ("gemma2", (9, 2, 2, 0)),  # norms before and after
        ("gemma3_text", (13, 2, 2, 0)),
        ("gpt_oss", (5, 0, 2, 2)),
        ("phi3", (5, 2, 2, 2)),  # merged projections, half of a head rotated
        ("olmo2", (9, 2, 0, 0)),  # norms of all heads at once, norms behind
        ("granite", (5, 2, 2, 0)),  # residual sums with a factor
        ("cohere2", (0, 2, 1, 0)),  # no RMSNorm; pairs beside each other, one layer without positions
        ("glm", (5, 2, 2, 2)),
        ("smollm3", (5, 2, 2, 2)),
        ("gpt2", (0, 0, 0, 0)),
        ("gpt_neox", (0, 0, 0, 0)),
        ("deepseek_v3", (9, 2, 0, 2)),  # latent attention
    ],
)
def test_a_fused_model_computes_the_same(
    name: str, counts: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(name, tmp_path)
    before = steps(model)
    with caplog.at_level(logging.INFO):
        fused = fuse_modules(model, flashinfer_double)
    assert tuple(fused.get(kind, 0) for kind in KINDS) == counts, caplog.text
    assert [record.name for record in caplog.records].count("paged_engine.models.fuse") == 1
    for got, expected in zip(steps(model), before, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_in_the_models_own_dtype(tmp_path: Path) -> None:
    """bfloat16: the tolerance lets rounding pass."""
    model = model_of("llama", tmp_path)
    model = LoadedModel(**{**vars(model), "module": model.module.bfloat16(), "dtype": torch.bfloat16})
    assert tuple(fuse_modules(model, flashinfer_double).values()) == (5, 2, 2, 2)
    assert all(logits.isfinite().all() for logits in steps(model))


def test_norms_with_large_weights_are_read_rightly(tmp_path: Path) -> None:
    """As Gemma has them: beside weights in the hundreds, w and 1 + w are the same to within bfloat16's rounding."""
    model = model_of("gemma", tmp_path)
    model = LoadedModel(**{**vars(model), "module": model.module.bfloat16(), "dtype": torch.bfloat16})
    norm = model.module.model.norm
    norm.weight.copy_(torch.linspace(-0.5, 0.5, len(norm.weight)))
    norm.weight[::2] = 300.0
    rows = torch.randn(5, len(norm.weight)).bfloat16()
    expected = norm(rows)
    assert fuse_modules(model, flashinfer_double)["norms"] == 5
    assert isinstance(norm.forward, FusedNorm)
    torch.testing.assert_close(norm(rows), expected, atol=0, rtol=0.03)


def test_weights_are_held_once(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    state = {name: value.clone() for name, value in model.module.state_dict().items()}
    fuse_modules(model, flashinfer_double)
    attention, mlp = model.module.model.layers[0].self_attn, model.module.model.layers[0].mlp
    for layers in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        assert len({layer.weight.untyped_storage().data_ptr() for layer in layers}) == 1
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, state[name])


def test_rows_that_are_too_large_for_the_original_prove_nothing() -> None:
    expected = torch.tensor([[1.0, 1.0], [1.0, torch.inf], [2.0, 0.0]])
    got = torch.tensor([[1.0, 1.5], [torch.nan, 0.0], [torch.nan, 0.0]])
    errors = row_errors(got, expected)
    assert errors[:2].tolist() == pytest.approx([0.5 / 2**0.5, 0.0])
    assert errors[2].isnan()


def double_epsilon(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return flashinfer_double.rmsnorm(input, weight, 2 * eps)


def swapped_halves(input: torch.Tensor) -> torch.Tensor:
    return flashinfer_double.silu_and_mul(torch.cat(input.chunk(2, dim=-1)[::-1], dim=-1))


def not_rotated(*_: Any, **__: Any) -> None:
    pass


def forgetful_sum(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    input.copy_(flashinfer_double.rmsnorm(residual + input, weight, eps))


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("nvcc: not found")


@pytest.mark.parametrize(
    ("function", "replacement", "counts", "reason"),
    [
        ("rmsnorm", double_epsilon, (0, 2, 2, 0), "LlamaRMSNorm differed by"),
        ("rmsnorm", failing, (0, 2, 2, 0), "norms failed: RuntimeError: nvcc: not found"),
        ("silu_and_mul", swapped_halves, (5, 0, 2, 2), "LlamaMLP differed by"),
        ("silu_and_mul", failing, (5, 0, 2, 2), "gated MLPs failed"),
        ("apply_rope_with_cos_sin_cache_inplace", not_rotated, (5, 2, 0, 2), "LlamaAttention differed by"),
        ("fused_add_rmsnorm", forgetful_sum, (5, 2, 2, 0), "LlamaDecoderLayer differed by"),
    ],
)
def test_what_computes_something_else_is_not_used(
    function: str,
    replacement: Any,
    counts: tuple[int, ...],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of("llama", tmp_path)
    before = steps(model)
    with caplog.at_level(logging.INFO):
        fused = fuse_modules(model, library(**{function: replacement}))
    assert tuple(fused.get(kind, 0) for kind in KINDS) == counts
    assert reason in caplog.text
    for got, expected in zip(steps(model), before, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


def test_an_operation_that_fails_is_tried_once(tmp_path: Path) -> None:
    """It may compile for a minute before it fails."""
    calls = []

    def compile_and_fail(*_: Any, **__: Any) -> None:
        calls.append(1)
        raise RuntimeError("nvcc: not found")

    fuse_modules(model_of("llama", tmp_path), library(rmsnorm=compile_and_fail))
    assert len(calls) == 1


def test_nothing_at_all_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("rmsnorm", "silu_and_mul", "apply_rope_with_cos_sin_cache_inplace")
    fuse_modules(model_of("llama", tmp_path), library(**dict.fromkeys(names, failing)))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "fused operations compute nothing" in record.getMessage()


def test_a_model_that_keeps_its_layers_inputs_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused layer works in place: only the model as a whole shows that somebody minds."""
    model = model_of("llama", tmp_path)
    decoder = model.module.model
    kept: list[torch.Tensor] = []
    decoder.layers[0].register_forward_pre_hook(lambda _, arguments: kept.append(arguments[0]))
    decoder.norm.register_forward_hook(lambda _, __, output: output + kept.pop())
    before = steps(model)
    assert fuse_modules(model, flashinfer_double) == {}
    assert "the model as a whole differed" in caplog.text
    for got, expected in zip(steps(model), before, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("name", "prefix"), [("llama", ""), ("gemma", "gemma_"), ("mixtral", "")])
def test_layers_are_joined(name: str, prefix: str, tmp_path: Path) -> None:
    """Every sum is in one kernel with the norm behind it, the last layer's too: only the first norm has none before it."""
    called: list[str] = []

    def recording(function: str) -> Any:
        def call(*arguments: Any) -> Any:
            called.append(function)
            return getattr(flashinfer_double, function)(*arguments)

        return call

    names = ("rmsnorm", "fused_add_rmsnorm", "gemma_rmsnorm", "gemma_fused_add_rmsnorm")
    model = model_of(name, tmp_path)
    fuse_modules(model, library(**{function: recording(function) for function in names}))
    built = HandBuilt(model, page_size=4, backend_name="torch")
    called.clear()
    built.step((built.sequence([5, 6, 7]), 3))
    assert called == [f"{prefix}rmsnorm"] + [f"{prefix}fused_add_rmsnorm"] * 4


@pytest.mark.parametrize("change", ["in place", "anew"])
def test_layers_between_which_something_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """Changed in place, a sum is still the tensor whose norm was found ahead: such layers are parted again, and stay fused."""
    model = model_of("llama", tmp_path)
    first = model.module.model.layers[0]

    def triple_a_half(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        changed = output if change == "in place" else output.clone()
        changed[..., ::2] *= 3
        return changed

    first.register_forward_hook(triple_a_half)
    before = steps(model)
    with caplog.at_level(logging.INFO):
        assert tuple(fuse_modules(model, flashinfer_double).values()) == (5, 2, 2, 2)
    assert ("the model with its layers joined differed" in caplog.text) == (change == "in place")
    assert (first.forward.next_norm is None) == (change == "in place")
    for got, expected in zip(steps(model), before, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("graft", [True, False])
def test_the_parameter_graft_switches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graft: bool
) -> None:
    model = model_of("llama", tmp_path)
    specs = tuple(layer.spec for layer in model.layers)
    setup = AttentionSetup(specs, 4, model.device, dtype=model.dtype, cache_dtype=model.dtype)
    backend = FlashInferAttention(setup, flashinfer_double)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    assert loading._graft(EngineConfig(model="m", graft=graft), model, backend) is None
    assert isinstance(model.module.model.norm.forward, FusedNorm) == graft


@pytest.mark.parametrize("once", [slice(0, 4), slice(0, 8, 2)])
def test_angles_are_packed_once_for_all_layers(once: slice) -> None:
    angles = RotaryAngles()
    each = torch.rand(1, 5, 4)
    twice = each.repeat(1, 1, 2) if once.step is None else each.repeat_interleave(2, dim=-1)
    cosines, sines = twice, twice + 1
    table, rows = angles.pack(cosines, sines, once)
    assert torch.equal(table, torch.cat((each[0], each[0] + 1), dim=-1))
    assert rows.tolist() == [0, 1, 2, 3, 4] and rows.dtype == torch.int32
    assert angles.pack(cosines, sines, once)[0] is table
    assert angles.pack(cosines.clone(), sines, once)[0] is not table
