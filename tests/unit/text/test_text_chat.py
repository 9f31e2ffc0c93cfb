"""Conversations through the checkpoint's template, and every way in which one can be wrong."""

from __future__ import annotations

from typing import Any

import pytest
import sample_tokenizers
from sample_tokenizers import BOS, SampleTokenizer

from paged_engine.errors import ErrorCode, RequestError

STRICT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('Only user and assistant, please!') }}"
    "{% elif (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}"
    "{% endif %}[{{ message['role'] }}] {{ message['content'] }}{% if tone %} {{ tone }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if tools %}{% for tool in tools %}<{{ tool['name'] }}>{% endfor %}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "the fox"}
ASSISTANT = {"role": "assistant", "content": "jumps"}


@pytest.fixture(scope="module")
def strict() -> SampleTokenizer:
    return SampleTokenizer(sample_tokenizers.make("byte_level", adds_bos=True, chat_template=STRICT_TEMPLATE))


def prompt(tokenizer: SampleTokenizer, messages: Any, *rest: Any) -> str:
    return tokenizer.decode(tokenizer.render_chat(messages, *rest), skip_special_tokens=False)


def refusal(tokenizer: SampleTokenizer, messages: Any, *rest: Any) -> str:
    with pytest.raises(RequestError) as caught:
        tokenizer.render_chat(messages, *rest)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_the_answer_is_opened_and_bos_stands_once(strict: SampleTokenizer) -> None:
    assert prompt(strict, [USER]) == f"{BOS}[user] the fox\n[assistant]"


def test_a_template_without_bos_gets_none(llama: SampleTokenizer) -> None:
    tokenizer = SampleTokenizer(
        sample_tokenizers.make("llama", adds_bos=True, chat_template="{{ messages[0]['content'] }}")
    )
    assert tokenizer.bos_token_id not in tokenizer.render_chat([USER])


def test_a_last_message_by_the_assistant_is_continued(strict: SampleTokenizer) -> None:
    assert prompt(strict, [USER, ASSISTANT]) == f"{BOS}[user] the fox\n[assistant] jumps"


def test_continuing_can_be_overridden(strict: SampleTokenizer) -> None:
    closed = f"{BOS}[user] the fox\n[assistant] jumps\n"
    messages = [USER, ASSISTANT]
    assert prompt(strict, messages, {"add_generation_prompt": True}) == closed + "[assistant]"
    assert prompt(strict, messages, {"add_generation_prompt": False}) == closed
    assert prompt(strict, messages, {"continue_final_message": False}) == closed + "[assistant]"
    assert prompt(strict, [USER], {"continue_final_message": True}) == f"{BOS}[user] the fox"
    assert "not compatible" in refusal(
        strict, [USER], {"continue_final_message": True, "add_generation_prompt": True}
    )


def test_variables_and_tools_reach_the_template(strict: SampleTokenizer) -> None:
    tools = [{"name": "weather"}, {"name": "clock"}]
    assert prompt(strict, [USER], {"tone": "softly"}, tools) == (
        f"{BOS}[user] the fox softly\n<weather><clock>[assistant]"
    )


def test_text_parts_are_joined(strict: SampleTokenizer) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    assert prompt(strict, [{"role": "user", "content": parts}]) == f"{BOS}[user] the\nfox\n[assistant]"


def test_an_assistants_message_with_tool_calls_needs_no_content() -> None:
    template = (
        "{% for message in messages %}{{ message['role'] }}{{ message['tool_calls'] | length }};{% endfor %}"
    )
    tokenizer = SampleTokenizer(sample_tokenizers.make("byte_level", chat_template=template))
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]}]
    assert prompt(tokenizer, messages) == "assistant1;"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, USER], "Roles must alternate!"),
        ([{"role": "banana", "content": "x"}], "Only user and assistant, please!"),
        ([{"role": "user", "content": None}], "messages[0].content must be a string"),
        ([USER, {"role": "assistant"}], "messages[1].content must be a string"),
        ([{"role": "user", "content": 7}], "got 7"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role must be a non-empty string"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([], "at least one {role, content} object"),
        (["the fox"], "messages must be a list"),
        ({"role": "user", "content": "x"}, "messages must be a list"),
        ("the fox", "messages must be a list"),
        (None, "messages must be a list"),
        ([[USER]], "messages must be a list"),
        ([{"role": "user", "content": "half \ud83d"}], "not valid Unicode"),
    ],
)
def test_wrong_messages(strict: SampleTokenizer, messages: Any, reason: str) -> None:
    assert reason in refusal(strict, messages)


def test_a_checkpoint_without_a_template() -> None:
    tokenizer = SampleTokenizer(sample_tokenizers.make("byte_level", chat_template=None))
    assert "no chat template" in refusal(tokenizer, [USER])


@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ messages[0]['content'] + 1 }}", "{{ nothing.here.at_all }}", "{{ 1 // 0 }}"]
)
def test_a_template_that_fails_ends_this_request_alone(template: str) -> None:
    tokenizer = SampleTokenizer(sample_tokenizers.make("byte_level", chat_template=template))
    assert "chat template" in refusal(tokenizer, [USER])


@pytest.mark.parametrize("key", ["chat_template", "tokenize", "tools", "conversation", "max_length"])
def test_variables_that_the_server_sets_itself(strict: SampleTokenizer, key: str) -> None:
    assert key in refusal(strict, [USER], {key: "{{ 1 }}"})


def test_malformed_variables_and_tools(strict: SampleTokenizer) -> None:
    assert "chat_template_kwargs must be an object" in refusal(strict, [USER], ["tone"])
    assert "tools must be a list" in refusal(strict, [USER], {}, {"name": "clock"})
    assert "chat template" in refusal(strict, [USER], {"messages": []})
