"""prompt_logprobs over the whole engine, held against the log_softmax of transformers' plain forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answers, engine, random_requests, request, run
from transformers import AutoModelForCausalLM, PreTrainedModel

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.execution.sampling import SampledToken

PROMPT = [(37 * i + 11) % 256 + 3 for i in range(41)]


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")


@torch.inference_mode()
def assert_scores_of_transformers(
    reference: PreTrainedModel, prompt: list[int], scores: list[SampledToken], num_top: int
) -> None:
    """Each token behind the first, its log-probability and rank, and the most likely alternatives."""
    logprobs = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(dim=-1)
    assert [token.token_id for token in scores] == prompt[1:]
    for row, token in zip(logprobs, scores, strict=False):
        expected = row[token.token_id].item()
        assert token.logprob == pytest.approx(expected, abs=1e-4)
        assert (row > expected + 1e-4).sum() < (token.rank or 0) <= (row > expected - 1e-4).sum()
        values, token_ids = row.topk(num_top)
        assert [entry.logprob for entry in token.top] == pytest.approx(values.tolist(), abs=1e-4)
        if num_top and (values.diff().abs() > 1e-4).all():
            assert [entry.token_id for entry in token.top][:-1] == token_ids.tolist()[:-1]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"max_num_tokens": 9},
        {"long_prefill_token_threshold": 1},
        {"long_prefill_token_threshold": 5},
        {"long_prefill_token_threshold": 5, "attention_backend": "torch"},
        {"page_size": 7},
        {"enable_chunked_prefill": False},
    ],
    ids=lambda parameters: " ".join(f"{key}={value}" for key, value in parameters.items()) or "default",
)
def test_values_are_those_of_transformers(
    checkpoint: Path, reference: PreTrainedModel, parameters: dict[str, Any]
) -> None:
    """Alone in a chunk, beside others that want none or others of their own, in chunks of any size."""
    wanted = [
        request(f"p{i}", PROMPT[: 41 - i], max_tokens=8, prompt_logprobs=num_top)
        for i, num_top in enumerate([0, 1, 5, 100])
    ]
    neighbours = random_requests(seed=3, count=4, longest=60)
    answers = run(engine(checkpoint, **parameters), *neighbours[:2], *wanted, *neighbours[2:])
    for item, num_top in zip(wanted, [0, 1, 5, 100], strict=True):
        scores = answers.prompt_logprobs(item.request_id)
        assert isinstance(item.prompt, list)
        assert_scores_of_transformers(reference, item.prompt, scores, num_top)
    for item in neighbours:
        assert answers.prompt_logprobs(item.request_id) == []


def test_preempted_half_way_it_has_each_token_once(checkpoint: Path, reference: PreTrainedModel) -> None:
    """Taken off at every moment of its life, its beginning then back from the cache or computed again."""
    for enable_prefix_caching in (True, False):
        target = engine(
            checkpoint,
            enable_prefix_caching=enable_prefix_caching,
            long_prefill_token_threshold=5,
        )
        for moment in range(1, 14):
            name = f"{moment}"
            target.add(target.prepare(request(name, PROMPT, max_tokens=6, prompt_logprobs=2)))
            answers = Answers()
            for _ in range(moment):
                answers.take(target.step())
            target.scheduler.preempt_last()
            while target.has_work:
                answers.take(target.step())
                target.check_integrity()
            assert len(answers.tokens(name)) == 6
            assert_scores_of_transformers(reference, PROMPT, answers.prompt_logprobs(name), 2)


def test_a_pool_too_small_for_all_loses_nothing(checkpoint: Path, reference: PreTrainedModel) -> None:
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(12)]
    wanted = [request(f"p{i}", prompt, max_tokens=24, prompt_logprobs=1) for i, prompt in enumerate(prompts)]
    target = engine(checkpoint, num_pages=30, max_num_tokens=16, long_prefill_token_threshold=5)
    answers = run(target, *wanted, stagger=3)
    assert target.statistics().num_preemptions > 0
    for item, prompt in zip(wanted, prompts, strict=True):
        assert_scores_of_transformers(reference, prompt, answers.prompt_logprobs(item.request_id), 1)


def test_a_prompt_that_is_in_the_cache_is_scored_all_the_same(
    checkpoint: Path, reference: PreTrainedModel
) -> None:
    target = engine(checkpoint)
    run(target, request("a", PROMPT))
    scored = run(target, request("b", PROMPT, prompt_logprobs=3))
    assert target.statistics().num_prefix_cached_tokens == 0
    assert_scores_of_transformers(reference, PROMPT, scored.prompt_logprobs("b"), 3)
    assert scored.tokens("b") == run(target, request("c", PROMPT)).tokens("c")
    assert target.statistics().num_prefix_cached_tokens == 40


def test_several_sequences_have_it_once(checkpoint: Path, reference: PreTrainedModel) -> None:
    target = engine(checkpoint)
    item = request("a", PROMPT, n=3, temperature=1, seed=5, prompt_logprobs=2)
    answers = run(target, item)
    assert_scores_of_transformers(reference, PROMPT, answers.prompt_logprobs("a", 0), 2)
    assert answers.prompt_logprobs("a", 1) == answers.prompt_logprobs("a", 2) == []
    plain = run(target, request("b", PROMPT, n=3, temperature=1, seed=5))
    for index in range(3):
        assert answers.tokens("a", index) == plain.tokens("b", index)


def test_a_prompt_of_one_token_has_none(checkpoint: Path) -> None:
    answers = run(engine(checkpoint), request("a", [5], prompt_logprobs=2, max_tokens=3))
    assert len(answers.outputs["a", 0]) == 3
    assert answers.prompt_logprobs("a") == []


def test_a_long_prompt_is_scored_in_bounded_parts(
    checkpoint: Path, reference: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much a step may compute, it makes the logits of a few hundred rows at most."""
    target = engine(checkpoint, max_num_tokens=1024, max_seq_len=256)
    rows: list[int] = []
    execute = target._runner.execute

    def recorded(batch):  # type: ignore[no-untyped-def]
        logits = execute(batch)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(target._runner, "execute", recorded)
    prompts = [[(i * step) % 256 + 3 for i in range(240)] for step in (1, 3, 5)]
    wanted = [request(f"{i}", prompt, prompt_logprobs=0, max_tokens=4) for i, prompt in enumerate(prompts)]
    answers = run(target, *wanted)
    assert 128 <= max(rows) <= 256 + 3
    for item, prompt in zip(wanted, prompts, strict=True):
        assert_scores_of_transformers(reference, prompt, answers.prompt_logprobs(item.request_id), 0)


def test_logits_that_are_not_finite_end_the_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = engine(checkpoint)
    execute = target._runner.execute

    def spoil(batch):  # type: ignore[no-untyped-def]
        logits = execute(batch).clone()
        logits[batch.num_samples + 4 :, 7] = torch.nan
        return logits

    monkeypatch.setattr(target._runner, "execute", spoil)
    answers = run(target, request("a", PROMPT, prompt_logprobs=0), request("b", PROMPT[:9]))
    ending = answers.ending("a")
    assert isinstance(ending, RequestError)
    assert (ending.code, "prompt are not finite" in ending.message) == (ErrorCode.INTERNAL, True)
    assert len(answers.tokens("b")) == 24
