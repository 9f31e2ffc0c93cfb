"""Text to token ids and back, from any thread: transformers' own entry points change shared state while they encode."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

from paged_engine.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_ANCHOR = "a"


class Codec(Protocol):
    """What `Tokenizer` needs of a tokenizer's implementation."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text, with the special tokens that the tokenizer puts around it if asked for."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some token ids."""

    def decode_token(self, token_id: int) -> str:
        """The text of one token in the middle of a text, special tokens included."""

    def open_detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """Incremental decoding for one sequence."""


class FastCodec:
    """A tokenizer of the tokenizers library, used without transformers' wrapper.

    The wrapper's calls set padding and truncation on the shared tokenizer; nothing here writes to it after loading.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._decoder = backend.decoder
        self._decoder_types = _decoder_types(backend.decoder)
        added = backend.get_added_tokens_decoder().values()
        self._special_pieces = frozenset(token.content for token in added if token.special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Codec`. Only the batch call lets other threads run meanwhile."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Codec`."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """See `Codec`. A space in front of the token is kept, although many decoders drop it from a first token."""
        piece = self._backend.id_to_token(token_id)
        if piece is None or self._decoder is None:
            return piece or ""
        return self._decoder.decode([_ANCHOR, piece])[len(_ANCHOR) :]

    def open_detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """See `Codec`."""
        hidden = self._special_pieces if skip_special_tokens else frozenset()

        def piece(token_id: int) -> str | None:
            text = self._backend.id_to_token(token_id)
            return None if text in hidden else text

        def is_byte(token_id: int) -> bool:
            return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

        if self._decoder_types == ["ByteLevel"]:
            return ByteLevelDetokenizer(piece)
        return WindowDetokenizer(
            lambda token_ids: self._backend.decode(token_ids, skip_special_tokens=False),
            is_shown=lambda token_id: piece(token_id) is not None,
            is_open=is_byte if "ByteFallback" in self._decoder_types else lambda _: False,
            may_split_characters=not _WHOLE_CHARACTERS.issuperset(self._decoder_types),
        )


class SlowCodec:
    """A tokenizer written in Python, through transformers. Its streamed text equals its decoding for valid text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._encoding = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """See `Codec`. One text at a time; decoding only reads and goes on meanwhile."""
        with self._encoding:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Codec`."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def decode_token(self, token_id: int) -> str:
        """See `Codec`."""
        return self.decode([token_id], skip_special_tokens=False)

    def open_detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """See `Codec`."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(
            lambda token_ids: self.decode(token_ids, skip_special_tokens=False),
            is_shown=lambda token_id: token_id not in hidden,
            is_open=lambda _: False,
            may_split_characters=True,
        )


_WHOLE_CHARACTERS = frozenset(
    {"BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}
)
"""Decoders that never give out half a character for a token, other than a byte token."""


def _decoder_types(decoder: Any) -> list[str]:
    """The decoders that a tokenizer applies, in order, by the names in tokenizer.json; ["custom"] if unknown."""

    def flatten(state: dict[str, Any]) -> list[str]:
        if state["type"] == "Sequence":
            return [name for part in state["decoders"] for name in flatten(part)]
        return [state["type"]]

    if decoder is None:
        return []
    try:
        return flatten(json.loads(decoder.__getstate__()))
    except Exception:
        # A decoder written in Python cannot be serialized, and the library has no error type of its own for it.
        return ["custom"]
