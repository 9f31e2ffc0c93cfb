"""EngineConfig: every knob an operator has, with its type, range, default and meaning, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paged_engine.errors import ConfigurationError
from paged_engine.validation import Decimal, Flag, Whole, explain

_MAX_INT32 = 2**31 - 1


class EngineConfig(BaseModel):
    """The parameters of config.pbtxt; field names are the keys, descriptions complete "<key> must be …"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # What is served
    model: str = Field(min_length=1, description="the path of a checkpoint folder or .gguf file, or a hub id")
    tokenizer: str | None = Field(
        None, description="the path or hub id of a tokenizer; unset: the model's own"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto, float32, bfloat16 or float16; auto takes the checkpoint's"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    attention_backend: Literal["auto", "flashinfer", "cpu", "torch"] = Field(
        "auto", description="auto, flashinfer, cpu or torch"
    )
    weight_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="auto or int8; int8 quantizes the weights at load, and what they are multiplied with, on a CPU",
    )
    graft: Flag = Field(
        True,
        description="true or false; runs the model in the native CPU kernels, known architectures as a whole; on a GPU, "
        "known modules in fused operations",
    )
    trust_remote_code: Flag = Field(
        False, description="true or false; lets a checkpoint bring its own Python code"
    )
    use_generation_config: Flag = Field(
        True, description="true or false; takes sampling defaults from the checkpoint's generation_config"
    )
    tensor_parallel_size: Whole = Field(1, ge=1, le=1, description="1 (tensor parallelism is not built yet)")

    # The paged KV cache
    page_size: Whole = Field(16, ge=1, le=1024, description="a whole number from 1 to 1024; tokens per page")
    num_pages: Whole = Field(
        0, ge=0, le=_MAX_INT32, description="a whole number >= 0; 0 sizes the pool from memory"
    )
    kv_cache_memory_fraction: Decimal | None = Field(
        None,
        gt=0,
        le=1,
        description="a number in (0, 1]; unset: 0.9 of what is free on a GPU, 0.5 of usable CPU memory",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8"] = Field(
        "auto",
        description="auto, float32, bfloat16, float16, float8_e4m3fn or int8; auto takes the model's",
    )
    enable_prefix_caching: Flag = Field(
        True, description="true or false; keeps computed pages for later requests"
    )

    # What a step may hold
    max_batch_size: Whole = Field(
        64, ge=1, le=4096, description="a whole number from 1 to 4096; sequences in a step"
    )
    max_num_tokens: Whole = Field(
        0,
        ge=0,
        le=1 << 20,
        description="a whole number from 2 to 1048576, tokens in a step; or 0 for 2048, on a CPU with chunked prefill 512",
    )
    max_seq_len: Whole = Field(
        0,
        ge=0,
        le=_MAX_INT32,
        description="a whole number >= 0; tokens of one sequence, 0 takes the checkpoint's",
    )
    enable_chunked_prefill: Flag = Field(True, description="true or false; cuts long prompts into chunks")
    chunking_policy: Literal["first_come_first_served", "equal_progress"] = Field(
        "first_come_first_served", description="first_come_first_served or equal_progress"
    )
    long_prefill_token_threshold: Whole = Field(
        0, ge=0, le=_MAX_INT32, description="a whole number >= 0; caps one sequence's chunk exactly, 0 is off"
    )
    scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] = Field(
        "max_utilization", description="max_utilization or guaranteed_no_evict"
    )

    # Admission
    max_queue_size: Whole = Field(
        1024, ge=1, le=1 << 20, description="a whole number from 1 to 1048576; waiting requests"
    )
    max_queue_bytes: Whole = Field(
        256 << 20,
        ge=1,
        le=1 << 40,
        description="a whole number from 1 to 2^40; bytes that waiting requests may hold",
    )
    default_timeout_ms: Whole = Field(
        0, ge=0, le=_MAX_INT32, description="a whole number >= 0; milliseconds, 0 is none"
    )
    default_max_tokens: Whole = Field(256, ge=1, le=_MAX_INT32, description="a whole number >= 1")
    max_prompt_bytes: Whole = Field(
        16 << 20, ge=1, le=_MAX_INT32, description="a whole number >= 1; bytes of a prompt that are looked at"
    )
    exclude_input_in_output: Flag = Field(
        True, description="true or false; false repeats the prompt in text_output"
    )

    # The machine
    cuda_graphs: Flag = Field(True, description="true or false; replays decode steps as CUDA graphs on a GPU")
    look_ahead: Literal["auto"] | Flag = Field(
        "auto",
        description="auto, true or false; launches a step before the tokens of the one before it are known, auto on a GPU",
    )
    num_threads: Whole = Field(
        0, ge=0, le=4096, description="a whole number from 0 to 4096; 0 is the cores we may use"
    )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> EngineConfig:
        """Read config.pbtxt's `parameters` (all strings); "" and an unexpanded "${NAME}" mean unset.

        Raises:
            ConfigurationError: names the key, its value and what is allowed; an unknown key with the nearest known one.
        """
        given = {key: value.strip() for key, value in parameters.items()}
        values: dict[str, object] = {key: value for key, value in given.items() if not _is_unset(value)}
        unknown = [key for key in given if key not in cls.model_fields]
        if unknown:
            values[unknown[0]] = given[unknown[0]]
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigurationError(explain(error, cls, values, "parameter")) from None

    @model_validator(mode="after")
    def _check_together(self) -> EngineConfig:
        """A sequence must hold a prompt and an answer, the queue the longest text, a step more than one page and more than
        one token for each sequence (the chunk unit is the page)."""
        if self.max_seq_len == 1:
            raise ValueError(
                "max_seq_len must be at least 2, a token of the prompt and one of the answer, or 0 for the checkpoint's, "
                "got 1"
            )
        if self.max_queue_bytes < self.max_prompt_bytes:
            raise ValueError(
                f"max_queue_bytes must be at least max_prompt_bytes = {self.max_prompt_bytes}, or a text of that size could "
                f"never wait, got {self.max_queue_bytes}"
            )
        floor = self._most_tokens_of_one_kind
        if self.max_num_tokens and self.max_num_tokens <= floor:
            raise ValueError(
                f"max_num_tokens must be greater than max(page_size, max_batch_size) = "
                f"max({self.page_size}, {self.max_batch_size}) = {floor}, got {self.max_num_tokens}"
            )
        return self

    @property
    def _most_tokens_of_one_kind(self) -> int:
        """What a step must be able to exceed: one token for each sequence, and a page of a chunk."""
        return max(self.page_size, self.max_batch_size)

    def fitted_to(self, device_type: str) -> EngineConfig:
        """With what is left to the device: max_num_tokens where it is 0, look_ahead where it is auto.

        A chunk holds up the streams beside it for as long as it is computed, so a CPU takes smaller ones: 512 tokens
        already use all of its arithmetic. It has nothing to gain from looking ahead either, being host and device in one.
        """
        usual = 512 if device_type == "cpu" and self.enable_chunked_prefill else 2048
        return self.model_copy(
            update={
                "max_num_tokens": self.max_num_tokens or max(usual, 2 * self._most_tokens_of_one_kind),
                "look_ahead": device_type == "cuda" if self.look_ahead == "auto" else self.look_ahead,
            }
        )


def _is_unset(value: str) -> bool:
    return value == "" or (value.startswith("${") and value.endswith("}"))
