"""StructuredOutputs: the form a request wants its text to have, under vLLM's names. guided.py makes a grammar of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from paged_engine.validation import Flag


def _from_text(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


class StructuredOutputs(BaseModel):
    """Exactly one form, and how JSON is written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    json_schema: dict[str, Any] | bool | str | None = Field(None, alias="json")
    """JSON that fits this schema; a string is the schema's text."""
    json_object: Flag = False
    """Any JSON object."""
    regex: str | None = None
    """What matches as a whole; the syntax is that of Rust's regex crate, without look-around."""
    choice: list[str] | None = Field(None, min_length=1)
    """One of these strings."""
    grammar: str | None = None
    """A text of this context-free grammar: EBNF as llama.cpp writes it (GBNF), or Lark's."""
    disable_any_whitespace: Flag = False
    """JSON without white space between its elements."""

    @model_validator(mode="after")
    def _check_one_form(self) -> StructuredOutputs:
        forms = (self.json_schema, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(form is not None for form in forms) != 1:
            raise ValueError("exactly one form must be given")
        return self


StructuredOutputsValue = Annotated[StructuredOutputs, BeforeValidator(_from_text)]
"""An object, or its JSON text: request parameters can carry no objects."""
