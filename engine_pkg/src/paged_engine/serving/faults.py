"""Faults on demand, for tests of a real server. Off unless the environment variable PAGED_ENGINE_FAULTS is 1.

A prompt that contains `[[fault:NAME]]` then meets, for NAME:

    prepare     an exception while it is tokenized
    model       a token id that does not exist, so that the model raises in the step
    detokenize  an exception while its tokens are turned into text
    respond     text that cannot be encoded, so that its response cannot be built
    step        an exception in the scheduler's part of a step, which concerns all that is in flight
    fatal       the same, and the engine is unsound afterwards
    slow        0.05 s added to each step, so that it is still running when a test looks
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paged_engine.errors import RequestError
from paged_engine.request import GenerateRequest
from paged_engine.scheduling.sequence import FinishReason

if TYPE_CHECKING:
    from paged_engine.admission import PreparedRequest
    from paged_engine.engine import Engine, EngineStatistics
    from paged_engine.generation import Output
    from paged_engine.text.tokenizer import Tokenizer

_MARKER = re.compile(r"\[\[fault:(\w+)\]\]")
_SLOW_STEP_S = 0.05
_HALF_A_SURROGATE_PAIR = "\ud800"
_NO_SUCH_TOKEN = 2**31 - 1


def are_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started with faults on."""
    return environment.get("PAGED_ENGINE_FAULTS") == "1"


class Fault(RuntimeError):
    """A fault that was asked for."""


class FaultyEngine:
    """An engine that fails where a prompt says so, and otherwise is the engine it was given."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._faults: dict[str, str] = {}
        self._is_broken = False

    @property
    def tokenizer(self) -> Tokenizer:
        """The engine's."""
        return self._engine.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The engine's."""
        return self._engine.eos_token_ids

    @property
    def has_work(self) -> bool:
        """The engine's."""
        return self._engine.has_work

    def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Fail, or prepare and remember the fault that is to come."""
        marker = _MARKER.search(request.prompt) if isinstance(request.prompt, str) else None
        fault = marker.group(1) if marker else ""
        if fault == "prepare":
            raise Fault(fault)
        prepared = self._engine.prepare(request)
        if fault == "model":
            for sequence in prepared.sequences:
                sequence.token_ids[0] = _NO_SUCH_TOKEN
        if fault:
            self._faults[request.request_id] = fault
        return prepared

    def add(self, prepared: PreparedRequest) -> None:
        """Add, with a tokenizer that cannot detokenize if that is the fault."""
        tokenizer: Any = self._engine.tokenizer
        if self._faults.get(prepared.request.request_id) == "detokenize":
            self._engine.tokenizer = _MuteTokenizer()  # type: ignore[assignment]
        try:
            self._engine.add(prepared)
        finally:
            self._engine.tokenizer = tokenizer

    def abort(self, request_id: str, reason: FinishReason | RequestError) -> list[Output]:
        """Abort, and forget the fault."""
        self._faults.pop(request_id, None)
        return self._engine.abort(request_id, reason)

    def step(self) -> list[Output]:
        """Fail, or step and spoil what is to be spoiled."""
        faults = set(self._faults.values())
        if faults & {"step", "fatal"}:
            self._is_broken = "fatal" in faults
            raise Fault("step")
        if "slow" in faults:
            time.sleep(_SLOW_STEP_S)
        outputs = []
        for output in self._engine.step():
            if self._faults.get(output.request_id) == "respond":
                output = replace(output, text=_HALF_A_SURROGATE_PAIR)
            if output.finished:
                self._faults.pop(output.request_id, None)
            outputs.append(output)
        return outputs

    def statistics(self) -> EngineStatistics:
        """The engine's."""
        return self._engine.statistics()

    def check_integrity(self) -> None:
        """Fail after a fatal fault."""
        if self._is_broken:
            raise Fault("fatal")
        self._engine.check_integrity()


class _MuteTokenizer:
    """Opens detokenizers that raise."""

    def open_detokenizer(self, *, skip_special_tokens: bool) -> _MuteDetokenizer:
        return _MuteDetokenizer()


class _MuteDetokenizer:
    def push(self, token_id: int) -> str:
        raise Fault("detokenize")

    def finish(self) -> str:
        raise Fault("detokenize")
