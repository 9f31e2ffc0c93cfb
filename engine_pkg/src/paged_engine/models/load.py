"""Loads a checkpoint through transformers, set up for paged attention, or says why it cannot be served."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from paged_engine.config import EngineConfig
from paged_engine.errors import ConfigurationError
from paged_engine.models.checkpoint import check_configuration_file, check_weight_files
from paged_engine.models.gguf import convert_gguf
from paged_engine.models.hook import NO_ATTENTION_INTERFACE, PROBE_NAME, AttentionLayer, register
from paged_engine.models.locate import locate_checkpoint
from paged_engine.models.probe import find_attention_layers
from paged_engine.models.progress import logged_progress
from paged_engine.models.rotary import check_rotary_embeddings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, and what the rest of the engine wants to know about it."""

    module: PreTrainedModel
    hf_config: PretrainedConfig
    generation_config: GenerationConfig
    layers: tuple[AttentionLayer, ...]
    """The attention layers in the order in which the model runs them."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    """Width of the logits; may be larger than the tokenizer's vocabulary."""
    max_seq_len: int
    """Tokens of the longest sequence: the configured number, or the checkpoint's."""
    eos_token_ids: frozenset[int]
    """The end-of-sequence tokens of generation_config, or of the configuration where that names none."""


def resolve_device(device: str) -> torch.device:
    """The device that the parameter `device` (auto, cpu, cuda or cuda:N) means on this machine.

    Raises:
        ConfigurationError: there is no such GPU.
    """
    num_gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    resolved = torch.device(device)
    if resolved.type == "cuda":
        resolved = torch.device("cuda", resolved.index or 0)
        if resolved.index >= num_gpus:
            raise ConfigurationError(
                f"device must be one of this machine's {num_gpus} GPUs (cuda:N) or cpu, got {device}"
            )
    return resolved


def resolve_checkpoint(model: str, dtype: str = "auto") -> str:
    """Turn the parameter `model` into what transformers loads: a checkpoint folder or a hub id.

    A .gguf file is converted into a folder below $CACHE_DIR (the user's cache folder if unset), once.

    Raises:
        ConfigurationError: there is no such folder, it holds no checkpoint, or the GGUF file cannot be read.
    """
    path = locate_checkpoint(model)
    if path is None:
        return model
    if path.suffix == ".gguf" and path.is_file():
        return str(convert_gguf(path, _cache_dir() / "models", "bfloat16" if dtype == "auto" else dtype))
    return str(path)


def load_model(config: EngineConfig, device: torch.device) -> LoadedModel:
    """Load the checkpoint onto `device` and check that it can be served over a paged cache.

    Raises:
        ConfigurationError: the checkpoint is missing, damaged or incomplete, its architecture is unknown or cannot be
            served rightly, or max_seq_len is more than it can do. The message says which, and what to do.
    """
    source = resolve_checkpoint(config.model, config.dtype)
    register()
    module = _load_module(config, source, _load_configuration(config, source), device)
    text_config = module.config.get_text_config()
    max_seq_len = _max_seq_len(config, module, getattr(text_config, "max_position_embeddings", None))
    layers = find_attention_layers(module, max_seq_len)
    generation_config = getattr(module, "generation_config", None) or GenerationConfig()
    return LoadedModel(
        module=module,
        hf_config=module.config,
        generation_config=generation_config,
        layers=layers,
        dtype=module.dtype,
        device=device,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        max_seq_len=max_seq_len,
        eos_token_ids=_token_ids(generation_config.eos_token_id) or _token_ids(text_config.eos_token_id),
    )


def _cache_dir() -> Path:
    """Where converted checkpoints go."""
    if given := os.environ.get("CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paged_engine"


def _load_configuration(config: EngineConfig, source: str) -> PretrainedConfig:
    """The checkpoint's configuration, once it and the files with the weights have passed what can be checked early."""
    folder = Path(source)
    if folder.is_dir():
        check_configuration_file(folder)
    try:
        hf_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # what is wrong with a configuration shows in exceptions of any kind
        raise _cannot_load(config, error) from error
    _check_architecture(hf_config)
    if folder.is_dir():
        check_weight_files(folder)
    return hf_config


def _load_module(
    config: EngineConfig, source: str, hf_config: PretrainedConfig, device: torch.device
) -> PreTrainedModel:
    """Load weights in their dtype straight onto the device; nothing may be missing."""
    try:
        with logged_progress(_log):
            module, info = AutoModelForCausalLM.from_pretrained(
                source,
                config=hf_config,
                dtype="auto" if config.dtype == "auto" else getattr(torch, config.dtype),
                device_map={"": device},
                attn_implementation=PROBE_NAME,
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged checkpoint fails in any reader, each with exceptions of its own
        if isinstance(error, KeyError) and error.args == (PROBE_NAME,):  # its own table of attention classes
            raise ConfigurationError(
                f"the model (type '{hf_config.model_type}') cannot be served: {NO_ATTENTION_INTERFACE}"
            ) from error
        raise _cannot_load(config, error) from error
    _check_complete(config, info)
    if getattr(module, "_is_stateful", False):
        raise ConfigurationError(
            f"{type(module).__name__} cannot be served over a paged cache: it has recurrent layers, whose state pages "
            "do not hold"
        )
    return module.eval().requires_grad_(False)


def _cannot_load(config: EngineConfig, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"cannot load the model {config.model}: {type(error).__name__}: {error}")


def _check_architecture(hf_config: PretrainedConfig) -> None:
    """Refuse by its configuration what is no decoder-only language model, before any weights are read."""
    name = f"the model (type '{hf_config.model_type}')"
    if hf_config.is_encoder_decoder:
        raise ConfigurationError(
            f"{name} cannot be served: it is an encoder-decoder, only decoders are supported"
        )
    remote = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    if not remote and type(hf_config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigurationError(
            f"{name} cannot be served: transformers has no causal language model of this type"
        )


def _check_complete(config: EngineConfig, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers; a server must not."""
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key, *_ in info["mismatched_keys"])
    if missing:
        raise ConfigurationError(
            f"the checkpoint {config.model} is incomplete: {len(missing)} weights are missing or of another shape, "
            f"among them {', '.join(missing[:3])}"
        )
    if info["unexpected_keys"]:
        unexpected = sorted(info["unexpected_keys"])
        _log.warning(
            "%d weights of the checkpoint are not used, among them %s",
            len(unexpected),
            ", ".join(unexpected[:3]),
        )


def _max_seq_len(config: EngineConfig, module: PreTrainedModel, max_positions: int | None) -> int:
    """The longest sequence to serve, checked against what the model can do."""
    if max_positions is not None and max_positions < 1:  # how some say that there is no limit
        max_positions = None
    max_seq_len = config.max_seq_len or max_positions
    if max_seq_len is None:
        raise ConfigurationError("the checkpoint does not say how long a sequence may be: set max_seq_len")
    check_rotary_embeddings(module, max_seq_len)
    if max_positions is not None and max_seq_len > max_positions:
        raise ConfigurationError(
            f"max_seq_len must be at most {max_positions}, the model's max_position_embeddings, got {max_seq_len}"
        )
    return max_seq_len


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
