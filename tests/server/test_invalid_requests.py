"""Requests that cannot be answered: each gets an error that says why, and nobody else notices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from wire import (
    SLOW,
    Answer,
    GrpcStream,
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
    ('{"tools": [{"name": "clock"}]}', ["tools", "text_input", "messages"]),
    ('{"guided_decoding": "x"}', ["guided_decoding", "object"]),
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
