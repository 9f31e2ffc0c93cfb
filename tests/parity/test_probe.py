"""The trial runs at load notice a model that would be wrong over a paged cache, whatever its configuration says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hand_built import CPU
from tiny_models import make_tiny_model, tiny_config
from torch import nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.models.llama import modeling_llama

from paged_engine.errors import ConfigurationError
from paged_engine.models.hook import ATTENTION_NAME, forward_flat, register
from paged_engine.models.probe import find_attention_layers


@pytest.fixture
def llama() -> PreTrainedModel:
    register()
    return make_tiny_model(tiny_config("llama"))


def test_leaves_the_model_ready(llama: PreTrainedModel) -> None:
    layers = find_attention_layers(llama, 64)
    assert [layer.module for layer in layers] == [layer.self_attn for layer in llama.model.layers]
    assert llama.config._attn_implementation == ATTENTION_NAME
    assert ATTENTION_NAME not in AttentionMaskInterface()
    assert not any(hasattr(module, "paged_attention") for module in llama.modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "gemma2"])
def test_rounding_is_no_reason_to_refuse(name: str, dtype: torch.dtype) -> None:
    register()
    layers = find_attention_layers(make_tiny_model(tiny_config(name)).to(dtype), 64)
    assert len(layers) == 2


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (lambda model: model.model.layers[0].mlp, "before the attention of layer 1"),
        (lambda model: model.model.layers[1].mlp, "behind the last attention layer"),
        (lambda model: model.model.embed_tokens, "before the attention of layer 0"),
    ],
    ids=["between", "behind", "before"],
)
def test_tokens_that_meet_outside_attention(llama: PreTrainedModel, where: Any, message: str) -> None:
    module: nn.Module = where(llama)
    module.register_forward_hook(lambda _module, _inputs, output: output + output.cumsum(dim=1))
    with pytest.raises(ConfigurationError, match=message):
        find_attention_layers(llama, 64)


def test_positions_that_are_not_used(llama: PreTrainedModel) -> None:
    def count_rows(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        rows = torch.arange(keywords["position_ids"].shape[1])[None]
        return arguments, {**keywords, "position_ids": rows}

    llama.model.rotary_emb.register_forward_pre_hook(count_rows, with_kwargs=True)
    with pytest.raises(ConfigurationError, match="depend on other tokens or on its row"):
        find_attention_layers(llama, 64)


def test_fewer_positions_than_served() -> None:
    """Learned positions end; the last one that will be served is tried."""
    register()
    model = make_tiny_model(tiny_config("gpt2"))
    assert len(find_attention_layers(model, 256)) == 2
    with pytest.raises(ConfigurationError, match="IndexError"):
        find_attention_layers(model, 257)


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        ({"position_bias": torch.ones(1, 6, 8, 8)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"sliding_window": 5}, "asks for a sliding window of 5, but its mask has none"),
        ({"s_aux": torch.zeros(6, 8)}, "sinks of shape"),
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 1.0}, "computes something else"),
        ({"s_aux": torch.zeros(6)}, "computes something else"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit(llama: PreTrainedModel, passed: dict[str, Any], message: str) -> None:
    """Llama's eager attention takes no soft cap and no sinks: passing them is a contradiction."""
    attention = llama.model.layers[1].self_attn
    forward = attention.forward
    if "dropout" in passed:  # the one that the module takes from itself
        attention.training, attention.attention_dropout = True, passed["dropout"]
    else:
        attention.forward = lambda *arguments, **keywords: forward(*arguments, **{**keywords, **passed})
    with pytest.raises(ConfigurationError, match=message):
        find_attention_layers(llama, 64)


def test_attention_that_differs_from_what_is_passed(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = modeling_llama.eager_attention_forward

    def sharper(*arguments: Any, scaling: float, **keywords: Any) -> Any:
        return eager(*arguments, scaling=1.5 * scaling, **keywords)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", sharper)
    with pytest.raises(ConfigurationError, match="computes something else"):
        find_attention_layers(llama, 64)


def test_logits_of_a_model_that_cannot_leave_any_out(llama: PreTrainedModel) -> None:
    """Some classes do not know logits_to_keep: the wanted rows are then taken from all of them."""
    llama.set_attn_implementation("eager")

    class AllRows(type(llama)):
        def forward(self, **keywords: Any) -> Any:
            del keywords["logits_to_keep"]
            return super().forward(**keywords)

    token_ids = torch.arange(3, 9)
    for rows in (torch.tensor([1, 4]), torch.tensor([5, 0, 1, 2, 3, 4])):
        wanted = forward_flat(llama, token_ids, torch.arange(6), rows)
        assert wanted.shape == (len(rows), 128)
        before, llama.__class__ = llama.__class__, AllRows
        torch.testing.assert_close(forward_flat(llama, token_ids, torch.arange(6), rows), wanted)
        llama.__class__ = before
    assert wanted.device == CPU
