"""Where the values of a request come from, and that each means the same wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from triton_server import TritonServer
from wire import (
    GrpcStream,
    HttpRequest,
    generate,
    generate_stream,
    grpc_infer,
)

PROMPT = {"text_input": "Hello there"}


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
    error = generate(tiny_server, {**special, "skip_special_tokens": "perhaps"}).error
    assert error is not None and "skip_special_tokens must be true or false, got perhaps" in error


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
