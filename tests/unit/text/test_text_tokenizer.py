"""Prompts to ids and back: special tokens, bad input, loading, and several threads at once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sample_tokenizers
from sample_tokenizers import BOS, EOS, SampleTokenizer

from paged_engine.errors import ConfigurationError, ErrorCode, RequestError
from paged_engine.text.stream import TextStream
from paged_engine.text.tokenizer import Tokenizer


def test_encoding_adds_what_the_tokenizer_adds(llama: SampleTokenizer, byte_level: SampleTokenizer) -> None:
    assert llama.encode("the fox")[0] == llama.bos_token_id
    assert byte_level.bos_token_id not in byte_level.encode("the fox")
    assert (
        llama.decode(llama.encode("the fox")) == byte_level.decode(byte_level.encode("the fox")) == "the fox"
    )


def test_a_prompt_that_begins_with_bos_text_gets_no_second_one(
    llama: SampleTokenizer, byte_level: SampleTokenizer
) -> None:
    assert llama.encode(f"{BOS}the").count(llama.id_of(BOS)) == 1
    assert llama.encode(f"{BOS}{BOS}the").count(llama.id_of(BOS)) == 2
    assert byte_level.encode(f"{BOS}{BOS}the").count(byte_level.id_of(BOS)) == 2
    assert llama.encode("") == [llama.bos_token_id]


def test_ids_and_sizes(byte_level: SampleTokenizer) -> None:
    assert byte_level.bos_token_id == byte_level.id_of(BOS)
    assert byte_level.eos_token_ids == {byte_level.id_of(EOS)}
    assert byte_level.vocab_size == byte_level.id_of('."\n') + 1


def test_decoding_keeps_spaces_and_hides_special_tokens(llama: SampleTokenizer) -> None:
    text = "a  fox .  the dog , it 's"
    assert llama.decode(llama.encode(text)) == text
    assert llama.decode([llama.id_of(EOS)]) == ""
    assert llama.decode([llama.id_of(EOS)], skip_special_tokens=False) == EOS


def test_single_tokens_keep_their_space(llama: SampleTokenizer, byte_level: SampleTokenizer) -> None:
    for tokenizer in (llama, byte_level):
        token_ids = tokenizer.encode("quick the the")
        assert tokenizer.decode_token(token_ids[-1]) == " the"
        assert tokenizer.decode_token(tokenizer.id_of(EOS)) == EOS
        assert tokenizer.decode_token(tokenizer.byte_ids(b"\xe8")[0]) == "\ufffd"
        assert tokenizer.decode_token(10**6) == ""


def test_half_a_surrogate_pair_is_the_clients_mistake(byte_level: SampleTokenizer) -> None:
    with pytest.raises(RequestError, match="character 3") as caught:
        byte_level.encode("the\ud83d fox")
    assert caught.value.code is ErrorCode.INVALID_ARG


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers has to say; its logger does not propagate."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_a_prompt_of_six_megabytes_without_a_word_about_its_length(
    byte_level: SampleTokenizer, transformers_log: pytest.LogCaptureFixture
) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * (6_000_000 // 45)
    token_ids = byte_level.encode(text)
    assert byte_level.decode(token_ids) == text
    assert transformers_log.text == ""


def test_truncation_and_padding_that_a_checkpoint_brings_are_off(byte_level: SampleTokenizer) -> None:
    checkpoint = sample_tokenizers.make("byte_level")
    checkpoint.backend_tokenizer.enable_truncation(4)
    checkpoint.backend_tokenizer.enable_padding(length=32)
    text = "The quick brown fox jumps"
    assert Tokenizer(checkpoint).encode(text) == byte_level.encode(text)


def test_other_threads_run_while_a_long_prompt_is_encoded(byte_level: SampleTokenizer) -> None:
    """The step thread must go on, so encoding may not keep the interpreter's lock."""
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(byte_level.encode, "quick brown " * 200_000)
        num_turns = 0
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns > 20


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_encoding_decoding_and_chat_at_once(kind: str) -> None:
    tokenizer = Tokenizer(sample_tokenizers.make(kind))
    text = "The quick brown fox 聪明 😀 jumps. " * 20
    messages = [{"role": "user", "content": text}]
    token_ids, chat_ids = tokenizer.encode(text), tokenizer.render_chat(messages)

    def encode() -> bool:
        return all(tokenizer.encode(text) == token_ids for _ in range(50))

    def render() -> bool:
        return all(tokenizer.render_chat(messages) == chat_ids for _ in range(50))

    def decode() -> bool:
        return all(TextStream(tokenizer).push(token_ids[:-1]) in text for _ in range(50))

    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(work) for work in (encode, decode, render) * 4]
        assert all(result.result() for result in results)


def test_a_tokenizer_written_in_python_works_too(transformers_log: pytest.LogCaptureFixture) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = Tokenizer(ByT5Tokenizer(model_max_length=4))
    text = "the 聪明 fox"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_token(tokenizer.encode("f")[0]) == "f"
    assert tokenizer.eos_token_ids == {tokenizer.encode("")[-1]}
    assert transformers_log.text == ""


def test_loading_a_folder(tmp_path: Path) -> None:
    original = sample_tokenizers.make("llama", adds_bos=True)
    original.save_pretrained(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded.encode("the quick fox") == original("the quick fox")["input_ids"]
    assert loaded.render_chat([{"role": "user", "content": "fox"}])


def test_loading_a_sentencepiece_model(sentencepiece_folder: Path) -> None:
    tokenizer = Tokenizer.load(str(sentencepiece_folder))
    token_ids = tokenizer.encode("The quick 聪明 😀 fox")
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids) == "The quick 聪明 😀 fox"


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "empty", "damaged", "damaged.gguf"])
def test_what_cannot_be_loaded_is_named_with_the_cause(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text('{"model": ')
    (tmp_path / "damaged" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(ConfigurationError, match=f"^tokenizer: .*{name}'"):
        Tokenizer.load(str(tmp_path / name))


def test_the_layer_does_without_torch() -> None:
    modules = ["stream", "stop", "tokenizer", "chat"]
    code = "import sys\n" + "".join(f"import paged_engine.text.{module}\n" for module in modules)
    code += "print({'torch', 'transformers'} & sys.modules.keys() or 'neither')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.stderr) == ("neither\n", "")
