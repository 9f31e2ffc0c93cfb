"""Chat messages to the prompt that the checkpoint's own template makes of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from paged_engine.errors import RequestError
from paged_engine.validation import shown

_OWN_ARGUMENTS = frozenset({"add_generation_prompt", "continue_final_message", "documents"})
"""Arguments of transformers' `apply_chat_template` that a request may set; any other name is a template variable."""
_MAX_REASON_CHARACTERS = 500


def render(
    tokenizer: Any,
    messages: Any,
    chat_template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
) -> str:
    """The prompt for a conversation.

    A last message by the assistant is continued, any other is followed by the header of the assistant's answer, as in
    transformers' pipelines; `add_generation_prompt` and `continue_final_message` in `chat_template_kwargs` override that.

    Args:
        tokenizer: transformers' tokenizer, which holds the template.
        messages: a list of {role, content, ...}; content is a string or a list of {"type": "text", "text": ...}, and
            may be absent from an assistant's message that has tool calls.
        chat_template_kwargs: variables of the template.
        tools: JSON schemas of the tools that the template may offer.

    Raises:
        RequestError: INVALID_ARG, with the template's own message where the template refuses the conversation.
    """
    conversation = _checked_messages(messages)
    if not isinstance(chat_template_kwargs, Mapping):
        raise RequestError.invalid(
            f"chat_template_kwargs must be an object, got {shown(chat_template_kwargs)}"
        )
    if tools is not None and not _is_list_of_objects(tools):
        raise RequestError.invalid(f"tools must be a list of JSON schemas, got {shown(tools)}")
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError.invalid(
            "messages cannot be used with this checkpoint: it has no chat template; send text_input instead"
        )
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys() - _OWN_ARGUMENTS
    for key in chat_template_kwargs:
        if key in reserved:
            raise RequestError.invalid(f"chat_template_kwargs must not set {shown(key)}: the server does")
    last = conversation[-1]
    is_prefill = last["role"] == "assistant" and isinstance(last.get("content"), str)
    continues = chat_template_kwargs.get(
        "continue_final_message", is_prefill and "add_generation_prompt" not in chat_template_kwargs
    )
    options = {
        "add_generation_prompt": not continues,
        **chat_template_kwargs,
        "continue_final_message": continues,
    }
    try:
        return str(tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False, **options))
    except Exception as error:
        # A template is a program that runs on what the client sent; whatever it raises concerns this request alone.
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARACTERS] or type(error).__name__
        raise RequestError.invalid(f"messages do not fit the checkpoint's chat template: {reason}") from error


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not _is_list_of_objects(messages) or not messages:
        raise RequestError.invalid(
            f"messages must be a list of at least one {{role, content}} object, got {shown(messages)}"
        )
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError.invalid(f"messages[{index}].role must be a non-empty string, got {shown(role)}")
    if isinstance(content, str):
        return message
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    if content is None and role == "assistant" and message.get("tool_calls"):
        return message
    raise RequestError.invalid(
        f'messages[{index}].content must be a string or a list of {{"type": "text", "text": ...}}, '
        f"got {'null' if content is None else shown(content)}"
    )


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
