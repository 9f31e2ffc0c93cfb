"""What cannot be served rightly is refused at load, with the reason; what looks similar but is right is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_built import HandBuilt, load_tiny
from safetensors.torch import load_file, save_file
from tiny_models import MAX_POSITIONS, make_tiny_model, save_tiny_model, tiny_config
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from paged_engine.errors import ConfigurationError

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}

NOT_PAGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "hybrid of mamba and attention": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "recurrent"),
    "mamba beside attention": ("falcon_h1", _MAMBA, "recurrent"),
    "recurrent": ("rwkv", {"attention_hidden_size": 32}, "recurrent"),
    "convolutions between attention": (
        "lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "other kinds of layers",
    ),
    "linear attention": (
        "minimax",
        {"layer_types": ["linear_attention", "full_attention"]},
        "other kinds of layers",
    ),
    "own attention code, alibi": ("bloom", {}, "AttentionInterface"),
    "own attention code": ("xglm", {"d_model": 32}, "AttentionInterface"),
    "own mask": ("doge", {}, "mask that the model builds by itself"),
    "two attentions in a layer": ("diffllama", {}, "called 4 times"),
    "own table of attention classes": ("falcon", {}, "AttentionInterface"),
    "encoder": ("bert", {"is_decoder": False}, "not causal"),
    "positions that begin behind the padding token": ("roberta", {}, "does not number the tokens"),
    "positions counted from rows": (
        "llama4_text",
        {"attention_chunk_size": MAX_POSITIONS},
        "counts positions by itself",
    ),
    "sparse attention over chosen tokens": ("deepseek_v32", {"num_key_value_heads": 4}, "indices"),
}


@pytest.mark.parametrize(("model_type", "overrides", "reason"), NOT_PAGED.values(), ids=list(NOT_PAGED))
def test_architectures_that_no_paged_cache_can_hold(
    tmp_path: Path, model_type: str, overrides: dict[str, Any], reason: str
) -> None:
    save_tiny_model(model_type, tmp_path, overrides=overrides)
    with pytest.raises(ConfigurationError, match=reason):
        load_tiny(tmp_path)


def test_encoder_decoder(tmp_path: Path) -> None:
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"'t5'.*encoder-decoder"):
        load_tiny(tmp_path)


def test_mask_rule_is_checked_up_to_the_longest_sequence(tmp_path: Path) -> None:
    """Attention in chunks of 8 is causal attention as long as no sequence is longer than 8, and not beyond."""
    save_tiny_model(
        "llama4_text", tmp_path, overrides={"attention_chunk_size": 8, "attn_temperature_tuning": False}
    )
    with pytest.raises(ConfigurationError, match="neither causal nor a sliding window"):
        load_tiny(tmp_path)
    with pytest.raises(ConfigurationError, match="counts positions by itself"):
        load_tiny(tmp_path, max_seq_len=8)


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


LONGROPE = {
    "head_dim": 8,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 32,
    **rope("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4),
}


def test_longrope_beyond_its_original_length(tmp_path: Path) -> None:
    save_tiny_model("phi3", tmp_path, overrides=LONGROPE)
    with pytest.raises(ConfigurationError, match=r"'longrope'.*max_seq_len must be at most 32.*got 256"):
        load_tiny(tmp_path)


def test_longrope_up_to_its_original_length(tmp_path: Path) -> None:
    save_tiny_model("phi3", tmp_path, overrides=LONGROPE)
    paged = HandBuilt(load_tiny(tmp_path, max_seq_len=32), 4, "torch")
    token_ids = list(range(3, 35))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    logits = paged.chunk_logits(token_ids, 5)
    torch.testing.assert_close(logits, expected[[*range(4, 32, 5), 31]], atol=1e-4, rtol=0)


def test_dynamic_rope(tmp_path: Path) -> None:
    """It changes beyond max_position_embeddings; up to there it is plain."""
    save_tiny_model("llama", tmp_path, overrides=rope("dynamic", factor=2.0))
    with pytest.raises(ConfigurationError, match=rf"'dynamic'.*max_seq_len must be at most {MAX_POSITIONS}"):
        load_tiny(tmp_path, max_seq_len=2 * MAX_POSITIONS)
    assert load_tiny(tmp_path).max_seq_len == MAX_POSITIONS


def test_rope_type_of_one_kind_of_layers(tmp_path: Path) -> None:
    plain, dynamic = rope("default")["rope_parameters"], rope("dynamic", factor=2.0)["rope_parameters"]
    by_layer_type = {"full_attention": dynamic, "sliding_attention": plain}
    save_tiny_model("gemma3_text", tmp_path, overrides={"rope_parameters": by_layer_type})
    with pytest.raises(ConfigurationError, match=rf"'dynamic'.*at most {MAX_POSITIONS}"):
        load_tiny(tmp_path, max_seq_len=MAX_POSITIONS + 1)
    assert load_tiny(tmp_path).max_seq_len == MAX_POSITIONS


def test_more_positions_than_the_model_has(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigurationError, match=r"max_seq_len must be at most 256.*got 257"):
        load_tiny(tmp_path, max_seq_len=257)


def test_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_tiny(tmp_path / "nowhere" / "model")
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_tiny(tmp_path / "model.gguf")


def test_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        load_tiny(tmp_path)
    save_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"has no weights: there is no model\.safetensors"):
        load_tiny(tmp_path)


def test_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"weights")
    with pytest.raises(ConfigurationError, match=r"weights\.bin"):
        load_tiny(tmp_path / "weights.bin")


def test_unknown_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-knows"}))
    with pytest.raises(ConfigurationError, match="nobody-knows"):
        load_tiny(tmp_path)


def test_broken_configuration_file(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    for content, problem in (("{", "is not valid JSON"), ("[]", "must hold a JSON object, but holds a list")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigurationError, match=rf"config\.json {problem}"):
            load_tiny(tmp_path)


def test_a_setting_that_no_model_can_have(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    with pytest.raises(ConfigurationError, match=r"\d+ weights are missing or of another shape|cannot load"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 1000, 5000, -100])
def test_truncated_weights(tmp_path: Path, keep: int) -> None:
    weights = save_tiny_model("llama", tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is.* cut off.*download it again"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 134515008\n",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x09\0\0\0\0\0\0\0" + b'{"a": {}}',
        bytes(5000),
    ],
    ids=["pointer of Git LFS", "list", "tensor without a place", "zeros"],
)
def test_weights_of_another_kind_of_file(tmp_path: Path, content: bytes) -> None:
    (save_tiny_model("llama", tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors is not a safetensors file.*Git LFS"):
        load_tiny(tmp_path)


def test_weights_that_go_on_too_long(tmp_path: Path) -> None:
    weights = save_tiny_model("llama", tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"more")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors has something behind its last tensor"):
        load_tiny(tmp_path)


def save_sharded(folder: Path) -> Path:
    """The tiny llama in several files; the second of them."""
    make_tiny_model(tiny_config("llama")).save_pretrained(folder, max_shard_size="40KB")
    return next(folder.glob("model-00002-*.safetensors"))


def test_shard_that_is_missing_or_truncated(tmp_path: Path) -> None:
    shard = save_sharded(tmp_path)
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(ConfigurationError, match=rf"{shard.name} is cut off: by its header"):
        load_tiny(tmp_path)
    shard.unlink()
    with pytest.raises(ConfigurationError, match=rf"names .*{shard.name}, which is not there \(1 of "):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "not valid JSON"), ("{}", "no weight_map"), ('{"weight_map": 1}', "no weight_map")],
)
def test_broken_index(tmp_path: Path, content: str, problem: str) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigurationError, match=rf"model\.safetensors\.index\.json.* {problem}"):
        load_tiny(tmp_path)


def edit_weights(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_missing_weights(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    edit_weights(tmp_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ConfigurationError, match=r"1 weights are missing.*model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_tiny(tmp_path)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight|mismatch"):
        load_tiny(tmp_path)


def test_weights_that_nobody_uses_are_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model("llama", tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update({"model.extra.weight": torch.ones(7)}))
    load_tiny(tmp_path)
    assert "model.extra.weight" in caplog.text


def test_a_corrected_checkpoint_loads_after_a_failure(tmp_path: Path) -> None:
    weights = save_tiny_model("llama", tmp_path) / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:1000])
    with pytest.raises(ConfigurationError):
        load_tiny(tmp_path)
    weights.write_bytes(good)
    assert load_tiny(tmp_path).vocab_size == 128
