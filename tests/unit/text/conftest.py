"""The sample tokenizers, each built once."""

from __future__ import annotations

from pathlib import Path

import pytest
import sample_tokenizers
from sample_tokenizers import SampleTokenizer


@pytest.fixture(scope="session", params=sample_tokenizers.KINDS)
def tokenizer(request: pytest.FixtureRequest) -> SampleTokenizer:
    return SampleTokenizer(sample_tokenizers.make(request.param))


@pytest.fixture(scope="session")
def byte_level() -> SampleTokenizer:
    return SampleTokenizer(sample_tokenizers.make("byte_level"))


@pytest.fixture(scope="session")
def llama() -> SampleTokenizer:
    return SampleTokenizer(sample_tokenizers.make("llama", adds_bos=True))


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder whose tokenizer is a trained SentencePiece model, as Llama 2's was published."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample_tokenizers.CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}'
    )
    return folder
