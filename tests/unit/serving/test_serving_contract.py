"""What a request means: sources and their precedence, aliases, strictness, messages."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from paged_engine.config import EngineConfig
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.request import Chat
from paged_engine.serving.contract import Contract, ParsedRequest
from paged_engine.serving.inputs import INPUTS, Role
from paged_engine.serving.sources import RawRequest

CONFIG = EngineConfig(model="unused", default_timeout_ms=7000, max_prompt_bytes=1000)
CONTRACT = Contract(CONFIG, eos_token_ids=frozenset({2, 5}))


def parse(
    tensors: dict[str, Any] | None = None,
    sampling_parameters: object = None,
    parameters: dict[str, Any] | None = None,
) -> ParsedRequest:
    elements = {"text_input": b"hi"} | (tensors or {})
    if sampling_parameters is not None:
        elements["sampling_parameters"] = json.dumps(sampling_parameters).encode()
    listed = {name: value if isinstance(value, list) else [value] for name, value in elements.items()}
    return CONTRACT.parse(RawRequest(listed, json.dumps(parameters or {})), "7")


def parse_chat(sampling_parameters: dict[str, Any]) -> ParsedRequest:
    tensors = {
        "messages": [b'[{"role": "user", "content": "hi"}]'],
        "sampling_parameters": [json.dumps(sampling_parameters).encode()],
    }
    return CONTRACT.parse(RawRequest(tensors), "7")


def error_of(*arguments: Any, **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(*arguments, **more)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


# The prompt


def test_a_prompt_is_text_token_ids_or_messages() -> None:
    def prompt(**tensors: Any) -> Any:
        return CONTRACT.parse(RawRequest(tensors), "7").request.prompt

    assert prompt(text_input=["é聪😀".encode()]) == "é聪😀"
    assert prompt(text_input=[b""]) == ""
    assert prompt(input_ids=[1, 2, 3]) == [1, 2, 3]
    assert prompt(input_ids=[]) == []
    messages = [{"role": "user", "content": "hi"}]
    assert prompt(messages=[json.dumps(messages).encode()]) == Chat(messages)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({}, "none of them"),
        ({"text_input": [b"a"], "input_ids": [1]}, "text_input and input_ids"),
        ({"text_input": [b"a"], "messages": [b"[]"]}, "text_input and messages"),
    ],
)
def test_there_is_exactly_one_prompt(tensors: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError, match=f"exactly one of text_input, input_ids and messages, got {found}"):
        CONTRACT.parse(RawRequest(tensors), "7")


@pytest.mark.parametrize("value", [b"[]", b'"hi"', b"{}", b'["hi"]', b"[", b"null", b"[" * 100])
def test_messages_are_a_json_list_of_objects(value: bytes) -> None:
    with pytest.raises(RequestError, match="messages must be"):
        CONTRACT.parse(RawRequest({"messages": [value]}), "7")


def test_text_is_utf_8() -> None:
    assert "text_input must be UTF-8 text, got invalid bytes at position 1" in error_of(
        {"text_input": b"a\xff"}
    )
    assert error_of({"stop": [b"ok", b"\xff"]}).startswith("stop must be UTF-8")


def test_a_tensor_of_one_element_has_one_element() -> None:
    for elements in ([], [b"a", b"b"]):
        message = error_of({"text_input": elements})
        assert message == f"text_input must have exactly one element, got {len(elements)}"


@pytest.mark.parametrize("tensors", [{"text_input": [b"x" * 1001]}, {"input_ids": [1] * 251}])
def test_the_size_of_a_prompt_is_looked_at_first(tensors: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, match=r"prompt too long: .* has 100\d bytes, at most max_prompt_bytes = 1000"
    ):
        CONTRACT.parse(RawRequest(tensors), "7")


# Sources and precedence


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


def test_a_conversation_brings_what_its_template_wants() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    chat = parse_chat({"chat_template_kwargs": {"enable_thinking": False}, "tools": tools}).request.prompt
    assert chat == Chat([{"role": "user", "content": "hi"}], tools, {"enable_thinking": False})


@pytest.mark.parametrize(("key", "value"), [("tools", {}), ("tools", ["f"]), ("chat_template_kwargs", [])])
def test_what_a_template_cannot_take_is_refused(key: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{key} must be"):
        parse_chat({key: value})


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


@pytest.mark.parametrize("prompt", ["text_input", "input_ids"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("tools", [{"name": "f"}]), ("tools", "all"), ("chat_template_kwargs", {"thinking": True})],
)
def test_what_only_a_chat_template_reads_is_refused_beside_other_prompts(
    prompt: str, key: str, value: object
) -> None:
    raw = RawRequest(
        {
            prompt: [b"hi"] if prompt == "text_input" else [1, 2],
            "sampling_parameters": [json.dumps({key: value}).encode()],
        }
    )
    with pytest.raises(
        RequestError, match=f"^INVALID_ARG: {key} must be left out where the prompt is {prompt}, got"
    ) as caught:
        CONTRACT.parse(raw, "7")
    assert "send the prompt as messages" in caught.value.message


@pytest.mark.parametrize("nothing", [{"tools": []}, {"tools": None}, {"chat_template_kwargs": {}}])
def test_no_tools_at_all_go_with_any_prompt(nothing: dict[str, Any]) -> None:
    assert parse({}, nothing).request.prompt == "hi"


# Strictness


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
    ["guided_decoding", "lora_name", "logits_processors", "response_format"],
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


# Values


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


# Options


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


def test_an_input_that_an_operator_has_added_is_refused_by_name() -> None:
    assert error_of({"max_token": 5}).startswith("unknown input 'max_token'; did you mean 'max_tokens'?")


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
