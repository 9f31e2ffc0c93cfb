"""From a call's arguments to a request that no transport has touched yet: named, typed tensors.

Every option that the model declares as an input travels as that tensor, with its exact type, so that the
server reads the value that was meant; anything else goes into the JSON of `sampling_parameters`. What no
transport could carry (a number out of its type's range, NaN, broken Unicode) is refused here; what the values
mean is the server's to judge.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from paged_client.errors import InvalidRequest

Prompt = str | Sequence[int] | Sequence[Mapping[str, object]]
"""Text that is taken as it is, token ids, or a conversation (see `Message`) for the checkpoint's chat template."""

_LEAST_SIMILARITY = 0.72
"""How like a known option's name, by difflib's ratio, an unknown one must be to count as a misspelling of it."""


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of `stream` and `generate`; None means not given, and the server's default applies.

    `max_tokens`, `min_tokens`: bounds on the output. `temperature` (0 is greedy), `top_p`, `min_p`, `top_k`
    (0 or -1 is off), `repetition_penalty` (over prompt and output), `presence_penalty`, `frequency_penalty`
    (over the output), `bad_words` (never generated), `seed` (alias `random_seed`): sampling. `n` (alias
    `num_return_sequences`): sequences per prompt. `stop` (alias `stop_words`): strings that end the text and
    are not part of it. `ignore_eos`: go on until `max_tokens`. `logprobs`: the number of most likely
    candidates to report for each token, besides the chosen one; `prompt_logprobs`: the same for the prompt.
    `truncate_prompt_tokens`: keep only the last so many tokens of the prompt, -1 for as many as fit.
    `return_token_ids`, `return_cumulative_logprob`: report these too. `exclude_input_in_output`: False puts the prompt before the
    text (`generate` only). `priority`: lower is sooner. `timeout_ms`: the server's deadline for the whole
    request; text made by then is returned with the finish reason `timeout`. `beam_width`, `length_penalty`,
    `end_id`, `pad_id`: accepted at their neutral values. `sampling_parameters`: any further key of the
    server's JSON, such as `logit_bias` or `stop_token_ids`.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    min_p: float | None
    top_k: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    random_seed: int | None
    n: int | None
    num_return_sequences: int | None
    stop: str | Sequence[str] | None
    stop_words: str | Sequence[str] | None
    bad_words: str | Sequence[str] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    truncate_prompt_tokens: int | None
    exclude_input_in_output: bool | None
    return_cumulative_logprob: bool | None
    return_logprobs: bool | None
    return_token_ids: bool | None
    priority: int | None
    timeout_ms: int | None
    beam_width: int | None
    length_penalty: float | None
    end_id: int | None
    pad_id: int | None
    sampling_parameters: Mapping[str, object] | None


@dataclass(frozen=True)
class Tensor:
    """One input. `datatype` is Triton's name for it; the shape is [len(values)]; a scalar has one value."""

    name: str
    datatype: str
    values: tuple[Any, ...]
    is_scalar: bool


@dataclass(frozen=True)
class Request:
    """One generation, ready for any transport. `stream`: a response per step instead of one with everything."""

    inputs: tuple[Tensor, ...]
    stream: bool
    request_id: str = ""

    def has(self, name: str) -> bool:
        """Whether the input of that name is given."""
        return any(tensor.name == name for tensor in self.inputs)


_FLOAT32_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
_INTEGER_RANGE = {"INT32": (-(2**31), 2**31 - 1), "INT64": (-(2**63), 2**63 - 1), "UINT64": (0, 2**64 - 1)}

_OPTION_TYPES: dict[str, tuple[str, bool]] = {
    "max_tokens": ("INT64", True),
    "min_tokens": ("INT64", True),
    "temperature": ("FP32", True),
    "top_p": ("FP32", True),
    "min_p": ("FP32", True),
    "top_k": ("INT32", True),
    "repetition_penalty": ("FP32", True),
    "presence_penalty": ("FP32", True),
    "frequency_penalty": ("FP32", True),
    "seed": ("UINT64", True),
    "random_seed": ("UINT64", True),
    "n": ("INT32", True),
    "num_return_sequences": ("INT32", True),
    "stop": ("BYTES", False),
    "stop_words": ("BYTES", False),
    "bad_words": ("BYTES", False),
    "ignore_eos": ("BOOL", True),
    "logprobs": ("INT32", True),
    "prompt_logprobs": ("INT32", True),
    "truncate_prompt_tokens": ("INT64", True),
    "exclude_input_in_output": ("BOOL", True),
    "return_cumulative_logprob": ("BOOL", True),
    "return_logprobs": ("BOOL", True),
    "return_token_ids": ("BOOL", True),
    "priority": ("INT32", True),
    "timeout_ms": ("INT64", True),
    "beam_width": ("INT32", True),
    "length_penalty": ("FP32", True),
    "end_id": ("INT32", True),
    "pad_id": ("INT32", True),
}
"""Datatype of each option's tensor, and whether it has exactly one element."""

_ALWAYS_ASKED = ("return_finish_reason", "return_num_input_tokens", "return_at_end")
"""The last makes the other two come once, at the end of a stream: each output of a response costs time."""


def build_request(
    prompt: Prompt, options: GenerationOptions, *, stream: bool, request_id: str = ""
) -> Request:
    """The request for a prompt and options.

    Raises TypeError for an unknown option, InvalidRequest for a value that cannot be sent.
    """
    given = {name: value for name, value in options.items() if value is not None}
    further = given.pop("sampling_parameters", None)
    unknown = [name for name in given if name not in _OPTION_TYPES]
    if unknown:
        raise TypeError(_unknown_option(unknown[0]))
    if further is not None and not isinstance(further, Mapping):
        raise InvalidRequest.local(f"sampling_parameters must be a mapping, got {_describe(further)}")
    if "logprobs" in given:
        given.setdefault("return_logprobs", True)
    tensors = [_prompt_tensor(prompt), _tensor("stream", "BOOL", True, stream)]
    tensors += [_tensor(name, "BOOL", True, True) for name in _ALWAYS_ASKED]
    if not given.get("return_token_ids") or {"n", "num_return_sequences"} & {*given, *(further or ())}:
        # not where there are only the ids of one sequence, which are their own count
        tensors.append(_tensor("return_num_output_tokens", "BOOL", True, True))
    tensors += [_tensor(name, *_OPTION_TYPES[name], value) for name, value in given.items()]
    if further is not None:
        tensors.append(
            _tensor("sampling_parameters", "BYTES", True, _to_json("sampling_parameters", dict(further)))
        )
    return Request(tuple(tensors), stream, request_id)


def _prompt_tensor(prompt: Prompt) -> Tensor:
    if isinstance(prompt, str):
        return _tensor("text_input", "BYTES", True, prompt)
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidRequest.local(
            f"prompt must be a text, a list of token ids or a list of messages, got {_describe(prompt)}"
        )
    elements = list(prompt)
    if not elements or not isinstance(elements[0], Mapping):
        return _tensor("input_ids", "INT32", False, elements)
    messages = []
    for element in elements:
        if not isinstance(element, Mapping):
            raise InvalidRequest.local(
                f"a message must be a mapping with role and content, got {_describe(element)}"
            )
        messages.append(dict(element))
    return _tensor("messages", "BYTES", True, _to_json("messages", messages))


def _tensor(name: str, datatype: str, is_scalar: bool, value: object) -> Tensor:
    if is_scalar:
        elements: list[object] = [value]
    elif isinstance(value, str):
        elements = [value]
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, Mapping)):
        elements = list(value)
    else:
        raise InvalidRequest.local(f"{name} must be a list, got {_describe(value)}")
    convert = _CONVERTERS[datatype]
    return Tensor(
        name, datatype, tuple([convert(name, datatype, element) for element in elements]), is_scalar
    )


def _text(name: str, datatype: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest.local(f"{name} must be text, got {_describe(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.local(
            f"{name} is not valid Unicode text: {error.reason} at {error.start}"
        ) from None
    return value


def _boolean(name: str, datatype: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest.local(f"{name} must be True or False, got {_describe(value)}")
    return value


def _integer(name: str, datatype: str, value: object) -> int:
    low, high = _INTEGER_RANGE[datatype]
    try:
        number = operator.index(cast(Any, value))
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise InvalidRequest.local(
            f"{name} must be an integer between {low} and {high}, got {_describe(value)}"
        )
    return number


def _number(name: str, datatype: str, value: object) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _FLOAT32_MAX:
        raise InvalidRequest.local(f"{name} must be a finite number (32-bit float), got {_describe(value)}")
    return number


_CONVERTERS: dict[str, Callable[[str, str, object], object]] = {
    "BYTES": _text,
    "BOOL": _boolean,
    "INT32": _integer,
    "INT64": _integer,
    "UINT64": _integer,
    "FP32": _number,
}


def _to_json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest.local(f"{name} cannot be written as JSON: {error}") from None


def _describe(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '…'} ({type(value).__name__})"


def _unknown_option(name: str) -> str:
    if name in ("stream", "return_num_output_tokens", *_ALWAYS_ASKED):
        return f"{name!r} is set by this client itself"
    known = [*_OPTION_TYPES, "sampling_parameters", "timeout_s", "request_id"]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_SIMILARITY)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return (
        f"unknown option {name!r}; {hint}Keys that only the server knows go into sampling_parameters={{...}}"
    )
