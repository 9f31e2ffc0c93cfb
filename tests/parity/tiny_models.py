"""Tiny random checkpoints of many architectures, made from transformers' own configuration classes.

They are small enough to be built in a test, and random in every parameter (biases, norms and sinks too), with
attention far from uniform, so that a mistake anywhere shows in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB_SIZE = 128
MAX_POSITIONS = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 6},
    "llama-rope-llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-rope-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "mixtral": {"model_type": "mixtral", **_EXPERTS},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS},
    "gemma": {"model_type": "gemma", "num_key_value_heads": 1},
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        **_WINDOWS,
    },
    "gemma3_text": {"model_type": "gemma3_text", "query_pre_attn_scalar": 24, **_WINDOWS},
    "gpt_oss": {"model_type": "gpt_oss", **_EXPERTS, **_WINDOWS},
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "attention_multiplier": 0.3, "logits_scaling": 4.0},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.25, **_WINDOWS},
    "gpt2": {"model_type": "gpt2", "n_inner": 48},
    "gpt_neox": {"model_type": "gpt_neox"},
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
}
"""By a name for the test: model_type and what differs from the common tiny configuration."""


def tiny_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The configuration of the tiny model `name` (a key of TINY_MODELS, or any model_type of transformers)."""
    settings = {**_COMMON, **TINY_MODELS.get(name, {"model_type": name}), **overrides}
    return CONFIG_MAPPING[settings.pop("model_type")](**settings)


def make_tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A float32 model with every parameter drawn at random, in evaluation mode, with transformers' eager attention."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2.0 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_tiny_model(
    name: str, folder: Path, *, seed: int = 0, overrides: Mapping[str, Any] | None = None
) -> Path:
    """Save the tiny model `name` as a checkpoint folder (without tokenizer) and return the folder."""
    make_tiny_model(tiny_config(name, **(overrides or {})), seed).save_pretrained(folder)
    return folder
