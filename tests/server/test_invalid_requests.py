"""Requests that cannot be answered: each gets an error that says why, and nobody else notices."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from triton_server import TritonServer
from wire import (
    SLOW,
    Answer,
    GrpcStream,
    HttpRequest,
    at_once,
    generate,
    generate_stream,
    grpc_answer,
    grpc_infer,
    tensor,
)

PROMPT = {"text_input": "Hello there"}
NEIGHBOUR = {
    "text_input": "A request next door",
    "max_tokens": 24,
    "ignore_eos": True,
    "stream": True,
    "seed": 3,
}

NUMBERS: dict[str, Sequence[float]] = {
    "max_tokens": [0, -1, -(2**63)],
    "min_tokens": [-1],
    "temperature": [-1.0, -0.001],
    "top_p": [0.0, 1.5, -1.0],
    "min_p": [-0.1, 1.1],
    "top_k": [-2],
    "repetition_penalty": [0.0, -1.0],
    "presence_penalty": [2.5, -2.5],
    "frequency_penalty": [2.5, -2.5],
    "n": [0, -1, 129],
    "num_return_sequences": [0],
    "logprobs": [-1, 101],
    "prompt_logprobs": [-1, 101],
    "truncate_prompt_tokens": [0, -2],
    "timeout_ms": [-1],
    "beam_width": [2, 0],
    "length_penalty": [0.5],
    "end_id": [7],
    "pad_id": [-1],
}
"""Input -> values out of its range."""
NOT_FINITE = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

WORDS: list[tuple[dict[str, Any], list[str]]] = [
    # (what is added to the prompt, what the message must name)
    ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens", "max_tokens", "4", "5"]),
    ({"stop": [""]}, ["stop", "empty"]),
    ({"stop": ["a", ""]}, ["stop", "empty"]),
    ({"seed": 1, "random_seed": 2}, ["seed", "random_seed"]),
    ({"n": 1, "num_return_sequences": 2}, ["n and num_return_sequences"]),
    ({"stream": True, "exclude_input_in_output": False}, ["exclude_input_in_output", "stream"]),
    ({"input_ids": [1, 2]}, ["exactly one of", "text_input", "input_ids"]),
    ({"messages": '[{"role": "user", "content": "Hi"}]'}, ["exactly one of", "text_input", "messages"]),
]

SAMPLING_PARAMETERS: list[tuple[str, list[str]]] = [
    ('{"bad', ["sampling_parameters", "JSON"]),
    ("[1]", ["sampling_parameters", "object", "[1]"]),
    ("null", ["sampling_parameters", "object", "null"]),
    ("", ["sampling_parameters", "JSON"]),
    ('"temperature"', ["sampling_parameters", "object"]),
    ("[" * 100_000, ["sampling_parameters", "JSON"]),
    ('{"max_token": 5}', ["max_token", "max_tokens"]),
    ('{"temprature": 0}', ["temprature", "temperature"]),
    ('{"zzz": 0}', ["zzz"]),
    ('{"text_input": "Hi"}', ["text_input"]),
    ('{"stream": true}', ["stream"]),
    ('{"sampling_parameters": "{}"}', ["sampling_parameters"]),
    ('{"temperature": "hot"}', ["temperature", "hot"]),
    ('{"temperature": "nan"}', ["temperature", "finite"]),
    ('{"temperature": NaN}', ["temperature", "finite"]),
    ('{"temperature": Infinity}', ["temperature", "finite"]),
    ('{"temperature": "Infinity"}', ["temperature", "finite"]),
    ('{"temperature": true}', ["temperature"]),
    ('{"temperature": []}', ["temperature"]),
    ('{"temperature": {}}', ["temperature"]),
    ('{"top_p": "1.5"}', ["top_p", "1.5"]),
    ('{"max_tokens": 1.5}', ["max_tokens", "1.5"]),
    ('{"max_tokens": "1.5"}', ["max_tokens", "1.5"]),
    ('{"max_tokens": "many"}', ["max_tokens", "many"]),
    ('{"max_tokens": ""}', ["max_tokens"]),
    ('{"max_tokens": true}', ["max_tokens"]),
    ('{"max_tokens": 9223372036854775808}', ["max_tokens"]),
    ('{"max_tokens": 1e400}', ["max_tokens"]),
    ('{"n": 1e3}', ["n must"]),
    ('{"ignore_eos": "maybe"}', ["ignore_eos", "maybe"]),
    ('{"ignore_eos": 2}', ["ignore_eos"]),
    ('{"seed": -1}', ["seed"]),
    ('{"seed": 18446744073709551616}', ["seed"]),
    ('{"stop": 5}', ["stop"]),
    ('{"stop": [5]}', ["stop"]),
    ('{"stop": {}}', ["stop"]),
    ('{"stop_token_ids": [99999999]}', ["stop_token_ids", "99999999"]),
    ('{"stop_token_ids": "2"}', ["stop_token_ids"]),
    ('{"allowed_token_ids": []}', ["allowed_token_ids"]),
    ('{"logit_bias": {"0": 101}}', ["logit_bias", "100"]),
    ('{"logit_bias": {"99999999": 1}}', ["logit_bias", "99999999"]),
    ('{"logit_bias": [1]}', ["logit_bias"]),
    ('{"use_beam_search": true}', ["use_beam_search"]),
    ('{"best_of": 2}', ["best_of"]),
    ('{"lora_name": "mine"}', ["lora_name", "not supported"]),
    ('{"logits_processors": ["mine"]}', ["logits_processors", "not supported"]),
]

PROMPTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"max_tokens": 2}, ["exactly one of", "none"]),
    ({"input_ids": [5, -1]}, ["input_ids", "-1"]),
    ({"input_ids": [49152]}, ["input_ids", "49152", "49151"]),
    ({"messages": "not JSON"}, ["messages", "JSON"]),
    ({"messages": "{}"}, ["messages", "list"]),
    ({"messages": "[]"}, ["messages", "at least one"]),
    ({"messages": "[1]"}, ["messages"]),
    ({"messages": "[{}]"}, ["role"]),
    ({"messages": '[{"role": "user", "content": null}]'}, ["content"]),
    ({"messages": '[{"role": 5, "content": "Hi"}]'}, ["role"]),
]

OUT_OF_RANGE: list[tuple[dict[str, Any], list[str]]] = [
    ({**PROMPT, name: value}, [name]) for name, values in NUMBERS.items() for value in values
]
INVALID: list[tuple[dict[str, Any], list[str]]] = [
    *OUT_OF_RANGE,
    *(({**PROMPT, **fields}, words) for fields, words in WORDS),
    *(({**PROMPT, "sampling_parameters": text}, words) for text, words in SAMPLING_PARAMETERS),
    *PROMPTS,
]


def complaint(answer: Answer, words: Sequence[str]) -> str | None:
    """What is wrong with the error that a request got; None if it is as it should be."""
    if answer.responses:
        return f"it was answered: {answer.responses}"
    error = answer.error or ""
    if not error.startswith("INVALID_ARG: "):
        return f"not INVALID_ARG: {error}"
    if answer.status not in (None, 400):
        return f"status {answer.status}"
    missing = [word for word in words if word not in error]
    return f"{missing} not in: {error}" if missing else None


def test_each_error_names_what_is_wrong(tiny_server):
    complaints = []
    for fields, words in INVALID:
        for way in (generate, generate_stream, grpc_infer):
            found = complaint(way(tiny_server, fields), words)
            if found is not None:
                complaints.append(f"{str(fields)[:120]} by {way.__name__}: {found}")
    assert not complaints, "\n".join(complaints)


def test_numbers_that_are_not_finite(tiny_server):
    """Only gRPC's tensors can carry them."""
    for name in NOT_FINITE:
        for value, shown in ((math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")):
            answer = grpc_infer(tiny_server, {**PROMPT, name: value})
            found = complaint(answer, [name])
            assert found is None, f"{name} {shown}: {found}"
            assert shown in str(answer.error).lower()


def test_an_error_says_value_and_range(tiny_server):
    answer = generate(tiny_server, {**PROMPT, "top_p": 1.5})
    assert answer.error == "INVALID_ARG: top_p must be a number in (0, 1], got 1.5"


def test_three_good_and_three_bad_requests_at_once(tiny_server):
    solo = generate_stream(tiny_server, NEIGHBOUR).checked().text
    bad = [{**PROMPT, "sampling_parameters": text} for text in ('{"bad', "[1]", "null")]
    for way in (generate_stream, grpc_infer):
        answers = at_once([partial(way, tiny_server, fields) for fields in [NEIGHBOUR, *bad] * 3])
        for position, answer in enumerate(answers):
            if position % 4 == 0:
                assert answer.checked().text == solo
            else:
                assert complaint(answer, ["sampling_parameters"]) is None, answer.error


def test_every_kind_of_bad_request_hurts_nobody(tiny_server):
    """All of them, several at a time, beside streams that go on all the while."""
    fields = {**NEIGHBOUR, "text_input": SLOW + "A request next door"}
    solo = grpc_infer(tiny_server, fields).checked().text

    def send_all(part: int) -> None:
        for request, _ in INVALID[part::4]:
            assert generate(tiny_server, request).error
            assert grpc_infer(tiny_server, request).error

    neighbours = [partial(grpc_infer, tiny_server, fields)] * 4
    answers = at_once([*neighbours, *(partial(send_all, part) for part in range(4))])
    for answer in answers[:4]:
        assert answer.checked().text == solo


def test_what_triton_itself_refuses_hurts_nobody(tiny_server):
    """Its messages are its own; here it matters that there is an error, and that all else goes on."""
    bodies: list[dict[str, Any] | str | bytes] = [
        {**PROMPT, "text_input": ["one", "two"]},
        {**PROMPT, "text_input": []},
        {**PROMPT, "text_input": 5},
        {**PROMPT, "text_input": None},
        {**PROMPT, "max_tokens": 16.5},
        {**PROMPT, "max_tokens": "16"},
        {**PROMPT, "max_tokens": None},
        {**PROMPT, "max_tokens": 2**63},
        {**PROMPT, "max_tokens": [1, 2]},
        {**PROMPT, "temperature": "0"},
        {**PROMPT, "stream": 1},
        {**PROMPT, "stream": "true"},
        {**PROMPT, "messages": [{"role": "user", "content": "Hi"}]},
        {**PROMPT, "logit_bias": {"2": 100}},
        {**PROMPT, "stop_token_ids": [2]},
        {**PROMPT, "cache_salt": None},
        {**PROMPT, "max_tokens": 4, "parameters": {"max_tokens": 4}},
        {"text_input": "half of a surrogate pair: \ud800"},
        "",
        "null",
        "[]",
        '"text"',
        '{"text_input": "unfinished',
        b'{"text_input": "\xff\xfe"}',
        b"\x00\x01\x02",
        "{" * 10_000,
    ]
    tensors = [
        tensor("text_input", "BYTES", ["a"], [1, 1]),
        tensor("text_input", "BYTES", ["a", "b"]),
        tensor("text_input", "BYTES", []),
        tensor("text_input", "INT32", [1]),
        tensor("text_inputs", "BYTES", ["a"]),
    ]
    others = [
        tensor("max_tokens", "INT64", [4], [1, 1]),
        tensor("max_tokens", "INT64", [4, 5]),
        tensor("max_tokens", "INT32", [4]),
        tensor("temperature", "INT64", [1]),
        tensor("stream", "INT32", [1]),
        tensor("stop", "BYTES", ["a"], [1, 1]),
        tensor("lora", "BYTES", ["a"]),
    ]
    fields = {**NEIGHBOUR, "text_input": SLOW + "A request next door"}
    solo = grpc_infer(tiny_server, fields).checked().text
    with GrpcStream(tiny_server) as neighbour:
        neighbour.send(fields)
        for body in bodies:
            for way in (generate, generate_stream):
                answer = way(tiny_server, body)
                assert answer.error and not answer.responses, f"{body!r} by {way.__name__}: {answer}"
                assert answer.status in (400, 500), f"{body!r} by {way.__name__}: {answer}"
        for inputs in [[item] for item in tensors] + [
            [tensor("text_input", "BYTES", ["a"]), item] for item in others
        ]:
            answer = grpc_infer(tiny_server, {}, inputs=inputs)
            names = [(item.name(), item.datatype(), item.shape()) for item in inputs]
            assert answer.error and not answer.responses, f"{names}: {answer}"
        assert grpc_answer(neighbour.finish()).checked().text == solo


def test_bytes_that_are_no_text(tiny_server):
    for name in ("text_input", "messages", "sampling_parameters", "stop", "bad_words"):
        inputs = [tensor(name, "BYTES", [b"ab\xff\xfe"])]
        if name not in ("text_input", "messages"):
            inputs.append(tensor("text_input", "BYTES", ["Hello"]))
        answer = grpc_infer(tiny_server, {}, inputs=inputs)
        assert complaint(answer, [name, "UTF-8"]) is None, f"{name}: {answer}"


def test_empty_lists_are_none(tiny_server):
    fields = {**PROMPT, "max_tokens": 6, "ignore_eos": True, "seed": 1}
    plain = generate(tiny_server, fields).checked().text
    for lists in (
        {"stop": []},
        {"stop_words": []},
        {"bad_words": []},
        {"stop_words": [""], "bad_words": [""]},
    ):
        for way in (generate, grpc_infer):
            assert way(tiny_server, {**fields, **lists}).checked().text == plain, lists


def test_empty_list_of_token_ids_is_no_prompt(tiny_server):
    """It arrives with shape [0]: there is nothing to begin with but BOS, as with an empty text."""
    fields = {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0}
    answers = [
        way(tiny_server, {**prompt, **fields})
        for way in (generate, grpc_infer)
        for prompt in ({"input_ids": []}, {"text_input": ""})
    ]
    assert len({answer.checked().text for answer in answers}) == 1


def test_a_request_parameter_nobody_knows_suggests_the_nearest(tiny_server):
    for way in (generate, generate_stream):
        answer = way(tiny_server, {**PROMPT, "max_token": 5})
        assert complaint(answer, ["'max_token'", "did you mean 'max_tokens'"]) is None, answer
    answer = grpc_infer(tiny_server, PROMPT, {"max_token": 5})
    assert complaint(answer, ["'max_token'", "did you mean 'max_tokens'"]) is None, answer
    answer = grpc_infer(tiny_server, PROMPT, {"text_input": "Hi"})
    assert complaint(answer, ["text_input"]) is None, answer


def test_precedence_is_tensor_then_sampling_parameters_then_request_parameters(tiny_server):
    def num_tokens(fields: dict[str, Any], parameters: dict[str, Any]) -> int:
        asked = {**PROMPT, "ignore_eos": True, "return_token_ids": True, **fields}
        return len(grpc_infer(tiny_server, asked, parameters).checked().joined("token_ids"))

    in_json = {"sampling_parameters": '{"max_tokens": 4}'}
    assert num_tokens({"max_tokens": 2, **in_json}, {"max_tokens": 6}) == 2
    assert num_tokens(in_json, {"max_tokens": 6}) == 4
    assert num_tokens({}, {"max_tokens": 6}) == 6
    assert num_tokens({"sampling_parameters": '{"max_tokens": null}'}, {"max_tokens": 6}) == 6


def test_aliases_of_different_sources_are_one_field(tiny_server):
    fields = {**PROMPT, "max_tokens": 8, "ignore_eos": True}
    expected = grpc_infer(tiny_server, {**fields, "seed": 5}).checked().text
    given = {"random_seed": 5, "sampling_parameters": '{"seed": 6}'}
    assert grpc_infer(tiny_server, {**fields, **given}).checked().text == expected


def test_parameters_object_over_http_equals_the_top_level(tiny_server):
    fields = {**PROMPT, "ignore_eos": True, "return_token_ids": True}
    for way in (generate, generate_stream):
        assert len(way(tiny_server, {**fields, "parameters": {"max_tokens": 4}}).joined("token_ids")) == 4
        assert len(way(tiny_server, {**fields, "max_tokens": 4}).joined("token_ids")) == 4


def test_numbers_and_booleans_as_strings(tiny_server):
    values = {"max_tokens": 7, "temperature": 0.5, "top_k": 50, "top_p": 0.9, "seed": 9, "ignore_eos": True}
    as_strings = {key: str(value) for key, value in values.items()}
    expected = generate(tiny_server, {**PROMPT, **values, "return_token_ids": True}).checked()
    assert len(expected.joined("token_ids")) == 7
    for answer in (
        generate(tiny_server, {**PROMPT, "sampling_parameters": json.dumps(as_strings)}),
        grpc_infer(tiny_server, {**PROMPT, "sampling_parameters": json.dumps(as_strings)}),
        grpc_infer(tiny_server, PROMPT, as_strings),
        grpc_infer(tiny_server, PROMPT, values),
    ):
        assert answer.checked().text == expected.text
    # Over HTTP a key that is no input reaches the model as a request parameter.
    special = {**PROMPT, "max_tokens": 2, "skip_special_tokens": "false"}
    assert generate(tiny_server, special).checked()
    refused = generate(tiny_server, {**special, "skip_special_tokens": "perhaps"})
    assert complaint(refused, ["skip_special_tokens", "perhaps"]) is None


def test_reserved_request_parameters_are_left_alone(tiny_server):
    """They are Triton's and its clients': no error, and none is read as an input of ours."""
    fields = {**PROMPT, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    reserved = {
        "id": "my-request",
        "timeout": 1,
        "sequence_id": 5,
        "sequence_start": True,
        "sequence_end": True,
        "headers": "x",
        "binary_data_output": True,
        "triton_anything": "x",
    }
    for way in (generate, generate_stream):
        assert len(way(tiny_server, {**fields, **reserved}).checked().joined("token_ids")) == 40
    answer = grpc_infer(tiny_server, fields, {"id": "x"}, request_id="my-request", priority=3, timeout=1)
    assert len(answer.checked().joined("token_ids")) == 40


def test_a_request_id_comes_back(tiny_server):
    with HttpRequest(tiny_server, "generate") as request:
        request.send({**PROMPT, "id": "my-request", "max_tokens": 2})
        assert json.loads(request.response.read())["id"] == "my-request"
    with GrpcStream(tiny_server) as stream:
        stream.send({**PROMPT, "max_tokens": 2}, request_id="another")
        result, _ = stream.next()
        assert result.get_response().id == "another"


def test_float_tensors_mean_what_they_say(tiny_server: TritonServer) -> None:
    """0.1 as a 32-bit tensor and 0.1 in JSON choose the same tokens, and read the same in an error."""
    fields = {**PROMPT, "max_tokens": 16, "ignore_eos": True, "seed": 4, "top_p": 0.1}
    in_json = {
        **PROMPT,
        "sampling_parameters": json.dumps({k: v for k, v in fields.items() if k not in PROMPT}),
    }
    assert grpc_infer(tiny_server, fields).checked().text == grpc_infer(tiny_server, in_json).checked().text
    answer = grpc_infer(tiny_server, {**PROMPT, "min_p": np.float32(1.1)})
    assert answer.error is not None and answer.error.endswith("got 1.1")
