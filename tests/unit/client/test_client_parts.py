"""The parts that touch no socket: addresses, requests, events, tensors."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_client import Client, GenerationOptions, InvalidRequest
from paged_client.endpoint import Endpoint, parse_endpoint
from paged_client.grpc_transport import decode_tensor, encode_tensor
from paged_client.request import Tensor, build_request
from paged_client.server_sent_events import EventDecoder


@pytest.mark.parametrize(
    ("url", "protocol", "endpoint"),
    [
        ("localhost:8001", None, Endpoint("grpc", "localhost", 8001)),
        ("localhost:8000", None, Endpoint("http", "localhost", 8000)),
        ("localhost:9000", None, Endpoint("grpc", "localhost", 9000)),
        ("localhost:9000", "http", Endpoint("http", "localhost", 9000)),
        ("localhost:8000", "grpc", Endpoint("grpc", "localhost", 8000)),
        ("host", None, Endpoint("grpc", "host", 8001)),
        ("host", "http", Endpoint("http", "host", 8000)),
        ("grpc://host:8000", None, Endpoint("grpc", "host", 8000)),
        ("http://host:8001/", None, Endpoint("http", "host", 8001)),
        ("http://host", "http", Endpoint("http", "host", 8000)),
        ("https://host/triton/", None, Endpoint("http", "host", 443, True, "/triton")),
        ("grpcs://host:443", None, Endpoint("grpc", "host", 443, True)),
        ("[::1]:8000", None, Endpoint("http", "::1", 8000)),
    ],
)
def test_addresses(url: str, protocol: Any, endpoint: Endpoint) -> None:
    assert parse_endpoint(url, protocol) == endpoint


def test_an_endpoint_writes_its_address() -> None:
    assert parse_endpoint("https://host/a").base_url == "https://host:443/a"
    assert parse_endpoint("[::1]:8001").address == "[::1]:8001"


@pytest.mark.parametrize(
    ("url", "protocol", "reason"),
    [
        ("", None, "names no host"),
        ("host:port", None, "port"),
        ("ftp://host", None, "scheme"),
        ("http://host", "grpc", "protocol"),
        ("grpc://host/path", None, "path"),
        ("host", "smtp", "protocol"),
    ],
)
def test_wrong_addresses(url: str, protocol: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Client(url, protocol)


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"retries": -1}, {"retry_delay_s": -0.1}])
def test_wrong_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Client(**settings)


def test_a_wrong_time_limit_of_a_call() -> None:
    with Client() as client, pytest.raises(ValueError, match="timeout_s"):
        client.generate("x", timeout_s=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"temperature": "0.5"},
        {"temperature": 1e39},
        {"temperature": True},
        {"max_tokens": 2**63},
        {"max_tokens": 16.0},
        {"max_tokens": "16"},
        {"max_tokens": True},
        {"top_k": 2**31},
        {"seed": -1},
        {"seed": 2**64},
        {"ignore_eos": 1},
        {"stop": 5},
        {"stop": [b"x"]},
        {"stop": {"a": 1}},
        {"stop": ["\ud800"]},
        {"sampling_parameters": "{}"},
        {"sampling_parameters": {"x": float("nan")}},
        {"sampling_parameters": {"x": object()}},
    ],
)
def test_values_that_cannot_be_sent_are_refused_by_name(options: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_request("x", options, stream=True)
    assert next(iter(options)) in caught.value.message


@pytest.mark.parametrize(
    "prompt", [None, 5, b"bytes", {"role": "user", "content": "x"}, ["a"], [1.5], [2**31], [True]]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        build_request(prompt, {}, stream=True)


@pytest.mark.parametrize("prompt", ["\udc00", [{"role": "user", "content": "\udc00"}], [{"role": "user"}, 5]])
def test_prompts_that_are_broken(prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        build_request(prompt, {}, stream=True)


def test_every_option_of_the_signature_can_be_sent() -> None:
    samples: dict[str, Any] = {"Mapping": {"k": 1}, "int": 1, "float": 0.5, "bool": True, "str": ["a"]}
    options: Any = {}
    for name, annotation in get_type_hints(GenerationOptions).items():
        options[name] = next(value for kind, value in samples.items() if kind in str(annotation))
    request = build_request("x", options, stream=True)
    sent = {tensor.name for tensor in request.inputs}
    always = {
        "text_input",
        "stream",
        "return_finish_reason",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_at_end",
    }
    assert sent == set(options) | always


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [
        ({}, True),
        ({"return_token_ids": False}, True),
        ({"return_token_ids": True}, False),
        ({"return_token_ids": True, "n": 2}, True),
        ({"return_token_ids": True, "num_return_sequences": 2}, True),
        ({"return_token_ids": True, "sampling_parameters": {"n": 2}}, True),
        ({"return_token_ids": True, "sampling_parameters": {"stop_token_ids": [1]}}, False),
    ],
)
def test_counts_are_asked_for_where_token_ids_do_not_tell_them(options: Any, is_asked: bool) -> None:
    request = build_request("x", options, stream=True)
    assert request.has("return_num_output_tokens") == is_asked


@pytest.mark.parametrize("name", ["stream", "return_finish_reason"])
def test_what_the_client_sets_itself_is_no_option(name: str) -> None:
    with pytest.raises(TypeError, match="set by this client itself"):
        build_request("x", {name: True}, stream=True)  # type: ignore[misc]


def test_an_unknown_option_names_the_way_for_the_servers_own_keys() -> None:
    with pytest.raises(TypeError, match="sampling_parameters"):
        build_request("x", {"logit_bias": {}}, stream=True)  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("name", ["streaming", "max_length", "best_of", "prompt", "user", "do_sample"])
def test_an_option_that_is_like_no_other_gets_no_suggestion(name: str) -> None:
    with pytest.raises(TypeError, match=f"unknown option '{name}'; Keys that only the server knows"):
        build_request("x", {name: 1}, stream=True)  # type: ignore[misc]


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5),
    st.lists(st.integers(1, 12), min_size=1, max_size=200),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_wherever_the_chunks_are_cut(
    texts: list[str], sizes: list[int], line_end: str
) -> None:
    payloads = [json.dumps(text, ensure_ascii=False) for text in texts]
    body = "".join(f": comment{line_end}data: {payload}{line_end}{line_end}" for payload in payloads).encode()
    decoder = EventDecoder()
    events, position = [], 0
    for size in [*sizes, len(body)]:
        events += decoder.feed(body[position : position + size])
        position += size
    assert events == payloads


def test_an_incomplete_event_is_not_reported_and_lines_of_one_event_are_joined() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\ndata:b\n") == []
    assert decoder.feed(b"\n") == ["a\nb"]
    assert decoder.feed(b"data: cut") == []


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_text_tensors_go_both_ways(values: list[str]) -> None:
    raw = encode_tensor(Tensor("stop", "BYTES", tuple(values), is_scalar=False))
    assert decode_tensor("BYTES", raw) == values


@pytest.mark.parametrize(
    ("datatype", "values", "raw"),
    [
        ("BOOL", (True, False), b"\x01\x00"),
        ("INT32", (-1, 2), b"\xff\xff\xff\xff\x02\x00\x00\x00"),
        ("INT64", (2**40,), b"\x00\x00\x00\x00\x00\x01\x00\x00"),
        ("UINT64", (2**64 - 1,), b"\xff" * 8),
        ("FP32", (0.5,), b"\x00\x00\x00\x3f"),
        ("BYTES", ("é", ""), b"\x02\x00\x00\x00\xc3\xa9\x00\x00\x00\x00"),
        ("BYTES", (), b""),
    ],
)
def test_tensors_have_tritons_raw_form(datatype: str, values: tuple[Any, ...], raw: bytes) -> None:
    assert encode_tensor(Tensor("x", datatype, values, is_scalar=False)) == raw
    assert tuple(decode_tensor(datatype, raw)) == values
