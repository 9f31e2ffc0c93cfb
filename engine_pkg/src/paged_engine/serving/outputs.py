"""From the engine's outputs to the tensors of responses, in vllm_backend's formats.

Text, token counts, ids and logprobs of a response are what came since the one before it; finish_reason and
cumulative_logprob are as of now. prompt_logprobs, which vllm_backend does not have, are in the first response, in the format of
logprobs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paged_engine.errors import RequestError
from paged_engine.scheduling.sequence import FinishReason
from paged_engine.serving.contract import ParsedRequest

if TYPE_CHECKING:
    from paged_engine.execution.sampling import SampledToken
    from paged_engine.generation import Output

_LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, for which JSON has no number; vLLM's servers send the same."""
_FLOAT32_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Response:
    """One response: tensors, or an error. The last one of a request is final.

    An array that is the same object as in the response before has the same content: what was made of it can be used again.
    """

    tensors: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    error: RequestError | None = None
    is_final: bool = False

    @classmethod
    def failed(cls, error: RequestError) -> Response:
        """The final response of a request that ends badly."""
        return cls(error=error, is_final=True)


@dataclass
class _Pending:
    """What one sequence has brought since the last response."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledToken] = field(default_factory=list)


class ResponseAssembler:
    """Collects one request's outputs and says when there is a response to send.

    Streaming: one for each step that has text, and a last one. Otherwise exactly one, at the end.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        num_prompt_tokens: int,
        prompt_text: str,
        decode_token: Callable[[int], str],
    ) -> None:
        """
        Args:
            parsed: the request; its options say which outputs are wanted.
            num_prompt_tokens: for `num_input_tokens`.
            prompt_text: stands in front of the text of each sequence; "" where the prompt is not wanted.
            decode_token: the text of one token on its own, for `logprobs` and `prompt_logprobs`.
        """
        self._options = parsed.options
        self._reports_logprobs = parsed.reports_logprobs
        self._owes_prompt_logprobs = parsed.request.sampling.prompt_logprobs is not None
        # The prompt's first token has nothing before it that could tell how likely it is.
        self._prompt_entries = ["null"]
        self._prompt_is_scored = False
        self._num_prompt_tokens = num_prompt_tokens
        self._decode_token = decode_token
        num_sequences = parsed.request.sampling.n
        self._pending = [_Pending(text=prompt_text) for _ in range(num_sequences)]
        self._finish_reasons: list[FinishReason | None] = [None] * num_sequences
        self._cumulative_logprobs = [0.0] * num_sequences
        self._repeated: dict[str, tuple[list[Any], npt.NDArray[Any]]] = {}

    def add(self, outputs: Sequence[Output]) -> Response | None:
        """Take what one step brought; returns the response to send now, if there is one."""
        for output in outputs:
            if output.error is not None:
                return Response.failed(output.error)
            pending = self._pending[output.index]
            pending.text += output.text
            pending.token_ids.extend(output.token_ids)
            pending.logprobs.extend(output.logprobs)
            self._finish_reasons[output.index] = output.finish_reason
            self._prompt_entries += [
                json.dumps(entry, allow_nan=False) for entry in self._entries(output.prompt_logprobs)
            ]
            self._prompt_is_scored |= output.index == 0 and len(output.token_ids) > 0
            if output.cumulative_logprob is not None:
                self._cumulative_logprobs[output.index] = output.cumulative_logprob
        is_final = None not in self._finish_reasons
        has_text = any(pending.text for pending in self._pending)
        is_held_back = self._owes_prompt_logprobs and not self._prompt_is_scored
        if is_final or (self._options.stream and has_text and not is_held_back):
            return self._take(is_final)
        return None

    def _take(self, is_final: bool) -> Response:
        pending = self._pending
        self._pending = [_Pending() for _ in pending]
        options = self._options
        is_due = is_final or not options.return_at_end
        tensors = {"text_output": _strings([item.text for item in pending])}
        if options.return_finish_reason and is_due:
            reasons = ["None" if reason is None else reason.value for reason in self._finish_reasons]
            tensors["finish_reason"] = self._repeat("finish_reason", reasons, _strings)
        if options.return_num_input_tokens and is_due:
            tensors["num_input_tokens"] = self._repeat("num_input_tokens", [self._num_prompt_tokens], _counts)
        if options.return_num_output_tokens:
            counts = [len(item.token_ids) for item in pending]
            tensors["num_output_tokens"] = self._repeat("num_output_tokens", counts, _counts)
        if options.return_token_ids:
            tensors["token_ids"] = np.array([token for item in pending for token in item.token_ids], np.int32)
        if options.return_cumulative_logprob:
            values = [max(value, _FLOAT32_LOWEST) for value in self._cumulative_logprobs]
            tensors["cumulative_logprob"] = np.array(values, np.float32)
        if options.return_logprobs:
            tensors["logprobs"] = _strings([self._logprobs_json(item.logprobs) for item in pending])
        if self._owes_prompt_logprobs:
            tensors["prompt_logprobs"] = _strings([self._take_prompt_logprobs()])
        return Response(tensors, is_final=is_final)

    def _repeat(
        self, name: str, values: list[Any], to_array: Callable[[list[Any]], npt.NDArray[Any]]
    ) -> npt.NDArray[Any]:
        """The array of these values: the one of the response before, if they are still the same."""
        before = self._repeated.get(name)
        if before is None or before[0] != values:
            before = self._repeated[name] = values, to_array(values)
        return before[1]

    def _take_prompt_logprobs(self) -> str:
        """As JSON; null where the request ended before its prompt was computed."""
        entries, self._prompt_entries, self._owes_prompt_logprobs = self._prompt_entries, [], False
        return f"[{', '.join(entries)}]" if self._prompt_is_scored else "null"

    def _logprobs_json(self, tokens: Sequence[SampledToken]) -> str:
        return json.dumps(self._entries(tokens), allow_nan=False) if self._reports_logprobs else "null"

    def _entries(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        """For each token {token_id: {logprob, rank, decoded_token}}, the token itself first."""
        entries = []
        for token in tokens:
            entry = {str(token.token_id): self._logprob_entry(token.token_id, token.logprob, token.rank)}
            for other in token.top:
                entry.setdefault(
                    str(other.token_id), self._logprob_entry(other.token_id, other.logprob, other.rank)
                )
            entries.append(entry)
        return entries

    def _logprob_entry(self, token_id: int, logprob: float | None, rank: int | None) -> dict[str, Any]:
        finite = logprob is not None and math.isfinite(logprob)
        return {
            "logprob": logprob if finite else _LOGPROB_FLOOR,
            "rank": rank,
            "decoded_token": self._decode_token(token_id),
        }


def _counts(values: Sequence[int]) -> npt.NDArray[np.uint32]:
    return np.array(values, np.uint32)


def _strings(values: Sequence[str]) -> npt.NDArray[np.object_]:
    return np.array([value.encode() for value in values], dtype=np.object_)
