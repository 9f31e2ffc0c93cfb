"""Other servers' names for structured outputs, folded into `structured_outputs`.

vLLM's older clients send `guided_json`, `guided_regex`, …; NVIDIA's OpenAI frontend for vLLM sends `guided_decoding`, a whole
object, where a client wants a particular tool called; TensorRT-LLM's clients send a type and a guide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paged_engine.errors import RequestError
from paged_engine.validation import shown

_VLLM = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_VLLM_OBJECT = "guided_decoding"
_VLLM_IMPLEMENTATION = frozenset({"backend", "backend_was_auto", "disable_fallback"})
"""Fields of that object which say who follows the guide, and not what it is."""
_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_TENSORRT_LLM = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}

GUIDE_KEYS = frozenset({*_VLLM, _VLLM_OBJECT, _TYPE, _GUIDE})
"""The keys that `fold_guides` understands."""


def fold_guides(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with whatever guide they have under `structured_outputs`.

    Raises:
        RequestError: INVALID_ARG for more than one guide, an unknown type, or a type without its guide.
    """
    folded = {key: value for key, value in values.items() if key not in GUIDE_KEYS}
    guides = {key: {_VLLM[key]: values[key]} for key in _VLLM if key in values}
    if values.get(_VLLM_OBJECT) is not None:
        guides[_VLLM_OBJECT] = _vllm_guide(values[_VLLM_OBJECT])
    if _TYPE in values or _GUIDE in values:
        guides[_TYPE] = _tensorrt_llm_guide(values)
    if "structured_outputs" in values:
        guides["structured_outputs"] = values["structured_outputs"]
    if len(guides) > 1:
        raise RequestError.invalid(f"only one guide can be followed, got {' and '.join(sorted(guides))}")
    if guides:
        folded["structured_outputs"] = next(iter(guides.values()))
    return folded


def _vllm_guide(value: object) -> dict[str, Any]:
    """What is set in a GuidedDecodingParams of vLLM, or in its JSON text, which has every field."""
    try:
        fields = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise RequestError.invalid(f"{_VLLM_OBJECT} must be an object, or its JSON text, got {shown(value)}")
    return {
        name: field
        for name, field in fields.items()
        if field is not None
        and name not in _VLLM_IMPLEMENTATION
        and not (name == "disable_additional_properties" and field is False)
    }


def _tensorrt_llm_guide(values: Mapping[str, Any]) -> dict[str, Any]:
    guide_type = values.get(_TYPE)
    if not isinstance(guide_type, str) or guide_type not in _TENSORRT_LLM:
        raise RequestError.invalid(f"{_TYPE} must be {', '.join(_TENSORRT_LLM)}, got {shown(guide_type)}")
    form = _TENSORRT_LLM[guide_type]
    if form == "json_object":
        return {form: True}
    if _GUIDE not in values:
        raise RequestError.invalid(f"{_GUIDE} must be given with {_TYPE} {guide_type}")
    return {form: values[_GUIDE]}
