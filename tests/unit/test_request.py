"""SamplingParams: values in range whatever JSON or tensors brought, and refusals that name field, value and range."""

import math

import pytest

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.request import SamplingParams


def refusal(**values: object) -> str:
    with pytest.raises(RequestError) as caught:
        SamplingParams.parse(values)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "nan", "Infinity", -3, "x", None, True, [1.0]]
)
def test_numbers_are_finite_and_in_range(field: str, value: object) -> None:
    message = refusal(**{field: value})
    assert message.startswith(f"{field} must be ")
    assert ", got " in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**63), ("max_tokens", 1.5), ("max_tokens", "4.0"),
        ("min_tokens", -1), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", "many"), ("min_p", 1.1),
        ("repetition_penalty", 0), ("seed", -1), ("seed", 2**64), ("n", 0), ("n", 1000), ("logprobs", -1), ("logprobs", 10**6),
        ("prompt_logprobs", -1), ("prompt_logprobs", 101), ("prompt_logprobs", True), ("prompt_logprobs", "all"),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 1.5),
        ("ignore_eos", "yes"), ("stop", 3), ("stop", [1]), ("stop_token_ids", ["x"]), ("allowed_token_ids", []),
        ("logit_bias", {"5": "nan"}), ("logit_bias", {"x": 1.0}), ("logit_bias", [1]), ("logit_bias", {"5": 101}),
    ],
)  # fmt: skip
def test_out_of_range_values_name_their_field(field: str, value: object) -> None:
    assert refusal(**{field: value}).startswith(f"{field} must be ")


def test_nan_is_called_nan() -> None:
    assert refusal(temperature=math.nan) == "temperature must be a finite number >= 0, got NaN"


def test_an_unknown_field_suggests_the_nearest() -> None:
    assert refusal(max_token=5) == "unknown sampling parameter 'max_token'; did you mean 'max_tokens'?"


def test_an_empty_stop_string_is_refused() -> None:
    assert "stop" in refusal(stop=["a", ""])


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert "min_tokens must be at most max_tokens = 3, got 4" in refusal(min_tokens=4, max_tokens=3)


def test_a_huge_value_is_shown_shortened() -> None:
    assert len(refusal(temperature="9" * 10_000 + "x")) < 200


def test_of_a_long_list_it_is_said_how_long_it_is() -> None:
    message = refusal(stop=["x"] * 300)
    assert "at most 256 strings" in message
    assert message.endswith("… (300 elements)")


def test_a_bias_out_of_range_is_shown_with_its_token() -> None:
    assert refusal(logit_bias={"7": 1, "8": -100.5}).endswith("from -100 to 100, got -100.5 for token 8")
    assert refusal(logit_bias={"7": math.nan}).endswith("got NaN for token 7")


@pytest.mark.parametrize("top_k", [10**9, 0, -1, 1, "50"])
def test_every_sensible_top_k_is_taken(top_k: object) -> None:
    assert SamplingParams.parse({"top_k": top_k}).top_k == int(str(top_k))


def test_numbers_and_booleans_may_be_written_as_strings() -> None:
    sampling = SamplingParams.parse(
        {"max_tokens": "100", "temperature": "0", "ignore_eos": "true", "seed": str(2**64 - 1)}
    )
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos, sampling.seed) == (
        100,
        0.0,
        True,
        2**64 - 1,
    )


def test_a_bare_string_is_a_list_of_one() -> None:
    assert SamplingParams.parse({"stop": "END"}).stop == ["END"]


def test_token_ids_as_json_keys_become_numbers() -> None:
    assert SamplingParams.parse({"logit_bias": {"17": -100, "4": 2.5}}).logit_bias == {17: -100.0, 4: 2.5}


def test_it_remembers_which_fields_were_given() -> None:
    assert SamplingParams.parse({"temperature": 1.0}).model_fields_set == {"temperature"}
