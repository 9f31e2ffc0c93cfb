"""Where a request's values come from, tensors, JSON and request parameters, and which of them wins."""

from __future__ import annotations

from typing import Any

import pytest
from contract_harness import CONTRACT, parse

from paged_engine.errors import RequestError
from paged_engine.serving.inputs import INPUTS, Role
from paged_engine.serving.sources import RawRequest


def test_a_tensor_goes_before_json_and_json_before_a_request_parameter() -> None:
    tensors, in_json, parameters = (
        {"top_k": 1},
        {"top_k": 2, "max_tokens": 2},
        {"top_k": 3, "max_tokens": 3, "seed": 3},
    )
    sampling = parse(tensors, in_json, parameters).request.sampling
    assert (sampling.top_k, sampling.max_tokens, sampling.seed) == (1, 2, 3)


def test_an_alias_in_a_stronger_source_wins_too() -> None:
    assert parse({"random_seed": 1}, {"seed": 2}).request.sampling.seed == 1
    assert parse(None, {"num_return_sequences": 2}, {"n": 3}).request.sampling.n == 2


SAMPLE_VALUES: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.25,
    "min_p": 0.125,
    "top_k": 7,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.75,
    "seed": 2**64 - 1,
    "random_seed": 11,
    "n": 2,
    "num_return_sequences": 3,
    "stop": ["a", "b"],
    "stop_words": ["c"],
    "bad_words": ["d"],
    "ignore_eos": True,
    "logprobs": 4,
    "prompt_logprobs": 5,
    "truncate_prompt_tokens": -1,
    "exclude_input_in_output": True,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_token_ids": True,
    "return_at_end": True,
    "priority": -3,
    "timeout_ms": 1234,
}


@pytest.mark.parametrize("name", [item.name for item in INPUTS if item.role in (Role.SAMPLING, Role.OPTION)])
def test_every_input_means_the_same_as_tensor_json_and_request_parameter(name: str) -> None:
    value = SAMPLE_VALUES[name]
    target = next(item.field for item in INPUTS if item.name == name)
    as_tensor = [element.encode() for element in value] if isinstance(value, list) else value
    ways = [parse({name: as_tensor}), parse(None, {name: value})]
    if not isinstance(value, list):
        ways.append(parse(None, {name: str(value)}))
    if name != "priority":  # as a request parameter it is Triton's own
        parameter = value[0] if isinstance(value, list) else str(value).lower()
        expected = value[:1] if isinstance(value, list) else value
        parsed = parse(None, None, {name: parameter})
        assert getattr(parsed.request.sampling, target, getattr(parsed.options, target, None)) == expected
    for parsed in ways:
        assert getattr(parsed.request.sampling, target, getattr(parsed.options, target, None)) == value


def test_json_alone_carries_some_keys() -> None:
    request = parse(
        None,
        {
            "logit_bias": {"5": -1.5},
            "stop_token_ids": [7, "8"],
            "allowed_token_ids": [1, 2],
            "skip_special_tokens": "false",
            "include_stop_str_in_output": 1,
            "cache_salt": "mine",
        },
    ).request
    assert request.sampling.logit_bias == {5: -1.5}
    assert request.sampling.stop_token_ids == [7, 8]
    assert request.sampling.allowed_token_ids == [1, 2]
    assert not request.sampling.skip_special_tokens
    assert request.sampling.include_stop_str_in_output
    assert request.cache_salt == "mine"


def test_null_in_json_is_a_key_left_out() -> None:
    assert (
        parse(None, {"seed": None, "temperature": None, "lora_name": None}).request.sampling.temperature
        == 1.0
    )


def test_what_a_request_leaves_open_stays_open_for_the_checkpoint_s_defaults() -> None:
    assert parse({"top_k": 5}).request.sampling.model_fields_set == {"top_k"}


@pytest.mark.parametrize("text", ['{"bad', "[1]", "null", "3", "", '"{}"', "[" * 100_000])
def test_sampling_parameters_are_a_json_object(text: str) -> None:
    with pytest.raises(RequestError, match="sampling_parameters must be"):
        CONTRACT.parse(RawRequest({"text_input": [b"a"], "sampling_parameters": [text.encode()]}), "7")


@pytest.mark.parametrize("source", ["sampling_parameters", "the request parameters"])
def test_json_of_megabytes_is_refused_unread(source: str) -> None:
    text = '{"stop_token_ids": [' + "1, " * 2_000_000 + "1]}"
    tensors = {"text_input": [b"a"]}
    raw = (
        RawRequest({**tensors, "sampling_parameters": [text.encode()]})
        if source == "sampling_parameters"
        else RawRequest(tensors, text)
    )
    with pytest.raises(RequestError, match=f"{source} must have at most 4194304 characters, got 60000"):
        CONTRACT.parse(raw, "7")


def test_the_request_shapes_of_other_clients() -> None:
    # vllm_backend's sample client, and genai-perf: numbers as strings
    sampling = parse(
        {"exclude_input_in_output": True, "stream": True},
        {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"},
        {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"},
    ).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.1, 0.95, 100)
    # NVIDIA's OpenAI frontend
    parse(
        {
            "stream": False,
            "exclude_input_in_output": True,
            "return_logprobs": False,
            "return_num_input_tokens": True,
        },
        {
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "n": 1,
            "ignore_eos": False,
            "temperature": 0.7,
            "top_p": 1,
            "logit_bias": {"50256": -100},
            "stop": ["\n"],
            "seed": 5,
            "max_tokens": 16,
        },
    )
    # TensorRT-LLM's curl
    parse(
        {
            "max_tokens": 20,
            "bad_words": [b""],
            "stop_words": [b""],
            "pad_id": 2,
            "end_id": 2,
            "beam_width": 1,
        },
    )
