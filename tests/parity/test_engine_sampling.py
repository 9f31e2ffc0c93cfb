"""How a whole engine chooses tokens: as transformers does, by seed alone, and by nothing of its neighbours or its slot."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answers, engine, request, run
from transformers import AutoModelForCausalLM

from paged_engine.request import GenerateRequest

PROMPT = list(range(30, 67))
PENALIZED = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        ({"min_tokens": 30, "ignore_eos": False}, {"min_new_tokens": 30, "eos_token_id": 2}),
        ({"logit_bias": {40: 6.0, 41: -6.0}}, {"sequence_bias": [[[40], 6.0], [[41], -6.0]]}),
        ({"allowed_token_ids": [*range(40, 90)]}, {"suppress_tokens": [*range(40), *range(90, 320)]}),
        (
            {"repetition_penalty": 0.7, "logit_bias": {40: 2.0}},
            {"repetition_penalty": 0.7, "sequence_bias": [[[40], 2.0]]},
        ),
    ],
)
def test_controls_do_what_they_do_in_transformers(
    checkpoint: Path, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    got = run(engine(checkpoint), request("a", PROMPT, max_tokens=40, **ours)).tokens("a")
    assert got == tokens_of_transformers(checkpoint, **theirs)


def test_bad_words_are_those_of_transformers(checkpoint: Path) -> None:
    """Words that would be said: each is banned as it stands and behind a space."""
    target = engine(checkpoint)
    said = run(target, request("plain", PROMPT, max_tokens=40)).text("plain")
    words = [character for character in dict.fromkeys(said) if character.isalnum() and character.isascii()]
    assert words
    ids = [target.tokenizer.encode_part(spelling) for word in words for spelling in (word, " " + word)]
    answers = run(target, request("a", PROMPT, max_tokens=40, bad_words=words))
    assert answers.tokens("a") == tokens_of_transformers(checkpoint, bad_words_ids=ids)
    assert not set(words) & set(answers.text("a"))


def tokens_of_transformers(checkpoint: Path, **settings: Any) -> list[int]:
    """40 greedy tokens of transformers' own generate."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    settings = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, **settings}
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=40, **settings)[0, len(PROMPT) :]
    return tokens.tolist()


def tokens_among(
    checkpoint: Path, first: GenerateRequest, others: list[GenerateRequest], **parameters: Any
) -> list[int]:
    """The tokens of `first` while others join every other step, over a pool that is too small for all."""
    target = engine(checkpoint, **parameters)
    answers = Answers()
    prepared = target.prepare(first)
    target.add(prepared)
    for step in itertools.count():
        if not target.has_work:
            break
        if others and step % 2 == 0:
            target.add(target.prepare(others.pop(0)))
        answers.take(target.step())
        target.check_integrity()
    assert not others
    assert prepared.sequences[0].num_preemptions > 0
    return answers.tokens(first.request_id)


def test_a_seed_gives_the_same_tokens_whoever_joins_and_leaves(checkpoint: Path) -> None:
    """Neighbours without a seed come and go, and the seeded request is preempted on the way."""
    sampling = {"temperature": 1.0, "seed": 42, "max_tokens": 60}
    alone = run(engine(checkpoint), request("a", PROMPT, **sampling)).tokens("a")
    for _ in range(2):
        seeded = request("a", PROMPT, **sampling)
        last_in_rank = GenerateRequest("a", PROMPT, seeded.sampling, priority=9)
        others = [request(f"n{i}", PROMPT[: 5 + i], temperature=1.2, max_tokens=8 + 3 * i) for i in range(16)]
        got = tokens_among(checkpoint, last_in_rank, others, num_pages=30, max_batch_size=4)
        assert got == alone


def test_without_a_seed_equal_requests_differ(checkpoint: Path) -> None:
    requests = [request(f"r{i}", PROMPT, temperature=1.0) for i in range(8)]
    answers = run(engine(checkpoint), *requests)
    assert len({tuple(answers.tokens(item.request_id)) for item in requests}) == 8


@pytest.mark.parametrize("max_batch_size", [1, 4])
def test_a_plain_and_a_penalized_request_in_either_order(checkpoint: Path, max_batch_size: int) -> None:
    """One behind the other in one slot, or side by side."""
    controls: dict[str, dict[str, Any]] = {"plain": {}, "penalized": PENALIZED}
    alone = {
        name: run(engine(checkpoint), request(name, PROMPT, **more)).tokens(name)
        for name, more in controls.items()
    }
    assert alone["plain"] != alone["penalized"]
    for order in itertools.permutations(controls):
        target = engine(checkpoint, max_batch_size=max_batch_size)
        answers = run(target, *(request(name, PROMPT, **controls[name]) for name in order))
        for name in order:
            assert answers.tokens(name) == alone[name]


def test_twenty_identical_greedy_requests_and_a_mixed_batch(checkpoint: Path) -> None:
    alone = run(engine(checkpoint), request("alone", PROMPT)).tokens("alone")
    same = [request(f"g{i}", PROMPT) for i in range(20)]
    mixed = [
        request(f"m{i}", PROMPT, **(PENALIZED if i % 2 else {"temperature": 1.5, "seed": i, "top_k": 5}))
        for i in range(8)
    ]
    for requests in (same, [item for pair in zip(same[:8], mixed, strict=True) for item in pair]):
        answers = run(engine(checkpoint, max_batch_size=32), *requests)
        for item in requests:
            if item.request_id.startswith("g"):
                assert answers.tokens(item.request_id) == alone
