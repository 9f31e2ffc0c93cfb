"""Ten turns of a conversation over the real model: the prefix cache saves the history, and changes no token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine
from paged_engine.request import Chat, GenerateRequest, SamplingParams
from paged_engine.tools.default_model import default_model

CACHE_DIR = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")
PAGE_SIZE = 16
MAX_TOKENS = 12
QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is larger?",
    "What should I see there in one day?",
    "Where can I eat well?",
    "Is it better to go in May or in August?",
    "How do I get there by train?",
    "What do I need to bring?",
    "Please tell me a joke about travelling.",
    "Thank you. What was my first question?",
)


def load(enable_prefix_caching: str) -> Engine:
    parameters = {
        "model": str(default_model(CACHE_DIR / "models")),
        "dtype": "float32",
        "page_size": str(PAGE_SIZE),
        "num_pages": "128",
        "max_batch_size": "4",
        "num_threads": "1",  # two that wait for each other make no speed on a busy machine
        "enable_prefix_caching": enable_prefix_caching,
    }
    return load_engine(EngineConfig.from_parameters(parameters))


def take_turn(engine: Engine, messages: list[dict[str, str]]) -> tuple[list[int], str, int]:
    """The greedy answer to a conversation: its tokens, its text, and how many prompt tokens it found computed."""
    found_before = engine.statistics().num_prefix_cached_tokens
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    engine.add(engine.prepare(GenerateRequest("turn", Chat(messages), sampling)))
    token_ids: list[int] = []
    text = ""
    while engine.has_work:
        for output in engine.step():
            token_ids += output.token_ids
            text += output.text
    engine.check_integrity()
    return token_ids, text, engine.statistics().num_prefix_cached_tokens - found_before


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_turns_have_the_same_tokens_with_the_prefix_cache_and_without() -> None:
    caching, plain = load("true"), load("false")
    messages: list[dict[str, str]] = []
    num_history_tokens = 0
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        tokens, text, num_found = take_turn(caching, messages)
        assert (tokens, text, 0) == take_turn(plain, messages)
        assert num_found >= num_history_tokens - PAGE_SIZE, "the turns before were computed anew"
        messages.append({"role": "assistant", "content": text})
        num_history_tokens = len(caching.tokenizer.render_chat(messages[:-1])) + len(tokens)
    assert num_history_tokens > 200, "the conversation is too short to say anything"
