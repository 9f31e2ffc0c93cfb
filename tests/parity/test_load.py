"""What loading finds, and what it says of a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hand_built import CPU, load_tiny
from safetensors.torch import load_file
from tiny_models import make_tiny_model, save_tiny_model, tiny_config

from paged_engine.config import EngineConfig
from paged_engine.errors import ConfigurationError
from paged_engine.models import load, progress
from paged_engine.models.load import load_model, resolve_checkpoint, resolve_device


def test_what_a_loaded_model_says_of_itself(tmp_path: Path) -> None:
    model = make_tiny_model(tiny_config("gemma2"))
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    loaded = load_model(EngineConfig(model=str(tmp_path), dtype="bfloat16", max_seq_len=100), CPU)
    assert loaded.eos_token_ids == {2, 7}
    assert (loaded.dtype, loaded.vocab_size, loaded.max_seq_len) == (torch.bfloat16, 128, 100)
    assert [layer.spec.sliding_window for layer in loaded.layers] == [6, None]
    for layer in loaded.layers:
        assert (layer.spec.num_query_heads, layer.spec.num_kv_heads, layer.spec.head_dim) == (4, 2, 16)
        assert layer.spec.scale == pytest.approx(24**-0.5)
        assert layer.spec.soft_cap == 2.0
        assert not layer.spec.has_sinks
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, overrides={"tie_word_embeddings": True})
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_tiny(tmp_path).vocab_size == 128


def test_end_of_sequence_of_a_checkpoint_without_generation_config(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, overrides={"eos_token_id": 5})
    (tmp_path / "generation_config.json").unlink()
    assert load_tiny(tmp_path).eos_token_ids == {5}


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = make_tiny_model(tiny_config("llama"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_tiny(tmp_path)
    for (name, theirs), ours in zip(model.named_parameters(), loaded.module.parameters(), strict=True):
        assert torch.equal(theirs, ours), name


def test_where_a_gguf_file_is_converted_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[tuple[object, ...]] = []

    def convert(*arguments: object) -> Path:
        converted.append(arguments)
        return tmp_path / "folder"

    monkeypatch.setattr(load, "convert_gguf", convert)
    (tmp_path / "model.gguf").touch()
    monkeypatch.setenv("CACHE_DIR", "given")
    assert resolve_checkpoint(str(tmp_path / "model.gguf")) == str(tmp_path / "folder")
    monkeypatch.delenv("CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "users")
    resolve_checkpoint(str(tmp_path / "model.gguf"), "float32")
    assert converted == [
        (tmp_path / "model.gguf", Path("given/models"), "bfloat16"),
        (tmp_path / "model.gguf", Path("users/paged_engine/models"), "float32"),
    ]


def test_folders_come_before_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("organisation/model-1.5") == "organisation/model-1.5"
    assert resolve_checkpoint("gpt2") == "gpt2"
    save_tiny_model("llama", tmp_path / "organisation" / "model-1.5")
    assert Path(resolve_checkpoint("organisation/model-1.5")).is_dir()
    assert load_model(EngineConfig(model="organisation/model-1.5"), CPU).vocab_size == 128
    for nowhere in ("/no/where", "./nowhere", "a/b/c", "~/nowhere-at-all", "nowhere.gguf"):
        with pytest.raises(ConfigurationError, match="does not exist"):
            resolve_checkpoint(nowhere)


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigurationError, match="got cuda:99"):
        resolve_device("cuda:99")


def test_a_long_load_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model("llama", tmp_path)
    caplog.set_level("INFO", "paged_engine")
    load_tiny(tmp_path)
    assert "%" not in caplog.text  # a quick one is not worth a line
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    load_tiny(tmp_path)
    lines = re.findall(r"Loading weights: (\d+) %", caplog.text)
    assert lines == sorted(lines, key=int)
    assert len(lines) > 5
    assert lines[0] == "0"
