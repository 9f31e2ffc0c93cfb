"""Structured outputs under the names of several servers mean the same."""

import json
from typing import Any

import pytest

from paged_engine.errors import RequestError
from paged_engine.request import SamplingParams
from paged_engine.serving.guides import fold_guides

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
VLLM_OBJECT: dict[str, Any] = {
    **dict.fromkeys(
        (
            "json",
            "regex",
            "choice",
            "grammar",
            "json_object",
            "backend",
            "whitespace_pattern",
            "structural_tag",
        )
    ),
    **dict.fromkeys(
        ("backend_was_auto", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"),
        False,
    ),
}
"""vLLM's GuidedDecodingParams with nothing set."""


@pytest.mark.parametrize(
    ("values", "folded"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["x", "y"]}, {"choice": ["x", "y"]}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_decoding_guide_type": "json"}, {"json_object": True}),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"}, {"json": "{}"}),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a"}, {"regex": "a"}),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "g"}, {"grammar": "g"}),
        ({"guided_decoding": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_decoding": '{"choice": ["x"]}'}, {"choice": ["x"]}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ],
)
def test_every_name_becomes_one(values: dict[str, Any], folded: dict[str, Any]) -> None:
    assert fold_guides({"temperature": 0, **values}) == {"temperature": 0, "structured_outputs": folded}


def test_what_nvidias_frontend_sends_for_a_tool() -> None:
    sent = json.dumps({**VLLM_OBJECT, "json": json.dumps(SCHEMA), "backend": "auto"})
    folded = fold_guides({"guided_decoding": sent})
    wanted = SamplingParams.parse(folded).structured_outputs
    assert wanted is not None
    assert wanted.json_schema == json.dumps(SCHEMA)


@pytest.mark.parametrize("setting", [{"whitespace_pattern": " "}, {"disable_additional_properties": True}])
def test_a_setting_that_does_not_exist_here_is_refused(setting: dict[str, Any]) -> None:
    folded = fold_guides({"guided_decoding": {**VLLM_OBJECT, "regex": "a", **setting}})
    with pytest.raises(RequestError, match="structured_outputs must be an object with exactly one of"):
        SamplingParams.parse(folded)


def test_without_a_guide_nothing_changes() -> None:
    assert fold_guides({"temperature": 0, "guided_decoding": None}) == {"temperature": 0}
    assert fold_guides({"temperature": 0}) == {"temperature": 0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"guided_json": {}, "guided_regex": "a"},
            "only one guide can be followed, got guided_json and guided_regex",
        ),
        ({"structured_outputs": {}, "guided_regex": "a"}, "only one guide"),
        ({"guided_decoding": {"regex": "a"}, "guided_regex": "a"}, "only one guide"),
        ({"guided_decoding": "{bad"}, "guided_decoding must be an object, or its JSON text, got {bad"),
        ({"guided_decoding": [1]}, "guided_decoding must be an object"),
        ({"guided_decoding_guide_type": "xml"}, "must be json, json_schema, regex, ebnf_grammar, got xml"),
        ({"guided_decoding_guide": "a"}, "guided_decoding_guide_type must be"),
        ({"guided_decoding_guide_type": "regex"}, "guided_decoding_guide must be given"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        fold_guides(values)


@pytest.mark.parametrize(
    "value", [{}, {"regex": "a", "choice": ["b"]}, {"regexp": "a"}, "{bad", 5, {"choice": []}]
)
def test_a_form_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="structured_outputs must be an object with exactly one of"):
        SamplingParams.parse({"structured_outputs": value})
