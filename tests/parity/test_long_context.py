"""The real model over prompts much longer than a step: nothing of the context is lost between chunks.

Two prompts of about 190 words ask the same question, one at its end and one at its beginning; a chunk written to or read
from the wrong place would cost the answer. Settings: batches of 32, pages of 16, 64 tokens a step.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine
from paged_engine.request import Chat, GenerateRequest, SamplingParams
from paged_engine.tools.default_model import default_model

INSTRUCTIONS = """You are a knowledgeable helper who gives short, correct and complete answers about many subjects, among them
geography, history, science, technology and the problems of daily life. Write in plain words and in whole sentences, and
fit the depth of an answer to the person who asks. Give the fact first and the background afterwards, so that a reader in a
hurry can stop early, and explain the reasons behind a recommendation, not only its steps. If a question can be understood in
two ways, say which reading you chose before you answer. Where there are steps to follow, put them into a list, and add a
small example where it helps. Keep a friendly and professional tone, leave out jargon wherever ordinary words will do, and
make sure that what you say is both exact and easy to follow. Your aim is to make difficult subjects clear without losing
what matters about them. Before you finish, check that your answer agrees with itself, and say openly where something is
uncertain or disputed, so that the person can decide well on the strength of what you wrote."""
QUESTION = "What is the capital of France?"
PROMPTS = {
    "question last": f'{INSTRUCTIONS}\nNow tell me the answer to the question: "{QUESTION}"',
    "question first": f'My question will be: "{QUESTION}" Keep it in mind.\n{INSTRUCTIONS}\n'
    "Now answer the question that I asked at the beginning.",
}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    cache = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")
    return default_model(cache / "models")


def answer(engine: Engine, prompt: str) -> tuple[list[int], str, int]:
    """Greedy tokens, text, and the number of steps it took."""
    request = GenerateRequest(
        "a", Chat([{"role": "user", "content": prompt}]), SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    )
    engine.add(engine.prepare(request))
    tokens, text, num_steps = [], "", 0
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            text += output.text
        engine.check_integrity()
        num_steps += 1
    return tokens, text, num_steps


def load(checkpoint: Path, **parameters: str) -> Engine:
    settings = {
        "model": str(checkpoint),
        "dtype": "float32",
        "page_size": "16",
        "max_batch_size": "32",
        **parameters,
    }
    return load_engine(EngineConfig.from_parameters({"max_seq_len": "2048", "num_pages": "256", **settings}))


def test_chunked_and_whole_prompts_give_the_answer_of_transformers(checkpoint: Path) -> None:
    chunked = load(checkpoint, max_num_tokens="64")
    whole = load(checkpoint, max_num_tokens="512", enable_chunked_prefill="false")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    for name, prompt in PROMPTS.items():
        assert 150 <= len(prompt.split()) <= 230
        tokens, text, num_steps = answer(chunked, prompt)
        assert "Paris" in text, name
        assert answer(whole, prompt)[0] == tokens, name
        prompt_ids = chunked.tokenizer.render_chat([{"role": "user", "content": prompt}])
        assert num_steps >= len(prompt_ids) // 64 + len(tokens), name
        expected = model.generate(
            torch.tensor([prompt_ids]), attention_mask=torch.ones(1, len(prompt_ids)), max_new_tokens=MAX_TOKENS,
            do_sample=False,
        )  # fmt: skip
        assert expected[0, len(prompt_ids) :].tolist() == tokens, name


def test_bfloat16_gives_the_answer_too(checkpoint: Path) -> None:
    engine = load(checkpoint, dtype="bfloat16", max_num_tokens="64")
    for name, prompt in PROMPTS.items():
        assert "Paris" in answer(engine, prompt)[1], name
