"""Every architecture of the tiny models: two sequences mixed, chunks, then greedy decoding, all as transformers does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hand_built import HandBuilt
from model_pair import Pair
from tiny_models import TINY_MODELS

PAGE_SIZE = 4
CHUNK = 5
NUM_GREEDY = 20


@pytest.mark.parametrize("name", list(TINY_MODELS))
def test_chunks_then_greedy(tiny_pair: Callable[[str], Pair], name: str) -> None:
    pair = tiny_pair(name)
    paged = HandBuilt(pair.paged, PAGE_SIZE, "torch")
    generator = random.Random(name)
    sequences = [paged.sequence([generator.randrange(3, 128) for _ in range(n)]) for n in (23, 12)]
    while any(sequence.num_uncomputed for sequence in sequences):
        work = [
            (sequence, min(CHUNK, sequence.num_uncomputed))
            for sequence in sequences
            if sequence.num_uncomputed
        ]
        logits = paged.step(*work)
        finished = [sequence for sequence, _ in work if not sequence.num_uncomputed]
        assert logits.shape == (len(finished), pair.paged.vocab_size)
        assert logits.dtype == torch.float32
        for row, sequence in enumerate(finished):
            expected = pair.reference_logits(list(sequence.token_ids))[-1]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)
            if sequence.num_output_tokens < NUM_GREEDY:
                sequence.token_ids.append(int(logits[row].argmax()))
    for sequence in sequences:
        check_greedy(pair, list(sequence.token_ids), sequence.num_prompt_tokens)


def check_greedy(pair: Pair, token_ids: list[int], num_prompt_tokens: int) -> None:
    """Each generated token is the reference's best, or within 1e-4 of it (matmuls of other shapes round otherwise)."""
    reference = pair.reference_logits(token_ids)
    for position in range(num_prompt_tokens, len(token_ids)):
        logits = reference[position - 1]
        assert logits[token_ids[position]] >= logits.max() - 1e-4
