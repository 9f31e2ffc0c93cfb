"""What values may be, and how an answer shall look."""

from __future__ import annotations

import math
from typing import Any

import pytest
from contract_harness import error_of, parse


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, "nan", "Infinity", "hot", "", True, [1]])
def test_a_bad_temperature_is_refused_with_its_range(value: Any) -> None:
    assert error_of(None, {"temperature": value}).startswith("temperature must be a finite number >= 0, got ")
    if isinstance(value, float):
        assert error_of({"temperature": value}).startswith("temperature must be a finite number >= 0, got ")


def test_an_error_names_a_field_as_the_client_did() -> None:
    assert error_of({"num_return_sequences": 0}).startswith(
        "num_return_sequences must be a whole number from 1"
    )
    assert error_of(None, {"random_seed": -1}).startswith("random_seed must be a whole number from 0")


@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_max_tokens_out_of_range(value: int) -> None:
    assert error_of(None, {"max_tokens": value}) == f"max_tokens must be a whole number >= 1, got {value}"


def test_prompt_controls_out_of_range() -> None:
    assert error_of({"prompt_logprobs": 101}) == (
        "prompt_logprobs must be a whole number from 0 to 100, got 101"
    )
    for value in (0, -2):
        assert error_of(None, {"truncate_prompt_tokens": value}) == (
            f"truncate_prompt_tokens must be a whole number >= 1, or -1 for as many as fit, got {value}"
        )


def test_stop_strings() -> None:
    assert parse({"stop": []}).request.sampling.stop == []
    assert parse(None, {"stop": "x"}).request.sampling.stop == ["x"]
    assert parse(None, None, {"stop": "\n"}).request.sampling.stop == ["\n"]
    assert "none of them empty" in error_of({"stop": [b""]})
    assert "none of them empty" in error_of(None, {"stop": ["a", ""]})


@pytest.mark.parametrize(("name", "limit"), [("stop", 256), ("bad_words", 4096)])
def test_lists_of_words_are_bounded(name: str, limit: int) -> None:
    words = [f"word {number}" for number in range(limit + 1)]
    assert len(getattr(parse(None, {name: words[1:]}).request.sampling, name)) == limit
    assert error_of(None, {name: words}).startswith(f"{name} must be a list of at most {limit} strings")


def test_an_empty_string_in_stop_words_and_bad_words_is_none() -> None:
    sampling = parse({"stop_words": [b""], "bad_words": [b"", b"x"]}).request.sampling
    assert (sampling.stop, sampling.bad_words) == ([], ["x"])
    sampling = parse(None, {"stop_words": "", "bad_words": ""}).request.sampling
    assert (sampling.stop, sampling.bad_words) == ([], [])


def test_logprobs_false_is_none() -> None:
    assert parse(None, {"logprobs": False}).request.sampling.logprobs is None


def test_the_deadline_of_the_request_goes_before_the_model_s() -> None:
    assert parse().timeout_ms == 7000
    assert parse({"timeout_ms": 5}).timeout_ms == 5
    assert parse({"timeout_ms": 0}).timeout_ms == 0
    assert error_of({"timeout_ms": -1}) == "timeout_ms must be a whole number >= 0, got -1"


def test_the_prompt_cannot_be_streamed() -> None:
    assert "exclude_input_in_output must be true when stream is true" in error_of(
        {"stream": True, "exclude_input_in_output": False}
    )
    assert not parse({"stream": True}).prepend_prompt
    assert not parse({"stream": True, "exclude_input_in_output": True}).prepend_prompt
    assert parse({"exclude_input_in_output": False}).prepend_prompt


def test_logprobs_are_computed_where_only_their_sum_is_wanted() -> None:
    parsed = parse({"return_cumulative_logprob": True})
    assert parsed.request.sampling.logprobs == 0
    assert not parsed.reports_logprobs
    assert parse({"return_cumulative_logprob": True, "logprobs": 3}).request.sampling.logprobs == 3
