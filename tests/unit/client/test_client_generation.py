"""Deltas, whole answers and what is sent, over both transports, synchronous and asyncio."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from client_drivers import Driver, MakeDriver
from fake_triton import FakeTriton, Received, Send, Step, pieces

from paged_client import Delta, TokenLogprob


def test_stream_yields_each_delta_and_then_has_the_whole(server: FakeTriton, driver: Driver) -> None:
    server.respond = lambda received: pieces("The ", "capital", " is Paris.")
    deltas, result = driver.stream("What?")
    assert deltas == [
        Delta("The ", 1),
        Delta("capital", 1),
        Delta(" is Paris.", 1, finish_reason="stop"),
    ]
    assert result.text == "The capital is Paris."
    assert (result.finish_reason, result.num_input_tokens, result.num_output_tokens) == ("stop", 7, 3)
    assert result.time_to_first_token_s is not None
    assert 0 < result.time_to_first_token_s <= result.duration_s


def test_generate_asks_for_one_response(server: FakeTriton, driver: Driver) -> None:
    server.respond = lambda received: pieces("all of it", finish_reason="length")
    result = driver.generate("What?")
    assert (result.text, result.finish_reason, result.num_output_tokens) == ("all of it", "length", 1)
    assert result.time_to_first_token_s is None and result.duration_s > 0
    (received,) = server.requests
    assert received.inputs["stream"] == [False]
    assert received.endpoint in ("ModelStreamInfer", "generate")


@pytest.mark.parametrize(
    "text",
    [
        "聪明 😀 👨‍👩‍👧 ď",
        'quotes " and \\ and / and\ttabs',
        "lines\nand\r\nmore\n\n",
        "\u2028\u2029\x85\x0b\x0c\x1c",
        "data: x\n\n",
        "",
    ],
)
def test_text_arrives_as_it_was_sent(server: FakeTriton, driver: Driver, text: str) -> None:
    server.respond = lambda received: pieces(received.prompt, received.prompt)
    _, result = driver.stream(text)
    assert result.text == text + text
    assert driver.generate(text).text == text + text
    assert [received.prompt for received in server.requests] == [text, text]


def test_several_sequences_have_their_own_text_and_end(server: FakeTriton, driver: Driver) -> None:
    def respond(received: Received) -> list[Step]:
        def step(
            texts: list[str], reasons: list[str], counts: list[int], ids: list[int], final: bool
        ) -> Step:
            outputs: dict[str, list[Any]] = {
                "text_output": texts,
                "finish_reason": reasons,
                "num_output_tokens": counts,
            }
            return Send({**outputs, "token_ids": ids, "cumulative_logprob": [-1.0, -2.0]}, final)

        return [
            step(["a", "x"], ["None", "None"], [1, 2], [10, 20, 21], False),
            step(["b", ""], ["stop", "None"], [1, 0], [11], False),
            step(["", "y"], ["stop", "length"], [0, 1], [22], True),
        ]

    server.respond = respond
    deltas, result = driver.stream("x", n=2, return_token_ids=True, return_cumulative_logprob=True)
    assert [(delta.sequence_index, delta.text, delta.token_ids) for delta in deltas] == [
        (0, "a", (10,)),
        (1, "x", (20, 21)),
        (0, "b", (11,)),
        (1, "y", (22,)),
    ]
    first, second = result.sequences
    assert (first.text, first.finish_reason, first.token_ids, first.num_output_tokens) == (
        "ab",
        "stop",
        (10, 11),
        2,
    )
    assert (second.text, second.finish_reason, second.token_ids) == ("xy", "length", (20, 21, 22))
    assert (second.num_output_tokens, second.cumulative_logprob) == (3, -2.0)
    assert (result.text, result.cumulative_logprob) == ("ab", -1.0)


def test_the_ids_of_one_sequence_are_their_own_count(server: FakeTriton, driver: Driver) -> None:
    last: dict[str, list[Any]] = {"finish_reason": ["stop"], "num_input_tokens": [7]}
    server.respond = lambda received: [
        Send({"text_output": ["a"], "token_ids": [10]}),
        Send({"text_output": ["bc"], "token_ids": [11, 12], **last}, is_final=True),
    ]
    deltas, result = driver.stream("x", return_token_ids=True)
    assert [(delta.num_tokens, delta.token_ids) for delta in deltas] == [(1, (10,)), (2, (11, 12))]
    assert (result.num_output_tokens, result.num_input_tokens, result.finish_reason) == (3, 7, "stop")


def test_logprobs_are_typed(server: FakeTriton, driver: Driver) -> None:
    position = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "é"}, "9": {"logprob": None, "rank": 2}}
    server.respond = lambda received: [
        Send(
            {
                "text_output": ["é"],
                "finish_reason": ["stop"],
                "num_output_tokens": [1],
                "logprobs": [json.dumps([position])],
            },
            is_final=True,
        )
    ]
    _, result = driver.stream("x", logprobs=2)
    assert result.logprobs == ({5: TokenLogprob(-0.5, 1, "é"), 9: TokenLogprob(float("-inf"), 2)},)
    assert server.requests[0].inputs["logprobs"] == [2]
    assert server.requests[0].inputs["return_logprobs"] == [True]


def test_prompt_logprobs_are_those_of_the_response_that_has_them(server: FakeTriton, driver: Driver) -> None:
    position = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "é"}}
    server.respond = lambda received: [
        Send({"text_output": ["a"], "prompt_logprobs": [json.dumps([None, position])]}),
        Send({"text_output": ["b"], "finish_reason": ["stop"]}, is_final=True),
    ]
    _, result = driver.stream("x", prompt_logprobs=1, truncate_prompt_tokens=-1)
    assert result.prompt_logprobs == (None, {5: TokenLogprob(-0.5, 1, "é")})
    assert server.requests[0].inputs["prompt_logprobs"] == [1]
    assert server.requests[0].inputs["truncate_prompt_tokens"] == [-1]


def test_an_answer_without_text_is_whole(server: FakeTriton, driver: Driver) -> None:
    server.respond = lambda received: [
        Send({"text_output": [""], "finish_reason": ["stop"], "num_output_tokens": [0]}, is_final=True)
    ]
    deltas, result = driver.stream("x")
    assert deltas == [Delta("", 0, finish_reason="stop")]
    assert (result.text, result.finish_reason, result.num_output_tokens) == ("", "stop", 0)


def test_options_arrive_with_their_values(server: FakeTriton, driver: Driver) -> None:
    driver.generate(
        "x",
        max_tokens=2**40,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=2**64 - 1,
        stop=["\n", "ß"],
        bad_words="no",
        stop_words=[],
        ignore_eos=True,
        exclude_input_in_output=False,
        timeout_ms=5000,
        min_p=None,
        sampling_parameters={"logit_bias": {"7": -100}, "stop_token_ids": [1, 2]},
        request_id="r-1",
    )
    (received,) = server.requests
    inputs = dict(received.inputs)
    assert json.loads(inputs.pop("sampling_parameters")[0]) == {
        "logit_bias": {"7": -100},
        "stop_token_ids": [1, 2],
    }
    assert inputs == {
        "text_input": ["x"],
        "stream": [False],
        "return_finish_reason": [True],
        "return_num_input_tokens": [True],
        "return_num_output_tokens": [True],
        "return_at_end": [True],
        "max_tokens": [2**40],
        "temperature": [0],
        "top_p": [0.5],
        "top_k": [-1],
        "seed": [2**64 - 1],
        "stop": ["\n", "ß"],
        "bad_words": ["no"],
        "stop_words": [],
        "ignore_eos": [True],
        "exclude_input_in_output": [False],
        "timeout_ms": [5000],
    }
    assert (received.request_id, received.model) == ("r-1", "llm")


@pytest.mark.parametrize("prompt", [[1, 2, 50000], (1, 2, 50000), np.array([1, 2, 50000])])
def test_a_prompt_of_token_ids(server: FakeTriton, driver: Driver, prompt: list[int]) -> None:
    driver.generate(prompt)
    assert server.requests[0].inputs["input_ids"] == [1, 2, 50000]
    assert "text_input" not in server.requests[0].inputs


def test_a_prompt_of_messages_is_one_json_string(server: FakeTriton, driver: Driver) -> None:
    messages = [{"role": "system", "content": "Sei kurz."}, {"role": "user", "content": 'Größe "😀"?\n'}]
    driver.generate(messages)
    (text,) = server.requests[0].inputs["messages"]
    assert json.loads(text) == messages


def test_a_prompt_of_six_megabytes_meets_no_limit_of_the_transport(
    server: FakeTriton, driver: Driver
) -> None:
    server.respond = lambda received: pieces(received.prompt)
    prompt = "é" * 3_000_000
    assert driver.generate(prompt).text == prompt


def test_grpc_tensors_have_the_declared_types_and_shapes(make_driver: MakeDriver) -> None:
    from fake_triton import FakeGrpcTriton

    server = FakeGrpcTriton()
    make_driver(server.url, headers={"Authorization": "Bearer token"}).generate(
        [1, 2, 3], max_tokens=1, temperature=0.5, top_k=3, seed=4, stop=["a", "b"], ignore_eos=False
    )
    server.stop()
    (received,) = server.requests
    expected = {
        "input_ids": ("INT32", [3]),
        "stream": ("BOOL", [1]),
        "max_tokens": ("INT64", [1]),
        "temperature": ("FP32", [1]),
        "top_k": ("INT32", [1]),
        "seed": ("UINT64", [1]),
        "stop": ("BYTES", [2]),
        "ignore_eos": ("BOOL", [1]),
        "return_finish_reason": ("BOOL", [1]),
        "return_num_input_tokens": ("BOOL", [1]),
        "return_num_output_tokens": ("BOOL", [1]),
        "return_at_end": ("BOOL", [1]),
    }
    assert {name: (received.datatypes[name], received.shapes[name]) for name in received.inputs} == expected
    assert received.parameters == {"triton_enable_empty_final_response": True}
    assert received.headers["authorization"] == "Bearer token"


def test_headers_go_along_over_http(make_driver: MakeDriver) -> None:
    from fake_triton import FakeHttpTriton

    server = FakeHttpTriton()
    make_driver(server.url, headers={"Authorization": "Bearer token"}).generate("x")
    server.stop()
    assert server.requests[0].headers["authorization"] == "Bearer token"
    assert server.requests[0].headers["accept-encoding"] == "identity"
    assert server.requests[0].headers["connection"] == "close"


def test_a_final_mark_alone_ends_a_grpc_stream(make_driver: MakeDriver) -> None:
    from fake_triton import FakeGrpcTriton

    server = FakeGrpcTriton()
    server.respond = lambda received: [Send({"text_output": ["a"]}), Send({}, is_final=True)]
    deltas, result = make_driver(server.url).stream("x")
    server.stop()
    assert deltas == [Delta("a", 0)]
    assert (result.text, result.finish_reason) == ("a", None)
