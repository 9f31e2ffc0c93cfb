"""How small each architecture is made: settings for transformers' own configuration classes.

The common settings carry every name that any of the classes uses for a size; a class ignores those it does not know.
What an architecture needs beyond them, or has to leave out, stands under its model_type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 128
MAX_POSITIONS = 256

OMIT = object()
"""As a value: leave the class's own default."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": MAX_POSITIONS,
    "is_decoder": True,  # what BERT and its kin are asked to be
    "sliding_window": 6,
    # widths and numbers of layers
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "num_hidden_layers": 2,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dff": 48,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 16,
    "rotary_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "zero_expert_num": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    # layers with a state
    "linear_num_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}

_VISION_OR_AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "depth": 1,
    "num_heads": 4,
    "out_hidden_size": 32,
    "encoder_layers": 1,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "d_model": 32,
}
"""The encoders beside a language model: built, never run."""

_TWO_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_WIDE_AS_HEADS = {"head_dim": 8}
"""For classes whose heads together are as wide as the hidden size, whatever head_dim says."""
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
"""Multi-head latent attention has as many key heads as query heads; its head_dim is the rotary part."""
_SHARED_EXPERT = {"n_shared_experts": 1, "first_k_dense_replace": 1}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bitnet": _WIDE_AS_HEADS,
    "blt": {"encoder_hash_byte_group_vocab": 64, **_WIDE_AS_HEADS},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, **_TWO_WINDOWS},
    "cohere2_moe": {"logit_scale": 0.25, **_TWO_WINDOWS},
    "cohere_compass_text": {
        "head_dim": 8,
        "logit_scale": 0.25,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        **_TWO_WINDOWS,
    },
    "dbrx": {
        "n_heads": 4,
        "head_dim": 8,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, **_SHARED_EXPERT},
    "deepseek_v32": _LATENT,
    "dots1": {**_SHARED_EXPERT, **_TWO_WINDOWS},
    "dots3_note": {
        "vision_config": {
            **_VISION_OR_AUDIO,
            "pyramid_num_routed": [-1],
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {**_VISION_OR_AUDIO, "adapter_input_size": 32, "adapter_out_dim": 32},
        **_LATENT,
    },
    "dots3_note_text": _LATENT,
    "exaone4": _TWO_WINDOWS,
    "falcon": {"head_dim": OMIT},
    "fuyu": _WIDE_AS_HEADS,
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, **_TWO_WINDOWS},
    "gemma3": {**_TWO_WINDOWS},
    "gemma3_text": {"query_pre_attn_scalar": 24, **_TWO_WINDOWS},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_assistant": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    "glm4_moe_lite": {**_LATENT, **_SHARED_EXPERT},
    "glm_moe_dsa": _LATENT,
    "gpt2": {"n_inner": 48},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 6},
    "gpt_neox_japanese": _WIDE_AS_HEADS,
    "gpt_oss": _TWO_WINDOWS,
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 4.0},
    "granite_swa": {"attention_multiplier": 0.3},
    "granitemoe": {"attention_multiplier": 0.3},
    "granitemoe_swa": {"attention_multiplier": 0.3},
    "granitemoeshared": {"attention_multiplier": 0.3},
    "helium": _WIDE_AS_HEADS,
    "hy_v4": _LATENT,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    # A window that its attention does not know would still shorten the cache of transformers' own `generate`.
    "llama": {"hidden_size": 48, "num_attention_heads": 6, "sliding_window": None},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 4},
    "minicpm3": _LATENT,
    "mllama": {"cross_attention_layers": [1], **_WIDE_AS_HEADS},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "modernbert-decoder": _WIDE_AS_HEADS,
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "olmo3": _TWO_WINDOWS,
    "olmoe": {"sliding_window": None, **_WIDE_AS_HEADS},
    "persimmon": _WIDE_AS_HEADS,
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": None},
    "prophetnet": {"num_hidden_layers": OMIT},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "feed_forward_size": 48},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": 32,
        "shape_embed_dim": 8,
        "shape_vocab_size": 32,
    },
    "sarvam_mla": _LATENT,
    "stablelm": _WIDE_AS_HEADS,
    "xlnet": {"max_position_embeddings": OMIT, "d_head": 8},
    "xlstm": {"v_head_dim": OMIT},
    "xmod": {"default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {"num_hidden_layers": 5, "num_key_value_heads": 4, "head_dim": OMIT},
    "zamba2": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 2, "router_hidden_size": 16},
}
"""By model_type: what differs from the common settings."""


def settings_of(model_type: str, parts: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that make a tiny configuration.

    Args:
        model_type: transformers' name of the architecture.
        parts: the configurations inside its configuration (`sub_configs` of the class), by name.
        overrides: what the caller wants otherwise.
    """
    settings = {**COMMON, **ARCHITECTURES.get(model_type, {}), **overrides}
    settings = {key: value for key, value in settings.items() if value is not OMIT}
    for part in parts:
        outside = any(word in part for word in ("vision", "audio", "vq"))
        if part not in settings and part not in ("attn_config", "ffn_config"):
            settings[part] = dict(_VISION_OR_AUDIO if outside else settings)
    return settings
