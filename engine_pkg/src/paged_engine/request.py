"""What a user asked for, already in the engine's terms and with every value in range.

Nothing here knows Triton (serving/contract.py builds these) and nothing here changes while the request runs
(scheduling/sequence.py holds its progress).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paged_engine.errors import RequestError
from paged_engine.structured_outputs import StructuredOutputsValue
from paged_engine.validation import Decimal, Flag, Strings, Whole, explain, shown

_MAX_INT64 = 2**63 - 1
_MAX_UINT64 = 2**64 - 1


@dataclass(frozen=True)
class Chat:
    """A conversation, to be written by the checkpoint's chat template."""

    messages: list[dict[str, Any]]
    """{role, content} objects, in order."""
    tools: list[dict[str, Any]] | None = None
    """Descriptions of functions, for templates that present them to the model."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables for the template."""


Prompt = str | Sequence[int] | Chat
"""Text, token ids, or a conversation."""


class SamplingParams(BaseModel):
    """How much of the prompt is read, how tokens are chosen, and when the text ends.

    Descriptions complete "<field> must be …".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: Whole | None = Field(None, ge=1, le=_MAX_INT64, description="a whole number >= 1")
    min_tokens: Whole = Field(0, ge=0, le=_MAX_INT64, description="a whole number >= 0")
    temperature: Decimal = Field(1.0, ge=0, allow_inf_nan=False, description="a finite number >= 0")
    top_p: Decimal = Field(1.0, gt=0, le=1, allow_inf_nan=False, description="a number in (0, 1]")
    top_k: Whole = Field(0, ge=-1, le=_MAX_INT64, description="a whole number >= -1; 0 and -1 are off")
    min_p: Decimal = Field(0.0, ge=0, le=1, allow_inf_nan=False, description="a number in [0, 1]")
    repetition_penalty: Decimal = Field(1.0, gt=0, allow_inf_nan=False, description="a finite number > 0")
    presence_penalty: Decimal = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="a number in [-2, 2]"
    )
    frequency_penalty: Decimal = Field(
        0.0, ge=-2, le=2, allow_inf_nan=False, description="a number in [-2, 2]"
    )
    seed: Whole | None = Field(None, ge=0, le=_MAX_UINT64, description="a whole number from 0 to 2^64 - 1")
    n: Whole = Field(1, ge=1, le=128, description="a whole number from 1 to 128")
    stop: Strings = Field(
        default_factory=list, max_length=256, description="a list of at most 256 strings, none of them empty"
    )
    bad_words: Strings = Field(
        default_factory=list, max_length=4096, description="a list of at most 4096 strings"
    )
    stop_token_ids: list[Whole] = Field(default_factory=list, description="a list of token ids")
    allowed_token_ids: list[Whole] | None = Field(None, description="a list of at least one token id")
    logit_bias: dict[Whole, Decimal] = Field(
        default_factory=dict, description="an object of token id: finite number from -100 to 100"
    )
    structured_outputs: StructuredOutputsValue | None = Field(
        None,
        description="an object with exactly one of json, json_object, regex, choice (a list of at least one string) "
        "and grammar",
    )
    ignore_eos: Flag = Field(False, description="true or false")
    logprobs: Whole | None = Field(None, ge=0, le=100, description="a whole number from 0 to 100")
    prompt_logprobs: Whole | None = Field(None, ge=0, le=100, description="a whole number from 0 to 100")
    truncate_prompt_tokens: Whole | None = Field(
        None, ge=-1, le=_MAX_INT64, description="a whole number >= 1, or -1 for as many as fit"
    )
    skip_special_tokens: Flag = Field(True, description="true or false")
    include_stop_str_in_output: Flag = Field(False, description="true or false")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Validate what a request gave.

        Raises:
            RequestError: INVALID_ARG, naming the field, its value and what is allowed.
        """
        given = dict(values)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise RequestError.invalid(explain(error, cls, given, "sampling parameter")) from None

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if "" in self.stop:
            raise ValueError(
                "stop must be a list of at most 256 strings, none of them empty, got an empty one"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must be a list of at least one token id, got an empty one")
        for token_id, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ValueError(
                    "logit_bias must be an object of token id: finite number from -100 to 100, "
                    f"got {shown(bias)} for token {token_id}"
                )
        if self.truncate_prompt_tokens == 0:
            raise ValueError(
                "truncate_prompt_tokens must be a whole number >= 1, or -1 for as many as fit, got 0"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}"
            )
        return self


@dataclass(frozen=True)
class GenerateRequest:
    """One request as the engine takes it."""

    request_id: str
    """Unique among the requests in flight; the service makes it, a client's own id does not matter here."""
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Lower is sooner."""
    cache_salt: str = ""
    """Requests share cached prefix pages only with requests of the same salt."""
