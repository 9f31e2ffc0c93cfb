"""Tiny random checkpoints of many architectures, made from transformers' own configuration classes.

They are small enough to be built in a test, and random in every parameter (biases, norms and sinks too), with
attention far from uniform, so that a mistake anywhere shows in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_settings import MAX_POSITIONS as MAX_POSITIONS
from tiny_settings import VOCAB_SIZE as VOCAB_SIZE
from tiny_settings import settings_of
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TINY_MODELS: Mapping[str, dict[str, Any]] = {
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
}
"""Variants of an architecture that tests know by a name of their own: model_type and what differs."""


def tiny_config(name: str, **overrides: Any) -> PretrainedConfig:
    """The configuration of the tiny model `name`: a key of TINY_MODELS, or any model_type of transformers."""
    settings = {"model_type": name, **TINY_MODELS.get(name, {}), **overrides}
    model_type = settings.pop("model_type")
    configuration = CONFIG_MAPPING[model_type]
    return configuration(**settings_of(model_type, configuration.sub_configs, settings))


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
