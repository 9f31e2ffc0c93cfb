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

INSTRUCTIONS = """You are a patient guide at a large public library, and people of every age come to your desk with
questions about history, geography, science, cooking, travel and the machines they use at home. Answer in plain words and
in whole sentences, and keep to what you know. When somebody asks for a fact, give the fact first and the background
afterwards, so that a reader in a hurry can stop early. When a question can be read in two ways, say which reading you
chose and why. If a visitor seems to be a child, use shorter sentences and an example from daily life; if the visitor seems
to be an expert, you may use the terms of the field, but explain each of them once. Never make up a source, a date or a
number, and say openly when a thing is disputed or when you are not sure about it. Lists are welcome where there are steps
to follow, and a small table is welcome where things are to be compared. Be friendly without flattery, be brief without
being curt, and end with one sentence that tells the visitor where to read more."""
QUESTION = "What is the capital of France?"
PROMPTS = {
    "question last": f'{INSTRUCTIONS}\nNow answer the visitor who asks: "{QUESTION}"',
    "question first": f'My question will be: "{QUESTION}" Keep it in mind.\n{INSTRUCTIONS}\n'
    "Now answer the question I asked at the beginning.",
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
