"""Models of which single modules run in the native kernels, against transformers' own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from grafting import BF16_SIZES, Grafted, make_backend, reference_logits, tokens
from hand_built import load_tiny
from tiny_checkpoint import save_byte_tokenizer
from tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model, tiny_config
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.errors import ConfigurationError
from paged_engine.kernels.load import load_kernels
from paged_engine.loading import load_engine
from paged_engine.models.graft import graft_model
from paged_engine.models.grafted_model import GraftedModel
from paged_engine.models.native_modules import NativeExperts, NativeLinear
from paged_engine.models.parts import PartsReport, replace_parts
from paged_engine.request import GenerateRequest, SamplingParams

MODELS = {
    "mixtral": (
        "MixtralSparseMoeBlock has no gate_proj",
        "9 of 9 linear layers, 5 of 5 norms, 2 of 2 blocks",
    ),
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock has no gate_proj",
        "9 of 9 linear layers, 9 of 9 norms, 2 of 2 blocks",
    ),
    "qwen2_moe": ("Qwen2MoeSparseMoeBlock has no", "2 of 2 blocks of experts"),
    "olmo2": ("Olmo2DecoderLayer has no input_layernorm", "15 of 15 linear layers, 9 of 9 norms"),
    "gpt2": ("GPT2Model is no stack of layers", "9 of 9 linear layers, 0 of 5 norms"),
    "cohere2": ("Cohere2LayerNorm is no RMS norm", "15 of 15 linear layers, 0 of 3 norms"),
    "gpt_oss": ("layer 0: ", "9 of 9 linear layers, 5 of 5 norms, 2 of 2 blocks"),
    "starcoder2": ("LayerNorm is no RMS norm", "13 of 13 linear layers, 0 of 5 norms"),
    "deepseek_v3": (
        "DeepseekV3Attention has no q_proj",
        "17 of 17 linear layers, 9 of 9 norms, 1 of 1 blocks",
    ),
}
"""Why they are not run as a whole, and what of them is native in float32."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_company_then_greedy(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny_model(name, tmp_path)
    with caplog.at_level(logging.INFO):
        native = Grafted(folder, page_size=7)
    assert not isinstance(native.forward, GraftedModel)
    (message,) = [each for each in caplog.messages if "runs as transformers' modules" in each]
    reason, native_parts = MODELS[name]
    assert reason in message
    assert native_parts in message
    long, short = tokens(50, 1), tokens(9, 2)
    first, second = native.sequence(long + [0] * 20), native.sequence(short)
    steps = [
        native.step((first, 0, 30)),
        native.step((first, 30, 31), (second, 0, 9)),
        native.step((first, 31, 50)),
    ]
    got = torch.cat((steps[0], steps[1][:1], steps[2]))
    torch.testing.assert_close(got, reference_logits(folder, long), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(steps[1][1:], reference_logits(folder, short), atol=1e-4, rtol=1e-4)
    best = int(got[-1].argmax())
    for position in range(50, 70):
        first.token_ids[position] = best
        best = int(native.step((first, position, position + 1))[0].argmax())
    reference = reference_logits(folder, list(first.token_ids))
    for position in range(50, 70):
        # Matmuls of other shapes round otherwise; a tie may then fall the other way.
        assert reference[position - 1, first.token_ids[position]] >= reference[position - 1].max() - 1e-4


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["mixtral", "olmo2", "gpt2", "cohere2", "gpt_oss", "starcoder2"])
def test_bfloat16_and_int8_stay_near(tmp_path: Path, name: str, int8: bool) -> None:
    overrides = {**BF16_SIZES, "n_embd": 64, "n_inner": 96}
    save_tiny_model(name, tmp_path, overrides=overrides)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    prompt = tokens(60)
    exact = reference_logits(tmp_path / "half", prompt)

    def error(logits: torch.Tensor) -> torch.Tensor:
        """Of the row in the middle: where tokens go to experts, rounding sends some of them to others."""
        return ((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).median()

    native = Grafted(tmp_path / "half", dtype="bfloat16", int8=int8)
    ours = error(native.step((native.sequence(prompt), 0, 60)))
    theirs = error(reference_logits(tmp_path / "half", prompt, torch.bfloat16))
    assert 1e-4 < ours < (0.1 if int8 else 1.2 * theirs)


def test_replaced_weights_are_dropped(tmp_path: Path) -> None:
    native = Grafted(save_tiny_model("mixtral", tmp_path))
    left = {name for name, parameter in native.model.module.named_parameters() if parameter.numel()}
    assert left == {"model.embed_tokens.weight"} | {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}


def test_gpt_oss_experts_keep_their_function_but_not_their_weights(tmp_path: Path) -> None:
    native = Grafted(save_tiny_model("gpt_oss", tmp_path))
    (experts, _) = [each for each in native.model.module.modules() if isinstance(each, NativeExperts)]
    assert experts._gate is not None
    original = experts._gate.__self__  # type: ignore[attr-defined]
    assert sum(parameter.numel() for parameter in original.parameters()) == 0


@pytest.mark.parametrize("name", ["olmo2", "gpt2", "starcoder2"])
def test_an_embedding_survives_the_head_that_shares_its_weight(tmp_path: Path, name: str) -> None:
    folder = save_tiny_model(name, tmp_path, overrides={"tie_word_embeddings": True})
    native = Grafted(folder)
    module = native.model.module
    assert isinstance(module.get_output_embeddings(), NativeLinear)
    assert module.get_input_embeddings().weight.shape[0] == VOCAB_SIZE
    got = native.step((native.sequence(tokens(20)), 0, 20))
    torch.testing.assert_close(got, reference_logits(folder, tokens(20)), atol=1e-4, rtol=1e-4)


def _add_hook(module: nn.Linear) -> None:
    module.register_forward_hook(lambda *_: _[2] * 2)


def _add_parametrization(module: nn.Linear) -> None:
    parametrizations.weight_norm(module)


def _replace_forward(module: nn.Linear) -> None:
    original = module.forward
    module.forward = lambda input: original(input) * 2  # type: ignore[method-assign]


def _change_class(module: nn.Linear) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    module.__class__ = Doubled


@pytest.mark.parametrize("change", [_add_hook, _add_parametrization, _replace_forward, _change_class])
def test_a_linear_layer_with_more_to_it_stays(tmp_path: Path, change: Callable[[nn.Linear], None]) -> None:
    model = load_tiny(save_tiny_model("olmo2", tmp_path))
    projection = model.module.model.layers[1].mlp.up_proj
    with torch.no_grad():
        change(projection)
    report = replace_parts(model, make_backend(model, 16), int8=False)
    assert model.module.model.layers[1].mlp.up_proj is projection
    assert (report.native["linear layers"], report.total["linear layers"]) == (14, 15)


def test_a_module_in_two_places_is_packed_once(tmp_path: Path) -> None:
    model = load_tiny(save_tiny_model("olmo2", tmp_path))
    layers = model.module.model.layers
    layers[1].mlp = layers[0].mlp
    report = replace_parts(model, make_backend(model, 16), int8=False)
    assert report.total["linear layers"] == 12
    assert isinstance(layers[1].mlp.up_proj, NativeLinear)


def test_float16_keeps_its_linear_layers_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        native = Grafted(save_tiny_model("llama", tmp_path), dtype="float16")
    (message,) = [each for each in caplog.messages if "runs as transformers' modules" in each]
    assert "the kernels' linear layers do not compute in float16" in message
    assert "0 of 15 linear layers, 5 of 5 norms" in message
    got = native.step((native.sequence(tokens(20)), 0, 20))
    expected = reference_logits(tmp_path, tokens(20))
    assert (got - expected).norm() / expected.norm() < 0.02


def test_a_model_that_reads_a_replaced_weight_is_refused(tmp_path: Path) -> None:
    """Code that takes a layer's weight instead of calling the layer, which is then no longer there."""
    model = load_tiny(save_tiny_model("olmo2", tmp_path))
    mlp = model.module.model.layers[0].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) + x * mlp.down_proj.weight.mean()
    with pytest.raises(ConfigurationError, match=r"does not run with native modules.*set graft to false"):
        graft_model(model, make_backend(model, 16), max_num_tokens=100)


# ---- Experts by themselves


def make_experts(name: str, **overrides: object) -> nn.Module:
    """The first block of experts of a tiny model."""
    model = make_tiny_model(tiny_config(name, **overrides))
    return next(each for each in model.modules() if type(each).__name__.endswith("Experts"))


@torch.inference_mode()
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_over_any_routing(name: str, num_tokens: int) -> None:
    experts = make_experts(name)
    native = NativeExperts(experts, load_kernels(2))
    random = torch.Generator().manual_seed(num_tokens)
    for scale in (1.0, 30.0):  # the larger one meets the limits of gpt_oss
        hidden = scale * torch.randn(num_tokens, 32, generator=random)
        index = torch.rand(num_tokens, 4, generator=random).topk(2).indices
        index[:, 1] = torch.where(index[:, 1] == 3, index[:, 0], index[:, 1])  # one expert gets fewer or none
        weights = torch.rand(num_tokens, 2, generator=random)
        expected = experts(hidden, index, weights)
        torch.testing.assert_close(native(hidden, index, weights), expected, rtol=1e-4, atol=1e-4 * scale**2)


@torch.inference_mode()
def test_an_expert_that_is_none_adds_nothing() -> None:
    native = NativeExperts(make_experts("mixtral"), load_kernels(1))
    hidden, weights = torch.randn(5, 32), torch.rand(5, 2)
    index = torch.tensor([[0, 4], [4, 1], [2, 3], [4, 4], [1, 0]])
    got = native(hidden, index, weights)
    alone = native(hidden, index.clamp_max(3), weights.masked_fill(index == 4, 0))
    torch.testing.assert_close(got, alone)
    assert (got[3] == 0).all()


# ---- Through the engine


def generate(engine: Engine, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add(engine.prepare(GenerateRequest("r", prompt, sampling)))
    generated: list[int] = []
    while engine.has_work:
        for output in engine.step():
            generated.extend(output.token_ids)
    return generated


def make_engine(folder: Path, **parameters: object) -> Engine:
    return load_engine(
        EngineConfig(model=str(folder), num_pages=50, num_threads=1, **parameters)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_graft_false_gives_the_same_tokens(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(name, tmp_path, overrides={"vocab_size": 320})
    save_byte_tokenizer(folder)
    with caplog.at_level(logging.INFO):
        plain = generate(make_engine(folder, graft=False), tokens(30))
    assert not [each for each in caplog.messages if "native" in each]
    with caplog.at_level(logging.INFO):
        assert generate(make_engine(folder), tokens(30)) == plain
    assert [each for each in caplog.messages if "native" in each]


def test_int8_serves_what_is_not_recognised_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    folder = save_tiny_model("olmo2", tmp_path, overrides={**BF16_SIZES, "vocab_size": 320})
    save_byte_tokenizer(folder)
    assert len(generate(make_engine(folder, dtype="bfloat16", weight_dtype="int8"), tokens(30))) == 20
    with pytest.raises(ConfigurationError, match=r"weight_dtype must be auto with dtype float32.*bfloat16"):
        make_engine(folder, weight_dtype="int8")
    with pytest.raises(
        ConfigurationError, match=r"weight_dtype must be auto for Olmo2ForCausalLM.*graft false"
    ):
        make_engine(folder, dtype="bfloat16", weight_dtype="int8", graft=False)


def test_int8_refuses_a_model_without_a_layer_that_could_be_packed(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 40,
        "intermediate_size": 40,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 40,
    }
    folder = save_tiny_model("olmo2", tmp_path, overrides={**sizes, "vocab_size": 320})
    save_byte_tokenizer(folder)
    with pytest.raises(
        ConfigurationError, match=r"weight_dtype must be auto for Olmo2ForCausalLM.*they take"
    ):
        make_engine(folder, dtype="bfloat16", weight_dtype="int8")


def test_a_report_counts_reasons() -> None:
    report = PartsReport()
    report.total.update(["norms", "norms", "linear layers"])
    report.native.update(["norms"])
    report.stayed.update(["it is odd", "it has hooks"])
    assert (
        str(report) == "1 of 2 norms, 0 of 1 linear layers (the others stay: 1 x it is odd; 1 x it has hooks)"
    )
