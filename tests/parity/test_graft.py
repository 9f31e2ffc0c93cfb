"""Models whose whole forward pass runs in the native kernels, against transformers' own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from grafting import BF16_SIZES, Grafted, make_backend, reference_logits, tokens
from hand_built import CPU, load_tiny
from tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from paged_engine.execution.batch import build_batch
from paged_engine.models.decoder_layer import Norm
from paged_engine.models.graft import graft_model
from paged_engine.models.grafted_model import GraftedModel
from paged_engine.scheduling.sequence import ScheduledRange, StepPlan

KNOWN = [
    "llama",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "granite",
    "smollm3",
    "glm",
    "glm4",
    "ernie4_5",
]


@pytest.mark.parametrize("page_size", [7, 16])
@pytest.mark.parametrize("name", KNOWN)
def test_known_models_in_chunks_and_company(tmp_path: Path, name: str, page_size: int) -> None:
    folder = save_tiny_model(name, tmp_path)
    grafted = Grafted(folder, page_size)
    assert isinstance(grafted.forward, GraftedModel)
    long, short = tokens(50, 1), tokens(9, 2)
    first, second = grafted.sequence(long), grafted.sequence(short)
    steps = [
        grafted.step((first, 0, 30)),
        grafted.step((first, 30, 31), (second, 0, 9)),
        grafted.step((first, 31, 50)),
    ]
    got = torch.cat((steps[0], steps[1][:1], steps[2]))
    torch.testing.assert_close(got, reference_logits(folder, long), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(steps[1][1:], reference_logits(folder, short), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_known_models_over_int8_pages(tmp_path: Path, name: str, dtype: str) -> None:
    """They are recognised in spite of the rounding, depend on no chunk, and compute nearly what they do without it."""
    folder = save_tiny_model(name, tmp_path, overrides=BF16_SIZES if dtype == "bfloat16" else {})
    grafted = Grafted(folder, dtype=dtype, cache_dtype=torch.int8)
    assert isinstance(grafted.forward, GraftedModel)
    token_ids = tokens(50, 1)
    first, second = grafted.sequence(token_ids), grafted.sequence(token_ids)
    whole = grafted.step((first, 0, 50))
    steps = [grafted.step((second, *each)) for each in ((0, 17), (17, 18), (18, 50))]
    assert torch.equal(torch.cat(steps), whole)
    exact = reference_logits(folder, token_ids)
    assert 0 < (whole - exact).norm() < 0.1 * exact.norm()


def test_a_step_in_which_nobody_samples_has_no_rows_of_logits(tmp_path: Path) -> None:
    grafted = Grafted(save_tiny_model("llama", tmp_path))
    batch = build_batch(StepPlan((ScheduledRange(grafted.sequence(tokens(20)), 0, 10),)), 16, CPU)
    grafted.backend.plan(batch)
    logits = grafted.forward(batch.token_ids, batch.positions, batch.logit_rows)
    assert logits.shape == (0, VOCAB_SIZE)


def test_in_float32_chunks_and_company_change_no_bit(tmp_path: Path) -> None:
    """Stronger than the engine promises: every kernel computes a row by itself."""
    grafted = Grafted(save_tiny_model("gemma3_text", tmp_path))
    prompt = tokens(90)
    whole = grafted.step((grafted.sequence(prompt), 0, 90))
    pieces = grafted.sequence(prompt)
    others = [grafted.sequence(tokens(20, seed)) for seed in range(4)]
    for start, end in ((0, 1), (1, 40), (40, 41), (41, 90)):
        company = tuple((other, 0, length) for other, length in zip(others, (1, 20, 7, 1), strict=True))
        assert torch.equal(
            grafted.step(*company[:2], (pieces, start, end), *company[2:])[21:-8], whole[start:end]
        )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_bfloat16_is_nearer_to_float32_than_transformers_is(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path, overrides=BF16_SIZES)
    prompt = tokens(60)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    exact = reference_logits(tmp_path / "half", prompt)
    theirs = (reference_logits(tmp_path / "half", prompt, torch.bfloat16) - exact).norm()
    grafted = Grafted(tmp_path / "half", dtype="bfloat16")
    ours = (grafted.step((grafted.sequence(prompt), 0, 60)) - exact).norm()
    assert ours <= theirs


def test_int8_weights_stay_near(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, overrides=BF16_SIZES)
    prompt = tokens(60)
    grafted = Grafted(folder, dtype="bfloat16", int8=True)
    got = grafted.step((grafted.sequence(prompt), 0, 60))
    exact = reference_logits(folder, prompt)
    assert 1e-4 < (got - exact).norm() / exact.norm() < 0.1


def test_the_originals_weights_are_dropped(tmp_path: Path) -> None:
    grafted = Grafted(save_tiny_model("llama", tmp_path))
    left = {name for name, parameter in grafted.model.module.named_parameters() if parameter.numel()}
    assert left == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    "change",
    [
        {"target": "layers.1", "factor": 1.01, "says": "layer 1 computes something else"},
        {"target": "norm", "factor": 1.01, "says": "MistralRMSNorm is no RMS norm"},
        {"target": "embed_tokens", "factor": 1.3, "says": None},
    ],
    ids=lambda change: change["target"],
)
def test_code_that_does_something_else_is_noticed(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A module of the usual name and parts whose forward pass differs by a factor."""
    model = load_tiny(save_tiny_model("mistral", tmp_path))
    target = model.module.model.get_submodule(change["target"])
    original = target.forward
    target.forward = lambda *arguments, **keywords: original(*arguments, **keywords) * change["factor"]
    with caplog.at_level(logging.INFO):
        grafted = graft_model(model, make_backend(model, 16), max_num_tokens=100)
    assert isinstance(grafted, GraftedModel) == (change["says"] is None)
    if change["says"] is not None:
        assert change["says"] in caplog.messages[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_a_few_large_weights_is_read_rightly(dtype: torch.dtype) -> None:
    """As Gemma 3 has them: beside weights in the hundreds, w and 1 + w are the same to within bfloat16's rounding."""
    module = Gemma3RMSNorm(64).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-0.5, 0.5, 64))
        module.weight[::16] = 300.0
    read = Norm.read(module)
    torch.testing.assert_close(read.weight, 1 + module.weight.float())
