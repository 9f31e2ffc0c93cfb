"""What the tests of the contract share: one contract, and short ways to have a request parsed or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paged_engine.config import EngineConfig
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.serving.contract import Contract, ParsedRequest
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
