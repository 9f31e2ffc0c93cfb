"""Sequences longer than what a rotary embedding was trained for, or than a window, beside short ones: as transformers does.

Each of the long prompts comes in chunks while the short ones decode, and one of them crosses the limit by decoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from architecture_survey import NUM_GREEDY, check_parity
from tiny_models import MAX_POSITIONS, save_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

ORIGINAL = 32
"""Positions before the rotary embedding was stretched."""
LENGTHS = (150, ORIGINAL - 7, 9)
THETA = 10000.0

YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0}
DEFAULT = {"rope_type": "default", "rope_theta": THETA}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": THETA, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": THETA,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 2 * ORIGINAL,
}
STATIC: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", DEFAULT),
    "linear": ("llama", LINEAR),
    "llama3": ("llama", LLAMA3),
    "yarn": ("llama", YARN),
    "yarn, not truncated, attention factor": ("llama", {**YARN, "truncate": False, "attention_factor": 1.3}),
    "yarn of DeepSeek": ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}),
    "yarn, sinks, windows": ("gpt_oss", YARN),
    "partial": ("phi", {**DEFAULT, "partial_rotary_factor": 0.5}),
    "partial, yarn": ("glm4", {**YARN, "partial_rotary_factor": 0.5}),
    "one for windows, one for all": ("gemma3_text", {"sliding_attention": DEFAULT, "full_attention": LINEAR}),
}


@pytest.mark.parametrize(("model_type", "rope"), STATIC.values(), ids=list(STATIC))
def test_beyond_the_original_length(tmp_path: Path, model_type: str, rope: dict[str, Any]) -> None:
    check_parity(save_tiny_model(model_type, tmp_path, overrides={"rope_parameters": rope}), LENGTHS)


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("mistral", {}),
        ("gemma2", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}),
        ("exaone4", {}),
        ("olmo3", {}),
        ("modernbert-decoder", {}),
    ],
)
@pytest.mark.parametrize("window", [1, 5, 13])
def test_beyond_the_window(tmp_path: Path, model_type: str, overrides: dict[str, Any], window: int) -> None:
    folder = save_tiny_model(model_type, tmp_path, overrides={"sliding_window": window, **overrides})
    check_parity(folder, (61, window, 3))


def test_longrope_up_to_its_original_length(tmp_path: Path) -> None:
    """Beyond it transformers changes the frequencies of all sequences of a call: refused, see test_refusals.py."""
    sizes = {"head_dim": 8, "partial_rotary_factor": 1.0}
    rope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 2 * ORIGINAL}
    folder = save_tiny_model("phi3", tmp_path, overrides={**sizes, **rope})
    check_parity(folder, (2 * ORIGINAL - NUM_GREEDY, 3), max_seq_len=2 * ORIGINAL)


def test_dynamic_up_to_its_original_length(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path, overrides={"rope_parameters": DYNAMIC})
    check_parity(folder, (MAX_POSITIONS - NUM_GREEDY, 3))
