"""What a request is about: text, token ids or messages, and what goes with each of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from contract_harness import CONTRACT, error_of, parse, parse_chat

from paged_engine.errors import RequestError
from paged_engine.request import Chat
from paged_engine.serving.sources import RawRequest


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


def test_a_conversation_brings_what_its_template_wants() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    chat = parse_chat({"chat_template_kwargs": {"enable_thinking": False}, "tools": tools}).request.prompt
    assert chat == Chat([{"role": "user", "content": "hi"}], tools, {"enable_thinking": False})


@pytest.mark.parametrize(("key", "value"), [("tools", {}), ("tools", ["f"]), ("chat_template_kwargs", [])])
def test_what_a_template_cannot_take_is_refused(key: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{key} must be"):
        parse_chat({key: value})


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
