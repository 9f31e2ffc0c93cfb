"""Turns token ids into text one by one, so that the joined parts equal the decoding of all ids.

The tokenizers library's own `DecodeStream` is not exact: it raises where a byte token turns the bytes before it into an
invalid run, never gives out what is pending at the end, and decodes a run of invalid bytes anew with every token of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 8
"""More than the tokens of one character: UTF-8 takes at most 4 bytes."""


class Detokenizer(Protocol):
    """The text of one sequence, made as its tokens arrive."""

    def push(self, token_id: int) -> str:
        """The text that is settled by this token: nothing that follows changes it."""

    def finish(self) -> str:
        """The rest, decoded as what it is when nothing follows. Not to be used any more after that."""


class ByteLevelDetokenizer:
    """For byte-level BPE, where every token stands for bytes and the text is their UTF-8 decoding.

    Args:
        piece: token id -> the token as the vocabulary writes it, None for one that shows nothing.
    """

    def __init__(self, piece: Callable[[int], str | None]) -> None:
        self._piece = piece
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `Detokenizer`; at most the three first bytes of a character are pending."""
        piece = self._piece(token_id)
        return "" if piece is None else self._utf8.decode(_piece_bytes(piece))

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For every other tokenizer: decodes a window of the last few tokens with the tokenizer's own decoding.

    The window is what has been shown last, as context (many tokenizers drop the space in front of the first token),
    and what is pending.

    Args:
        decode: token ids -> text.
        is_shown: False for tokens that add no text and count as absent.
        is_open: True for tokens whose text the next token may change (byte tokens: an invalid byte spoils its whole run).
        may_split_characters: for tokenizers of which nothing more is known: a text that ends in U+FFFD is taken for
            half a character, for as long as a character can take to complete.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        is_shown: Callable[[int], bool],
        is_open: Callable[[int], bool],
        may_split_characters: bool,
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        self._is_open = is_open
        self._may_split_characters = may_split_characters
        self._context: list[int] = []
        self._context_length = 0
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """See `Detokenizer`; a run of open tokens is pending as a whole, and decoded once, when it ends."""
        if not self._is_shown(token_id):
            return ""
        self._pending.append(token_id)
        if self._is_open(token_id):
            return ""
        text = self._pending_text()
        half = self._may_split_characters and text.endswith(_REPLACEMENT)
        if not text or (half and len(self._pending) < _MAX_PENDING_TOKENS):
            return ""
        self._context, self._pending = self._pending, []
        self._context_length = len(self._decode(self._context))
        return text

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._pending_text() if self._pending else ""

    def _pending_text(self) -> str:
        return self._decode(self._context + self._pending)[self._context_length :]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table): character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _piece_bytes(piece: str) -> bytes:
    """The bytes of a byte-level token; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()
