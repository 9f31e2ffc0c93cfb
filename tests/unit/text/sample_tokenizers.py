"""Small real tokenizers of every kind of decoding that causal language models use, trained on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from paged_engine.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The alphabet: ABC DEF GHIJ.",
    "Paris is the capital of France.\nIt lies on the Seine. ",
    "聪明的一休 聪明 naïve café ďábel 😀 👨‍👩‍👧",
    "  indented\n\tcode = (1 + 2) * 3;  # comment\n",
] * 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def _byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: tokens are byte strings."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_fallback(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Gemma: pieces with ▁ for a space, and byte tokens for what no piece covers."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    plain_corpus = [text for text in CORPUS if text.isascii()]
    trained.train_from_iterator(plain_corpus, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: index for index, piece in enumerate(["<unk>", BOS, EOS, *byte_tokens, *pieces])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return tokenizer


def _llama() -> tokenizers.Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _byte_fallback(decoders.Sequence(parts))


def _gemma() -> tokenizers.Tokenizer:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence(parts))


def _unigram() -> tokenizers.Tokenizer:
    """As T5 and XGLM: a Metaspace decoder, which drops the space of the first piece."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=[BOS, EOS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_piece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=["<unk>", BOS, EOS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_suffix() -> tokenizers.Tokenizer:
    """As the first GPT: a suffix marks the end of a word."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=["<unk>", BOS, EOS],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _word_level() -> tokenizers.Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    words = {word: index for index, word in enumerate(["<unk>", BOS, EOS, "the", "cat", "sat", ".", "�"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


_BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": _byte_level,
    "llama": _llama,
    "gemma": _gemma,
    "unigram": _unigram,
    "word_piece": _word_piece,
    "word_suffix": _word_suffix,
    "word_level": _word_level,
}


KINDS = tuple(_BACKENDS)


def make(kind: str, *, adds_bos: bool = False, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """transformers' tokenizer of a kind, with added tokens that are not special."""
    from transformers import PreTrainedTokenizerFast

    backend = _BACKENDS[kind]()
    added = ["  pad  ", "é\ufffd", '."\n']
    backend.add_tokens([AddedToken(content, normalized=False) for content in added])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=chat_template,
        model_max_length=64,
    )


class SampleTokenizer(Tokenizer):
    """A tokenizer whose vocabulary the tests can look into."""

    def piece_of(self, token_id: int) -> str | None:
        piece: str | None = self.hf_tokenizer.backend_tokenizer.id_to_token(token_id)
        return piece

    def id_of(self, piece: str) -> int:
        token_id = self.hf_tokenizer.backend_tokenizer.token_to_id(piece)
        assert token_id is not None, f"no token {piece!r}"
        return int(token_id)

    def byte_ids(self, values: bytes) -> list[int]:
        """Each byte as a token of its own."""
        if self.hf_tokenizer.backend_tokenizer.token_to_id("<0x00>") is not None:
            return [self.id_of(f"<0x{value:02X}>") for value in values]
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        alphabet = printable + [0x100 + i for i in range(256 - len(printable))]
        order = printable + [value for value in range(256) if value not in printable]
        return [self.id_of(chr(alphabet[order.index(value)])) for value in values]
