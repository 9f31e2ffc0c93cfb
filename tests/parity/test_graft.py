"""Models whose whole forward pass runs in the native kernels against transformers' own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_built import CPU, load_tiny
from tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

from paged_engine.attention.cpu_native import CpuAttention, load_cpu_attention
from paged_engine.attention.interface import AttentionSetup
from paged_engine.execution.batch import build_batch
from paged_engine.execution.runner import ModelRunner
from paged_engine.models.graft import GraftedModel, graft_model
from paged_engine.models.load import LoadedModel
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

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
]
UNKNOWN = {
    "mixtral": "layer 0: MixtralSparseMoeBlock has no gate_proj",
    "olmo2": "layer 0: Olmo2DecoderLayer has no input_layernorm",
    "gpt2": "GPT2Model is no stack of layers",
    "gpt_oss": "layer 0: ",
    "cohere2": "layer 0: ",
}
BF16_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
"""Multiples of 32, as the kernels want them in 16 bits."""


class Grafted:
    """A grafted tiny model, its planner, and pages full of NaN."""

    def __init__(
        self,
        folder: Path,
        page_size: int = 16,
        num_pages: int = 200,
        *,
        dtype: str = "float32",
        int8: bool = False,
    ) -> None:
        self.model = load_tiny(folder, dtype=dtype)
        self.backend = make_backend(self.model, page_size)
        forward = graft_model(self.model, self.backend, max_num_tokens=100, int8=int8)
        assert forward is not None
        self.forward: GraftedModel = forward
        self.page_size = page_size
        self.num_pages_used = 0
        bind(self.model, self.backend, num_pages)

    def sequence(self, token_ids: list[int]) -> Sequence:
        sequence = Sequence("s", token_ids, SamplingParams(), max_num_tokens=1000)
        needed = -(-len(token_ids) // self.page_size)
        sequence.page_table.extend(range(self.num_pages_used, self.num_pages_used + needed))
        self.num_pages_used += needed
        return sequence

    def step(self, *ranges: tuple[Sequence, int, int]) -> torch.Tensor:
        """Logits of every token of the ranges (sequence, start, end)."""
        plan = StepPlan(tuple(ScheduledRange(*each) for each in ranges))
        batch = build_batch(plan, self.page_size, CPU)
        self.backend.plan(batch)
        return self.forward(batch.token_ids, batch.positions, torch.arange(batch.num_tokens)).clone()


def make_backend(model: LoadedModel, page_size: int) -> CpuAttention:
    specs = tuple(layer.spec for layer in model.layers)
    return load_cpu_attention(AttentionSetup(specs, page_size, CPU, model.dtype, model.dtype))


def bind(model: LoadedModel, backend: CpuAttention, num_pages: int) -> None:
    for layer in range(len(model.layers)):
        shape = (num_pages, *backend.page_shape(layer))
        backend.bind(layer, torch.full(shape, torch.nan, dtype=model.dtype))


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()


def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


@pytest.mark.parametrize("page_size", [7, 16])
@pytest.mark.parametrize("name", KNOWN)
def test_known_models_in_chunks_and_company(tmp_path: Path, name: str, page_size: int) -> None:
    folder = save_tiny_model(name, tmp_path)
    grafted = Grafted(folder, page_size)
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


def test_a_step_in_which_nobody_samples_has_no_rows_of_logits(tmp_path: Path) -> None:
    grafted = Grafted(save_tiny_model("llama", tmp_path))
    batch = build_batch(StepPlan((ScheduledRange(grafted.sequence(tokens(20)), 0, 10),)), 16, CPU)
    grafted.backend.plan(batch)
    logits = grafted.forward(batch.token_ids, batch.positions, batch.logit_rows)
    assert logits.shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_models_stay_as_they_are(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny_model(name, tmp_path)
    model = load_tiny(folder)
    backend = make_backend(model, 16)
    with caplog.at_level(logging.INFO):
        assert graft_model(model, backend, max_num_tokens=100) is None
    (message,) = [each for each in caplog.messages if "runs as transformers' modules" in each]
    assert UNKNOWN[name] in message
    bind(model, backend, 10)
    sequence = Sequence("s", tokens(20), SamplingParams(), max_num_tokens=100)
    sequence.page_table.extend(range(2))
    batch = build_batch(StepPlan((ScheduledRange(sequence, 0, 20),)), 16, CPU)
    logits = ModelRunner(model, backend).execute(batch)
    torch.testing.assert_close(logits, reference_logits(folder, tokens(20))[-1:], atol=1e-4, rtol=1e-4)


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
    assert 1e-4 < (got - exact).norm() / exact.norm() < 0.05


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
    assert (grafted is None) == (change["says"] is not None)
    if change["says"] is not None:
        assert change["says"] in caplog.messages[-1]
