"""Strictness: which keys there are, and what is said about any other."""

from __future__ import annotations

from typing import Any

import pytest
from contract_harness import error_of, parse

from paged_engine.serving.inputs import INPUTS


@pytest.mark.parametrize("source", ["sampling_parameters", "parameters"])
@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("max_token", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("Temperature", "temperature"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("top-p", "top_p"),
        ("repeat_penalty", "repetition_penalty"),
        ("guided_jsn", "guided_json"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(source: str, key: str, nearest: str) -> None:
    message = error_of(**{source: {key: 5}})
    assert f"'{key}'" in message
    assert f"did you mean '{nearest}'?" in message


@pytest.mark.parametrize("source", ["sampling_parameters", "parameters"])
@pytest.mark.parametrize(
    "key",
    ["user", "model", "prompt", "system", "echo", "foo", "banana", "stream_output", "num_beams", "x" * 1000],
)
def test_an_unknown_key_that_is_like_no_other_gets_no_suggestion(source: str, key: str) -> None:
    message = error_of(**{source: {key: 5}})
    assert key[:60] in message
    assert "did you mean" not in message


def test_an_overridden_source_is_still_checked_for_unknown_keys() -> None:
    assert "'max_token'" in error_of({"max_tokens": 3}, None, {"max_token": 5})


@pytest.mark.parametrize("key", ["stream", "text_input", "sampling_parameters"])
def test_what_only_a_tensor_can_carry_is_refused_elsewhere(key: str) -> None:
    assert error_of(None, {key: True}).startswith(f"{key} is an input tensor of its own")


def test_reserved_request_parameters_are_left_alone() -> None:
    parsed = parse(
        None,
        None,
        {
            "id": "x",
            "timeout": 5,
            "priority": 9,
            "sequence_id": 3,
            "sequence_start": True,
            "sequence_end": True,
            "headers": "h",
            "binary_data_output": False,
            "triton_enable_empty_final_response": True,
        },
    )
    assert parsed.options.priority == 0
    assert parsed.timeout_ms == 7000


@pytest.mark.parametrize(
    "key",
    ["tool_choice", "lora_name", "logits_processors", "response_format"],
)
def test_what_does_not_exist_is_refused_by_name(key: str) -> None:
    assert error_of(None, {key: "x"}) == f"{key} is not supported by this server"


@pytest.mark.parametrize(
    ("key", "neutral", "other"),
    [
        ("beam_width", 1, 2),
        ("beam_width", 1, 10**400),
        ("length_penalty", 1.0, 0.5),
        ("end_id", 5, 6),
        ("pad_id", 2, 0),
        ("best_of", 1, 3),
        ("use_beam_search", False, True),
        ("early_stopping", "false", "true"),
        ("detokenize", True, False),
    ],
)
def test_foreign_keys_are_accepted_where_they_change_nothing(key: str, neutral: Any, other: Any) -> None:
    for value in (neutral, str(neutral)):
        parse(None, {key: value})
    assert error_of(None, {key: other}).startswith(f"{key} must be ")
    if key in {item.name for item in INPUTS}:
        parse({key: neutral})
        assert error_of({key: other}).startswith(f"{key} must be ")


@pytest.mark.parametrize(
    ("first", "second", "target"),
    [
        ({"seed": 1, "random_seed": 1}, {"seed": 1, "random_seed": 2}, "seed"),
        ({"n": 2, "num_return_sequences": 2}, {"n": 2, "num_return_sequences": 3}, "n"),
        ({"stop": ["a"], "stop_words": ["a"]}, {"stop": ["a"], "stop_words": ["b"]}, "stop"),
    ],
)
def test_two_names_of_one_thing_must_agree(
    first: dict[str, Any], second: dict[str, Any], target: str
) -> None:
    assert getattr(parse(None, first).request.sampling, target) == first[target]
    message = error_of(None, second)
    assert all(name in message for name in second)


def test_an_input_that_an_operator_has_added_is_refused_by_name() -> None:
    assert error_of({"max_token": 5}).startswith("unknown input 'max_token'; did you mean 'max_tokens'?")
