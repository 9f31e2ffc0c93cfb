"""A conversation in the terminal."""

from __future__ import annotations

from contextlib import suppress

from paged_client.answer import Answerer
from paged_client.errors import PagedClientError
from paged_client.types import Message

with suppress(ImportError):  # Windows has none.
    import readline  # noqa: F401  (gives `input` line editing and its history)

_HELP = "/clear forgets the conversation · Ctrl-C stops an answer · /exit or Ctrl-D leaves"


def chat(answerer: Answerer, system: str | None) -> None:
    """Reads lines and answers them with the whole conversation as context, until `/exit` or the end of the input.

    `system` is a message put before everything. A turn that fails leaves the conversation as it was; one that
    Ctrl-C stops stays in it with the text so far.
    """
    beginning = [] if system is None else [Message(role="system", content=system)]
    conversation = list(beginning)
    answerer.note(_HELP)
    while True:
        try:
            line = input("› ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if line == "/exit":
            return
        if line == "/clear":
            conversation = list(beginning)
            answerer.note("The conversation is empty again.")
        elif line.startswith("/"):
            answerer.note(f"There is no command {line.split()[0]}. {_HELP}")
        elif line:
            question = Message(role="user", content=line)
            text = _turn(answerer, [*conversation, question])
            if text:
                conversation += [question, Message(role="assistant", content=text)]


def _turn(answerer: Answerer, conversation: list[Message]) -> str:
    """Answers the last message; returns the text, "" if there is nothing worth remembering."""
    received: list[str] = []
    try:
        answerer.answer(conversation, received)
    except KeyboardInterrupt:
        answerer.note("Stopped.")
    except PagedClientError as error:
        answerer.error(error)
        return ""
    return "".join(received)
