"""Where the values of a request come from: tensors, `sampling_parameters` and request parameters, made one mapping.

A tensor goes before `sampling_parameters`, and that before a request parameter. Nothing is silently ignored: a key nobody
knows is an error that names the nearest known one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paged_engine.errors import RequestError
from paged_engine.request import SamplingParams
from paged_engine.serving.guides import GUIDE_KEYS, fold_guides
from paged_engine.serving.inputs import (
    INPUTS,
    INPUTS_BY_NAME,
    NEUTRAL_VALUES,
    NOT_BUILT,
    REQUEST_KEYS,
    RESERVED_PARAMETERS,
    WITHOUT_EMPTY_STRINGS,
    Role,
)
from paged_engine.validation import shown, unknown_key

_JSON_KEYS = frozenset(
    {item.name for item in INPUTS if item.role in (Role.OPTION, Role.SAMPLING, Role.NEUTRAL)}
    | set(SamplingParams.model_fields)
    | set(REQUEST_KEYS)
    | GUIDE_KEYS
)
"""What `sampling_parameters` and request parameters may carry, besides the keys of other servers."""
_MAX_JSON_CHARACTERS = 4 << 20
"""More than a `logit_bias` of a whole vocabulary takes. While JSON is read, nothing else runs in this process."""


@dataclass(frozen=True)
class RawRequest:
    """One request as it came, in plain Python values that nobody else owns."""

    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """The elements of each input; bytes for strings."""
    parameters: str = "{}"
    """Triton's request parameters: a JSON object of strings, numbers and booleans."""

    @property
    def num_bytes(self) -> int:
        """Size of all strings and token ids."""
        return len(self.parameters) + sum(
            sum(map(len, elements)) if elements and isinstance(elements[0], bytes) else 4 * len(elements)
            for elements in self.tensors.values()
        )


def merged_values(raw: RawRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each field, the strongest source winning; and the name under which it was given.

    Raises:
        RequestError: INVALID_ARG for a key nobody knows, JSON that is none, two names of one field that do not agree.
    """
    parameters = {
        key: value
        for key, value in _json_object("the request parameters", raw.parameters).items()
        if key not in RESERVED_PARAMETERS and not key.startswith("triton_")
    }
    _check_keys("request parameter", parameters)
    sources: list[Mapping[str, Any]] = [parameters]
    if "sampling_parameters" in raw.tensors:
        text = decode_text(
            "sampling_parameters", only_element("sampling_parameters", raw.tensors["sampling_parameters"])
        )
        sampling_parameters = _json_object("sampling_parameters", text)
        _check_keys("sampling parameter", sampling_parameters)
        sources.append({key: value for key, value in sampling_parameters.items() if value is not None})
    sources.append(
        {
            name: _tensor_value(name, elements)
            for name, elements in raw.tensors.items()
            if INPUTS_BY_NAME[name].role not in (Role.PROMPT, Role.JSON)
        }
    )
    values: dict[str, Any] = {}
    given_names: dict[str, str] = {}
    for source in sources:
        for name, value in _without_aliases(source).items():
            target = _target(name)
            values[target] = value
            given_names[target] = name
    return fold_guides(values), given_names


def _tensor_value(name: str, elements: Sequence[Any]) -> Any:
    item = INPUTS_BY_NAME[name]
    if item.datatype == "TYPE_STRING":
        elements = [decode_text(name, element) for element in elements]
    return list(elements) if item.is_list else only_element(name, elements)


def only_element(name: str, elements: Sequence[Any]) -> Any:
    """The element of a tensor of shape [1]; INVALID_ARG for any other shape."""
    if len(elements) != 1:
        raise RequestError.invalid(f"{name} must have exactly one element, got {len(elements)}")
    return elements[0]


def decode_text(name: str, value: bytes) -> str:
    """A string element as text; INVALID_ARG where it is not UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError.invalid(
            f"{name} must be UTF-8 text, got invalid bytes at position {error.start}"
        ) from None


def parse_json(name: str, text: str) -> Any:
    """What a JSON text says; INVALID_ARG where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError.invalid(
            f"{name} must be valid JSON, got {shown(text)}: {shown(str(error))}"
        ) from None


def _json_object(name: str, text: str) -> dict[str, Any]:
    if len(text) > _MAX_JSON_CHARACTERS:
        raise RequestError.invalid(
            f"{name} must have at most {_MAX_JSON_CHARACTERS} characters, got {len(text)}"
        )
    value = parse_json(name, text)
    if not isinstance(value, dict):
        raise RequestError.invalid(f"{name} must be a JSON object, got {shown(text)}")
    return value


def _target(name: str) -> str:
    return INPUTS_BY_NAME[name].field if name in INPUTS_BY_NAME else name


def _check_keys(kind: str, values: Mapping[str, Any]) -> None:
    for key in values:
        if key in _JSON_KEYS or key in NEUTRAL_VALUES or key in NOT_BUILT:
            continue
        if key in INPUTS_BY_NAME:
            raise RequestError.invalid(f"{key} is an input tensor of its own and cannot be a {kind}")
        raise RequestError.invalid(unknown_key(kind, key, _JSON_KEYS))


def _without_aliases(source: Mapping[str, Any]) -> dict[str, Any]:
    """One source's values with empty strings out of the lists that may have them, and one name for each field."""
    cleaned: dict[str, Any] = {}
    for name, value in source.items():
        if name in WITHOUT_EMPTY_STRINGS and isinstance(value, (str, list)):
            words = [value] if isinstance(value, str) else value
            cleaned[name] = [word for word in words if word != ""]
        elif name == "logprobs" and value is False:
            continue  # how OpenAI's API, and clients that pass its fields on, say "none"
        else:
            cleaned[name] = [value] if name == "stop" and isinstance(value, str) else value
    names: dict[str, str] = {}
    for name in cleaned:
        other = names.setdefault(_target(name), name)
        if str(cleaned[other]) != str(cleaned[name]):  # numbers may be written as strings
            raise RequestError.invalid(
                f"{other} and {name} are two names of one thing and must agree, "
                f"got {shown(cleaned[other])} and {shown(cleaned[name])}"
            )
    return {name: cleaned[name] for name in names.values()}
