"""Logits over the paged cache equal transformers' plain forward, however a prompt is cut and whatever the page size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from hand_built import HandBuilt
from model_pair import Pair

ATTENTION_BACKENDS = ["torch"]
PAGE_SIZES = [1, 2, 7, 16, 64]
PROMPTS = ["1", "page - 1", "page", "page + 1", "2 * page", "2 * page + 1"]
CHUNKS = ["1", "page - 1", "page", "page + 1", "prompt - 1", "prompt", "10 ** 6"]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(3, 128) for i in range(count)]


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_chunk_size(
    tiny_pair: Callable[[str], Pair], backend: str, page_size: int, prompt: str
) -> None:
    """The logits after every chunk, for each of the seven chunk sizes."""
    length = max(1, eval(prompt, {"page": page_size}))
    pair = tiny_pair("llama")
    token_ids = tokens(length)
    reference = pair.reference_logits(token_ids)
    for chunk in sorted({max(1, eval(rule, {"page": page_size, "prompt": length})) for rule in CHUNKS}):
        logits = HandBuilt(pair.paged, page_size, backend).chunk_logits(token_ids, chunk)
        ends = [min(start + chunk, length) - 1 for start in range(0, length, chunk)]
        torch.testing.assert_close(
            logits, reference[ends], atol=1e-4, rtol=0, msg=lambda text, c=chunk: f"chunk {c}: {text}"
        )


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
@pytest.mark.parametrize("page_size", [256, 2])
def test_six_tokens_whole_and_as_three_and_three(
    tiny_pair: Callable[[str], Pair], backend: str, page_size: int
) -> None:
    """Eight sequences of the tokens 1 to 6, at most 64 long: the last logits do not depend on the cut."""
    model = tiny_pair("llama").paged
    num_pages = 8 * -(-64 // page_size)
    whole = HandBuilt(model, page_size, backend, num_pages=num_pages)
    at_once = whole.step(*((whole.sequence([1, 2, 3, 4, 5, 6]), 6) for _ in range(8)))
    halves = HandBuilt(model, page_size, backend, num_pages=num_pages)
    sequences = [halves.sequence([1, 2, 3, 4, 5, 6]) for _ in range(8)]
    assert halves.step(*((sequence, 3) for sequence in sequences)).shape == (0, model.vocab_size)
    in_two = halves.step(*((sequence, 3) for sequence in sequences))
    torch.testing.assert_close(in_two, at_once, atol=1e-5, rtol=0)
    torch.testing.assert_close(at_once, at_once[:1].expand(8, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS)
def test_decoding_beside_chunks(tiny_pair: Callable[[str], Pair], backend: str) -> None:
    """Running sequences decode in the same steps in which a long prompt comes in piece by piece."""
    pair = tiny_pair("llama")
    paged = HandBuilt(pair.paged, 7, backend)
    short = [paged.sequence(tokens(n, seed=n)) for n in (3, 9)]
    long = paged.sequence(tokens(100, seed=100))
    paged.step(*((sequence, sequence.num_tokens) for sequence in short))
    for chunk in itertools.chain([6] * 16, [4]):
        for sequence in short:
            sequence.token_ids.append(tokens(1, seed=sequence.num_tokens)[0])
        logits = paged.step(*((sequence, 1) for sequence in short), (long, chunk))
        for row, sequence in enumerate(short):
            expected = pair.reference_logits(list(sequence.token_ids))[-1]
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=0)
    assert logits.shape[0] == 3
    torch.testing.assert_close(logits[2], pair.reference_logits(list(long.token_ids))[-1], atol=1e-4, rtol=0)
