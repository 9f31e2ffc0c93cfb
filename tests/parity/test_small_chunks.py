"""Many prompts in the smallest chunks: each comes to its end with the tokens that it has alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_runs import Answers, engine, request, run

from paged_engine.request import GenerateRequest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def requests() -> list[GenerateRequest]:
    """32 prompts of 100 to 190 tokens, as many as leave room for 64 more."""
    rng = random.Random(11)
    lengths = [100, 190, *(rng.randint(100, 190) for _ in range(30))]
    return [
        request(f"r{i}", [rng.randrange(3, 259) for _ in range(length)], max_tokens=64)
        for i, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, requests: list[GenerateRequest]) -> dict[str, Answers]:
    solo = engine(checkpoint, enable_prefix_caching=False, max_num_tokens=512)
    return {item.request_id: run(solo, item) for item in requests}


@pytest.mark.parametrize("chunk", [1, 8])
def test_each_has_all_its_tokens(
    checkpoint: Path, requests: list[GenerateRequest], alone: dict[str, Answers], chunk: int
) -> None:
    target = engine(
        checkpoint, long_prefill_token_threshold=chunk, max_batch_size=32, num_pages=2048, max_num_tokens=300
    )
    together = run(target, *requests)
    for item in requests:
        tokens = together.tokens(item.request_id)
        assert len(tokens) == 64
        assert tokens == alone[item.request_id].tokens(item.request_id)
