"""The checkpoint that most servers in tests serve: it loads and runs in no time, and says nonsense."""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_tiny_checkpoint(folder: Path, tokenizer_of: Path) -> None:
    """Write a Llama of two small layers with random weights, always the same.

    Args:
        folder: where to; must exist.
        tokenizer_of: the checkpoint whose tokenizer and chat template it shall have.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_of / name, folder / name)
