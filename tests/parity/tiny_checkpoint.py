"""A complete tiny checkpoint: random weights plus a byte-level tokenizer with a chat template, for whole-engine tests."""

from __future__ import annotations

from pathlib import Path

from tiny_models import save_tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_byte_tokenizer(folder: Path) -> None:
    """Three special tokens and one token for each byte: 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)


def save_tiny_checkpoint(folder: Path, name: str = "llama", *, seed: int = 0) -> Path:
    """Weights of the tiny model `name` (see tiny_models.py) over the byte tokenizer's vocabulary."""
    save_tiny_model(name, folder, seed=seed, overrides={"vocab_size": 320})
    save_byte_tokenizer(folder)
    return folder
