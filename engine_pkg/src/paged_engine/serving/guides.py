"""Other servers' names for structured outputs, folded into `structured_outputs`.

vLLM's older clients send `guided_json`, `guided_regex`, …; TensorRT-LLM's send a type and a guide.
"""

from __future__ import annotations

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
_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_TENSORRT_LLM = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}

GUIDE_KEYS = frozenset({*_VLLM, _TYPE, _GUIDE})
"""The keys that `fold_guides` understands."""


def fold_guides(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values with whatever guide they have under `structured_outputs`.

    Raises:
        RequestError: INVALID_ARG for more than one guide, an unknown type, or a type without its guide.
    """
    folded = {key: value for key, value in values.items() if key not in GUIDE_KEYS}
    guides = {key: {_VLLM[key]: values[key]} for key in _VLLM if key in values}
    if _TYPE in values or _GUIDE in values:
        guides[_TYPE] = _tensorrt_llm_guide(values)
    if "structured_outputs" in values:
        guides["structured_outputs"] = values["structured_outputs"]
    if len(guides) > 1:
        raise RequestError.invalid(f"only one guide can be followed, got {' and '.join(sorted(guides))}")
    if guides:
        folded["structured_outputs"] = next(iter(guides.values()))
    return folded


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
