"""The model's interface in tables: the tensors that config.pbtxt declares, and the keys that contract.py knows.

Names, types and shapes follow vllm_backend, and TensorRT-LLM's backend where that has a name of its own for a thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Role(Enum):
    """What an input is for, and so which part of the contract reads it."""

    PROMPT = "prompt"
    """The prompt itself; only a tensor can carry it."""
    JSON = "json"
    """A JSON object that carries other inputs."""
    TRANSPORT = "transport"
    """How to answer; only a tensor can carry it."""
    OPTION = "option"
    """A field of contract.Options."""
    SAMPLING = "sampling"
    """A field of request.SamplingParams."""
    NEUTRAL = "neutral"
    """Accepted for the sake of other servers' clients, and only where it changes nothing."""


@dataclass(frozen=True)
class Input:
    """One declared input tensor, optional like all of them."""

    name: str
    datatype: str
    """As config.pbtxt spells it."""
    role: Role
    is_list: bool = False
    """Shape [-1] rather than [1]."""
    alias_of: str = ""
    """The field it sets, where that has another name."""

    @property
    def field(self) -> str:
        """The name under which its value is known behind the contract."""
        return self.alias_of or self.name


@dataclass(frozen=True)
class OutputTensor:
    """One declared output tensor."""

    name: str
    datatype: str
    is_list: bool = True


INPUTS: tuple[Input, ...] = (
    Input("text_input", "TYPE_STRING", Role.PROMPT),
    Input("input_ids", "TYPE_INT32", Role.PROMPT, is_list=True),
    Input("messages", "TYPE_STRING", Role.PROMPT),
    Input("truncate_prompt_tokens", "TYPE_INT64", Role.SAMPLING),
    Input("stream", "TYPE_BOOL", Role.TRANSPORT),
    Input("sampling_parameters", "TYPE_STRING", Role.JSON),
    Input("max_tokens", "TYPE_INT64", Role.SAMPLING),
    Input("min_tokens", "TYPE_INT64", Role.SAMPLING),
    Input("temperature", "TYPE_FP32", Role.SAMPLING),
    Input("top_p", "TYPE_FP32", Role.SAMPLING),
    Input("min_p", "TYPE_FP32", Role.SAMPLING),
    Input("top_k", "TYPE_INT32", Role.SAMPLING),
    Input("repetition_penalty", "TYPE_FP32", Role.SAMPLING),
    Input("presence_penalty", "TYPE_FP32", Role.SAMPLING),
    Input("frequency_penalty", "TYPE_FP32", Role.SAMPLING),
    Input("seed", "TYPE_UINT64", Role.SAMPLING),
    Input("random_seed", "TYPE_UINT64", Role.SAMPLING, alias_of="seed"),
    Input("n", "TYPE_INT32", Role.SAMPLING),
    Input("num_return_sequences", "TYPE_INT32", Role.SAMPLING, alias_of="n"),
    Input("stop", "TYPE_STRING", Role.SAMPLING, is_list=True),
    Input("stop_words", "TYPE_STRING", Role.SAMPLING, is_list=True, alias_of="stop"),
    Input("bad_words", "TYPE_STRING", Role.SAMPLING, is_list=True),
    Input("ignore_eos", "TYPE_BOOL", Role.SAMPLING),
    Input("logprobs", "TYPE_INT32", Role.SAMPLING),
    Input("prompt_logprobs", "TYPE_INT32", Role.SAMPLING),
    Input("exclude_input_in_output", "TYPE_BOOL", Role.OPTION),
    Input("return_finish_reason", "TYPE_BOOL", Role.OPTION),
    Input("return_num_input_tokens", "TYPE_BOOL", Role.OPTION),
    Input("return_num_output_tokens", "TYPE_BOOL", Role.OPTION),
    Input("return_cumulative_logprob", "TYPE_BOOL", Role.OPTION),
    Input("return_logprobs", "TYPE_BOOL", Role.OPTION),
    Input("return_token_ids", "TYPE_BOOL", Role.OPTION),
    Input("return_at_end", "TYPE_BOOL", Role.OPTION),
    Input("priority", "TYPE_INT32", Role.OPTION),
    Input("timeout_ms", "TYPE_INT64", Role.OPTION),
    Input("beam_width", "TYPE_INT32", Role.NEUTRAL),
    Input("length_penalty", "TYPE_FP32", Role.NEUTRAL),
    Input("end_id", "TYPE_INT32", Role.NEUTRAL),
    Input("pad_id", "TYPE_INT32", Role.NEUTRAL),
)

OUTPUTS: tuple[OutputTensor, ...] = (
    OutputTensor("text_output", "TYPE_STRING"),
    OutputTensor("finish_reason", "TYPE_STRING"),
    OutputTensor("num_input_tokens", "TYPE_UINT32", is_list=False),
    OutputTensor("num_output_tokens", "TYPE_UINT32"),
    OutputTensor("token_ids", "TYPE_INT32"),
    OutputTensor("cumulative_logprob", "TYPE_FP32"),
    OutputTensor("logprobs", "TYPE_STRING"),
    OutputTensor("prompt_logprobs", "TYPE_STRING", is_list=False),
)

INPUTS_BY_NAME: Mapping[str, Input] = {item.name: item for item in INPUTS}

RESERVED_PARAMETERS = frozenset(
    {
        "id",
        "timeout",
        "priority",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "binary_data_output",
    }
)
"""Request parameters that belong to Triton and its transports; left alone, like all that begin with `triton_`."""

_NO_BEAMS = "beam search does not exist here"
NEUTRAL_VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "beam_width": ((1,), _NO_BEAMS),
    "length_penalty": ((1,), "it is a setting of beam search, which does not exist here"),
    "best_of": ((1,), "candidates are not ranked here; use n"),
    "use_beam_search": ((False,), _NO_BEAMS),
    "early_stopping": ((False,), "it is a setting of beam search, which does not exist here"),
    "detokenize": ((True,), "text is always made; use return_token_ids for the ids"),
    "spaces_between_special_tokens": ((True,), "special tokens are joined as the tokenizer joins them"),
}
"""Keys of other servers that are accepted where they change nothing: the values for which that is so, and why no other."""

NOT_BUILT = frozenset(
    {
        "response_format",
        "lora_name",
        "logits_processors",
        "tool_choice",
    }
)
"""Keys of other servers for what does not exist here; null is accepted, being their default."""

CHAT_KEYS = ("chat_template_kwargs", "tools")
"""What JSON carries for the chat template, and so beside `messages` only."""

REQUEST_KEYS = ("cache_salt", *CHAT_KEYS)
"""Parts of a GenerateRequest that JSON alone can carry."""

WITHOUT_EMPTY_STRINGS = frozenset({"stop_words", "bad_words"})
"""Lists in which an empty string is nothing: TensorRT-LLM's users send it for "none"."""
