"""Converting GGUF files: once for each version of a file, whole or not at all, with an error a person can use."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_engine.errors import ConfigurationError
from paged_engine.models.gguf import convert_gguf, main

HIDDEN, HEADS, LAYERS = 32, 2, 1
TOKENS = ["<s>", "</s>", *(chr(c) for c in range(ord("a"), ord("z") + 1)), "Ġ", "ab", "abc"]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A tiny Llama with random float32 weights and a byte-level tokenizer."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{part}.weight": (2 * HIDDEN, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down.weight": (HIDDEN, 2 * HIDDEN)}
        shapes |= {f"blk.{i}.{part}_norm.weight": (HIDDEN,) for part in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_folder_holds_the_weights_and_the_tokenizer(gguf_file: Path, tmp_path: Path, dtype: str) -> None:
    folder = convert_gguf(gguf_file, tmp_path / "cache", dtype)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    original = next(t for t in gguf.GGUFReader(gguf_file).tensors if t.name == "token_embd.weight")
    embedding = torch.from_numpy(original.data.copy()).to(getattr(torch, dtype))
    assert torch.equal(model.get_input_embeddings().weight.data, embedding)
    assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"][-1] == TOKENS.index("abc")


def test_a_second_call_writes_nothing(gguf_file: Path, tmp_path: Path) -> None:
    folder = convert_gguf(gguf_file, tmp_path / "cache")
    before = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert convert_gguf(gguf_file, tmp_path / "cache") == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == before


def test_a_changed_file_and_another_dtype_get_folders_of_their_own(gguf_file: Path, tmp_path: Path) -> None:
    first = convert_gguf(gguf_file, tmp_path / "cache")
    other_dtype = convert_gguf(gguf_file, tmp_path / "cache", "float32")
    os.utime(gguf_file, ns=(0, 0))
    changed = convert_gguf(gguf_file, tmp_path / "cache")
    assert len({first, other_dtype, changed}) == 3


def test_two_at_once_agree_and_leave_nothing_else(gguf_file: Path, tmp_path: Path) -> None:
    folders: list[Path] = []
    stderr = sys.stderr
    threads = [
        threading.Thread(target=lambda: folders.append(convert_gguf(gguf_file, tmp_path / "cache")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert set((tmp_path / "cache").iterdir()) == set(folders) == {folders[0]}
    AutoModelForCausalLM.from_pretrained(folders[0])
    assert sys.stderr is stderr


@pytest.mark.parametrize("kept", [4, 200, 0.5, 0.999])
def test_a_truncated_file(gguf_file: Path, tmp_path: Path, kept: float) -> None:
    content = gguf_file.read_bytes()
    gguf_file.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(ConfigurationError, match=r"tiny\.gguf \(truncated, damaged"):
        convert_gguf(gguf_file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("a letter")
    with pytest.raises(ConfigurationError, match="is not a GGUF file"):
        convert_gguf(file, tmp_path / "cache")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_made(gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigurationError, match=r"cannot write to the cache folder .*cache: "):
        convert_gguf(gguf_file, tmp_path / "cache")


def test_a_dtype_that_is_none(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bfloat16, float16, float32, not as 'int3'"):
        convert_gguf(gguf_file, tmp_path / "cache", "int3")


def test_the_command_prints_the_folder_or_the_reason(
    gguf_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(gguf_file), str(tmp_path / "cache"), "float32"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "config.json").is_file()
    assert main([str(tmp_path / "none.gguf"), str(tmp_path / "cache")]) == 1
    assert "none.gguf" in capsys.readouterr().err
    assert main([]) == 2
