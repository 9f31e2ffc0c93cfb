"""Turns pydantic's findings into sentences for people, the same way for configuration and for requests.

Every field of a validated model says what it accepts in its `description`, up to the first semicolon: that text completes
the sentence "<field> must be <description>, got <value>", so a range stands in one place only.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError

_MAX_SHOWN_CHARACTERS = 60
_LEAST_SIMILARITY = 0.72
"""Of difflib's ratio: typos and other servers' names for a thing lie above, words that merely share letters below."""
_TRUE = ("true", "1")
_FALSE = ("false", "0")


def nearest(key: str, known: Iterable[str]) -> str | None:
    """The known key that `key` is probably a misspelling of, or None when nothing is close."""
    if len(key) > _MAX_SHOWN_CHARACTERS:
        return None  # the search takes time by the length
    spelling = key.lower().replace("-", "_")
    matches = difflib.get_close_matches(spelling, list(known), n=1, cutoff=_LEAST_SIMILARITY)
    return matches[0] if matches else None


def unknown_key(kind: str, key: str, known: Iterable[str]) -> str:
    """The sentence for a key nobody knows: it names the key and, if there is one, the nearest known key."""
    suggestion = nearest(key, known)
    hint = f"; did you mean '{suggestion}'?" if suggestion else ""
    return f"unknown {kind} '{shown(key)}'{hint}"


def shown(value: object) -> str:
    """`value` as it may stand in a message: short, and with NaN and Infinity under the names JSON users write."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= _MAX_SHOWN_CHARACTERS:
        return text
    length = f" ({len(value)} elements)" if isinstance(value, (list, dict)) else ""
    return f"{text[:_MAX_SHOWN_CHARACTERS]}…{length}"


def explain(error: ValidationError, model: type[BaseModel], values: dict[str, Any], kind: str) -> str:
    """One sentence for the first thing wrong in `values`.

    Args:
        error: what pydantic found while validating `values` as `model`.
        model: its fields' descriptions say what is allowed.
        values: what the user gave, so that the message shows the user's value and not a coerced one.
        kind: what a key is called in the message ("parameter", "sampling parameter").
    """
    first = error.errors(include_url=False)[0]
    if not first["loc"]:
        return str(first.get("ctx", {}).get("error", first["msg"]))
    name = str(first["loc"][0])
    field = model.model_fields.get(name)
    if field is None:
        return unknown_key(kind, name, model.model_fields)
    allowed = (field.description or first["msg"]).split(";")[0]
    return f"{name} must be {allowed}, got {shown(values.get(name))}"


def _boolean_word(value: object) -> object:
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
        raise ValueError("not a boolean")
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError("not a boolean")


def _whole_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    if isinstance(value, str):
        return int(value.strip()) if _is_plain_integer(value.strip()) else _raise("not a whole number")
    return value


def _is_plain_integer(text: str) -> bool:
    digits = text[1:] if text[:1] in ("-", "+") else text
    return digits.isascii() and digits.isdigit() and len(digits) <= 20


def _decimal_number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return value


def _raise(message: str) -> Any:
    raise ValueError(message)


Flag = Annotated[bool, BeforeValidator(_boolean_word)]
"""true/false/1/0 in any case, as a boolean, a number or a word; nothing else ("yes" is refused)."""
Whole = Annotated[int, BeforeValidator(_whole_number)]
"""A whole number, or a plain decimal writing of one ("16"; "16.0", "1e3" and true are refused)."""
Strings = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
"""A list of strings; a bare string is a list of one."""
Decimal = Annotated[float, BeforeValidator(_decimal_number)]
"""A number, or the writing of one; bounds and finiteness are the field's."""
