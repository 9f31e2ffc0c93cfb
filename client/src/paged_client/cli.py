"""The command line, `paged-client`: one prompt and its answer, or a conversation."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated

import typer

from paged_client.answer import Answerer
from paged_client.chat import chat as run_chat
from paged_client.client import Client
from paged_client.errors import PagedClientError
from paged_client.request import GenerationOptions, Prompt
from paged_client.types import Message

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False)


class ProtocolChoice(str, Enum):
    """The values of `--protocol`."""

    grpc = "grpc"
    http = "http"


@app.command()
def run(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; - reads it from stdin.", show_default=False)
    ] = None,
    url: Annotated[
        str, typer.Option(help="host:port, grpc://host:port or http://host:port.")
    ] = "localhost:8001",
    protocol: Annotated[
        ProtocolChoice | None,
        typer.Option(help="For a url without a scheme; by default port 8000 means http, any other grpc."),
    ] = None,
    model: Annotated[str, typer.Option(help="The model's name on the server.")] = "llm",
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling: probability mass to keep.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Candidates to keep; 0 is all.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the answer; may be repeated.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message put before the prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    no_stream: Annotated[
        bool, typer.Option("--no-stream", help="Print the answer when it is whole.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Time limit for an answer, in seconds.")] = 600.0,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation.")] = False,
) -> None:
    """Asks the Triton model llm and prints its answer as it comes.

    What you write is sent as a chat message, unless --raw is given.
    """
    if chat and (raw or prompt is not None):
        raise typer.BadParameter("--chat takes neither a prompt nor --raw")
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    if prompt is None and not chat:
        raise typer.BadParameter("give a prompt, - to read it from stdin, or --chat", param_hint="PROMPT")
    options = GenerationOptions(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or None
    )
    try:
        client = Client(url, None if protocol is None else protocol.value, model, timeout_s=timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with client:
        answerer = Answerer(client, options, stream=not no_stream)
        if chat:
            run_chat(answerer, system)
        else:
            _answer_once(answerer, prompt or "", raw, system)


def _answer_once(answerer: Answerer, prompt: str, raw: bool, system: str | None) -> None:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        answerer.answer(_to_prompt(text, raw, system), [])
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except PagedClientError as error:
        answerer.error(error)
        raise typer.Exit(EXIT_ERROR) from None


def _to_prompt(text: str, raw: bool, system: str | None) -> Prompt:
    """The text itself, or a conversation of the system message, if any, and the text."""
    if raw:
        return text
    messages = [] if system is None else [Message(role="system", content=system)]
    return [*messages, Message(role="user", content=text)]
