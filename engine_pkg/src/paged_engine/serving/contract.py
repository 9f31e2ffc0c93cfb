"""The contract with clients: what one Triton request means, as a GenerateRequest and how its answer shall look.

Nothing is silently ignored: what does not exist, or has a value out of range, is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paged_engine.config import EngineConfig
from paged_engine.errors import RequestError
from paged_engine.request import Chat, GenerateRequest, Prompt, SamplingParams
from paged_engine.serving.inputs import CHAT_KEYS, INPUTS, INPUTS_BY_NAME, NEUTRAL_VALUES, NOT_BUILT, Role
from paged_engine.serving.sources import RawRequest, decode_text, merged_values, only_element, parse_json
from paged_engine.validation import Flag, Whole, explain, shown, unknown_key

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1


class Options(BaseModel):
    """How to answer and when; what does not concern the choice of tokens. Descriptions complete "<field> must be …"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: Flag = Field(False, description="true or false")
    exclude_input_in_output: Flag | None = Field(None, description="true or false")
    return_finish_reason: Flag = Field(False, description="true or false")
    return_num_input_tokens: Flag = Field(False, description="true or false")
    return_num_output_tokens: Flag = Field(False, description="true or false")
    return_cumulative_logprob: Flag = Field(False, description="true or false")
    return_logprobs: Flag = Field(False, description="true or false")
    return_token_ids: Flag = Field(False, description="true or false")
    return_at_end: Flag = Field(False, description="true or false")
    priority: Whole = Field(
        0, ge=-_MAX_INT32 - 1, le=_MAX_INT32, description="a whole number from -2^31 to 2^31 - 1"
    )
    timeout_ms: Whole | None = Field(
        None,
        ge=0,
        le=_MAX_INT64,
        description="a whole number >= 0; milliseconds for the whole request, 0 is none",
    )


@dataclass(frozen=True)
class ParsedRequest:
    """One request in the engine's terms, and how its answer shall look."""

    request: GenerateRequest
    options: Options
    prepend_prompt: bool
    """Whether text_output begins with the prompt."""
    reports_logprobs: bool
    """Whether the request set `logprobs`; without it the output `logprobs` is JSON's null, as in vllm_backend."""
    num_bytes: int
    """Size of all its strings and token ids."""
    timeout_ms: int
    """Milliseconds from arrival to the deadline; 0 is none."""


class Contract:
    """Reads requests for one model."""

    def __init__(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        """
        Args:
            config: the effective configuration.
            eos_token_ids: the checkpoint's own end-of-sequence tokens: the only `end_id` and `pad_id` that can be taken.
        """
        self._config = config
        own_token = "tokens that end or pad a text are the checkpoint's own; use stop_token_ids for more"
        self._neutral_values = {
            **NEUTRAL_VALUES,
            "end_id": (tuple(sorted(eos_token_ids)), own_token),
            "pad_id": (tuple(sorted(eos_token_ids)), own_token),
        }

    def parse(self, raw: RawRequest, request_id: str) -> ParsedRequest:
        """Read one request.

        Raises:
            RequestError: INVALID_ARG, naming the field, its value and what is allowed.
        """
        for name in raw.tensors.keys() - INPUTS_BY_NAME.keys():
            raise RequestError.invalid(unknown_key("input", name, INPUTS_BY_NAME))
        values, given_names = merged_values(raw)
        prompt = self._prompt(raw.tensors, values)
        self._check_neutral(values)
        sampling = _validated(SamplingParams, values, given_names)
        options = _validated(Options, values, given_names)
        reports_logprobs = sampling.logprobs is not None
        if options.return_cumulative_logprob and not reports_logprobs:
            sampling = sampling.model_copy(update={"logprobs": 0})
        request = GenerateRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            priority=options.priority,
            cache_salt=_checked(values.get("cache_salt", ""), str, "cache_salt", "a string"),
        )
        return ParsedRequest(
            request=request,
            options=options,
            prepend_prompt=self._prepends_prompt(options),
            reports_logprobs=reports_logprobs,
            num_bytes=raw.num_bytes,
            timeout_ms=self._config.default_timeout_ms if options.timeout_ms is None else options.timeout_ms,
        )

    def _prompt(self, tensors: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> Prompt:
        names = [item.name for item in INPUTS if item.role is Role.PROMPT and item.name in tensors]
        if len(names) != 1:
            found = " and ".join(names) or "none of them"
            raise RequestError.invalid(
                f"a request must have exactly one of text_input, input_ids and messages, got {found}"
            )
        name = names[0]
        if name != "messages":
            _check_no_chat_keys(name, values)
        elements = tensors[name]
        num_bytes = 4 * len(elements) if name == "input_ids" else len(only_element(name, elements))
        if num_bytes > self._config.max_prompt_bytes:
            raise RequestError.invalid(
                f"prompt too long: {name} has {num_bytes} bytes, "
                f"at most max_prompt_bytes = {self._config.max_prompt_bytes} are taken"
            )
        if name == "input_ids":
            return elements
        text = decode_text(name, only_element(name, elements))
        return text if name == "text_input" else _chat(text, values)

    def _check_neutral(self, values: Mapping[str, Any]) -> None:
        for name in NOT_BUILT & values.keys():
            raise RequestError.invalid(f"{name} is not supported by this server")
        for name in self._neutral_values.keys() & values.keys():
            accepted, reason = self._neutral_values[name]
            if not any(_equals(values[name], neutral) for neutral in accepted):
                allowed = " or ".join(json.dumps(neutral) for neutral in accepted) or "left out"
                raise RequestError.invalid(f"{name} must be {allowed}, got {shown(values[name])}: {reason}")

    def _prepends_prompt(self, options: Options) -> bool:
        if options.stream:
            if options.exclude_input_in_output is False:
                raise RequestError.invalid(
                    "exclude_input_in_output must be true when stream is true, got false: the prompt is not streamed"
                )
            return False
        if options.exclude_input_in_output is None:
            return not self._config.exclude_input_in_output
        return not options.exclude_input_in_output


def _validated(model: type[Any], values: Mapping[str, Any], given_names: Mapping[str, str]) -> Any:
    """The fields of `model` among `values`, checked; errors name a field as the client did."""
    given = {key: value for key, value in values.items() if key in model.model_fields}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        message = explain(error, model, given, "sampling parameter")
        field_name, _, rest = message.partition(" ")
        raise RequestError.invalid(f"{given_names.get(field_name, field_name)} {rest}") from None


def _chat(text: str, values: Mapping[str, Any]) -> Chat:
    messages = parse_json("messages", text)
    if not messages or not _is_list_of_objects(messages):
        raise RequestError.invalid(
            f"messages must be a JSON list of at least one {{role, content}} object, got {shown(text)}"
        )
    tools = values.get("tools")
    if tools is not None and not _is_list_of_objects(tools):
        raise RequestError.invalid(f"tools must be a list of objects, got {shown(tools)}")
    template_kwargs = _checked(
        values.get("chat_template_kwargs", {}), dict, "chat_template_kwargs", "an object"
    )
    return Chat(messages, tools, template_kwargs)


def _check_no_chat_keys(name: str, values: Mapping[str, Any]) -> None:
    """Refuse what only a chat template can take in where the prompt does not go through one; empty ones say nothing."""
    for key in CHAT_KEYS:
        if values.get(key):
            raise RequestError.invalid(
                f"{key} must be left out where the prompt is {name}, got {shown(values[key])}: only the chat template "
                "reads it, which writes messages; send the prompt as messages"
            )


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _equals(value: Any, neutral: Any) -> bool:
    """Whether a value of any source means `neutral`: numbers and booleans may be written as strings."""
    if isinstance(neutral, bool):
        return value is neutral or (isinstance(value, str) and value.strip().lower() == str(neutral).lower())
    if isinstance(value, bool):
        return False
    try:
        return float(value) == neutral
    except (TypeError, ValueError, OverflowError):
        return False


def _checked(value: Any, kind: type[Any], name: str, allowed: str) -> Any:
    if not isinstance(value, kind):
        raise RequestError.invalid(f"{name} must be {allowed}, got {shown(value)}")
    return value
