"""Showing an answer in a terminal: text on stdout as it comes, figures and errors on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from paged_client.client import Client
from paged_client.request import GenerationOptions, Prompt
from paged_client.types import Generation


@dataclass
class Answerer:
    """Asks a server and prints what it says. `stream` False prints the answer as a whole at its end."""

    client: Client
    options: GenerationOptions
    stream: bool
    notes: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))

    def answer(self, prompt: Prompt, received: list[str]) -> None:
        """Prints the answer to a prompt and a line of figures.

        `received` gets the text piece by piece, so that it has what there was if an error or Ctrl-C ends the answer.
        """
        if self.stream:
            with _line_on_stdout(received), self.client.stream(prompt, **self.options) as stream:
                for delta in stream:
                    received.append(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
            generation = stream.result
        else:
            generation = self.client.generate(prompt, **self.options)
            received.append(generation.text)
            with _line_on_stdout(received):
                sys.stdout.write(generation.text)
        self.note(_figures(generation))

    def note(self, text: str) -> None:
        """Prints a dim line on stderr."""
        self.notes.print(text, style="dim", markup=False)

    def error(self, error: Exception) -> None:
        """Prints an error as one line on stderr."""
        self.notes.print("error:", " ".join(str(error).split()), style="red", markup=False)


@contextmanager
def _line_on_stdout(received: list[str]) -> Iterator[None]:
    """Ends the line that the received text stands on, however the text ends; no text, no line."""
    try:
        yield
    finally:
        if received:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _figures(generation: Generation) -> str:
    num_tokens = generation.num_output_tokens
    parts = [f"{num_tokens} token{'' if num_tokens == 1 else 's'}"]
    parts.append(f"{num_tokens / max(generation.duration_s, 1e-9):.1f} tokens/s")
    if generation.time_to_first_token_s is not None:
        parts.append(f"first token after {generation.time_to_first_token_s:.2f} s")
    parts.append(f"finish reason {generation.finish_reason}")
    return " · ".join(parts)
