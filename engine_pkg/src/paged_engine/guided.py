"""Guided decoding: grammars that say which tokens may come next, by the library llguidance.

llguidance was chosen over xgrammar because it says so when it cannot enforce a part of a schema (`not`, `if`, `uniqueItems`),
compiles a schema in milliseconds, and is one wheel of 3 MB without dependencies for every Python from 3.9 (xgrammar also installs
Triton, the GPU language). It is imported at the first request that needs it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paged_engine.errors import RequestError
from paged_engine.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MAX_CACHED = 256
_MAX_SHOWN_CHARACTERS = 300
_MAX_GRAMMAR_CHARACTERS = 1 << 18
"""Compiling a grammar of so many takes a second, and more by their square."""


class GrammarState:
    """Where one sequence stands in its grammar. It follows the sequence's own tokens, so a preemption means nothing to it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_consumed = 0

    def next_tokens(self, output_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Which tokens may come next; once the grammar is complete those are the end-of-sequence tokens.

        Args:
            output_ids: int32 [num_output_tokens], all that the sequence has generated.

        Returns:
            uint8, the vocabulary in bits: token i may come next where bit i % 8 of byte i // 8 is set.

        Raises:
            RequestError: INVALID_ARG when the grammar turns out too complex to follow.
        """
        matcher = self._matcher
        if not matcher.is_stopped():
            matcher.consume_tokens(output_ids[self._num_consumed :].tolist())
        self._num_consumed = len(output_ids)
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            reason = _in_short(matcher.get_error())
            raise RequestError.invalid(
                f"structured_outputs cannot be followed beyond token {self._num_consumed}: {reason}"
            )
        return allowed


class GrammarCompiler:
    """Compiles and remembers grammars for one checkpoint. Any thread may call it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """
        Args:
            tokenizer: transformers' tokenizer of the checkpoint.
            vocab_size: the width of the model's logits.
            eos_token_ids: the tokens that may end a text.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, wanted: StructuredOutputs) -> GrammarState:
        """The beginning of a grammar, for one sequence; compiled at the first time, in milliseconds as a rule.

        Raises:
            RequestError: INVALID_ARG for a grammar that is malformed, unsatisfiable or not supported, with the reason.
        """
        grammar = _grammar_of(wanted)
        with self._lock:
            vocabulary = self._vocabulary = self._vocabulary or self._read_vocabulary()
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _compile(vocabulary, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
            return GrammarState(compiled.deep_copy())

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if not self._eos_token_ids:
            raise RequestError.invalid(
                "structured_outputs needs an end-of-sequence token, and this checkpoint has none"
            )
        num_tokens = max(self._vocab_size, len(self._tokenizer))
        try:
            return from_tokenizer(self._tokenizer, n_vocab=num_tokens, eos_token=self._eos_token_ids)
        except ValueError as error:
            raise RequestError.invalid(
                f"structured_outputs does not work with this checkpoint's tokenizer: {error}"
            ) from None


def _grammar_of(wanted: StructuredOutputs) -> str:
    """In llguidance's own notation, with all options in it."""
    try:
        return _written(wanted)
    except (ValueError, RecursionError) as error:  # nested too deeply, half of a surrogate pair, …
        raise RequestError.invalid(f"structured_outputs is not valid: {_in_short(str(error))}") from None


def _written(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher, grammar_from

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        # As one terminal: alternatives of a rule are limited to 2000, and take time by the square of their number.
        return grammar_from("grammar", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, wanted.choice)))
    if wanted.grammar is not None:
        if len(wanted.grammar) > _MAX_GRAMMAR_CHARACTERS:
            raise RequestError.invalid(
                f"structured_outputs.grammar must have at most {_MAX_GRAMMAR_CHARACTERS} characters, "
                f"got {len(wanted.grammar)}"
            )
        return grammar_from("grammar", wanted.grammar)
    schema: Any = {"type": "object"} if wanted.json_schema is None else wanted.json_schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise RequestError.invalid(f"structured_outputs.json is not valid JSON: {error}") from None
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": not wanted.disable_any_whitespace}
    )


def _compile(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher

    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    if matcher.is_error():
        raise RequestError.invalid(
            f"structured_outputs is not a grammar that can be enforced: {_in_short(matcher.get_error())}"
        )
    return matcher


def _in_short(message: str) -> str:
    """llguidance's message without the state it appends, in one line."""
    line = " ".join(message.split("<state>")[0].split())
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else line[:_MAX_SHOWN_CHARACTERS] + "…"
