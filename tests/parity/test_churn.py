"""Hundreds of requests of every kind come and go over a few slots and a pool that is too small for them: each is as if alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from deferred_device import defer
from engine_runs import Answers, engine, request, run

from paged_engine.engine import Engine
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.execution.sampling import SampledToken
from paged_engine.request import GenerateRequest

MAX_SEQ_LEN, LONGEST_PROMPT, MOST_TOKENS = 80, 70, 24
FORMS: list[dict[str, Any]] = [
    {"regex": "[a-f]{2,12}(xyz)?"},
    {"choice": ["yes", "no", "perhaps"]},
    {"json": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}},
    {"grammar": 'root ::= "<" [0-9]+ ">"'},
]

pytestmark = pytest.mark.usefixtures("one_thread")


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Each control in some of the requests, in any mixture."""

    def sometimes(share: float, **controls: Any) -> dict[str, Any]:
        return controls if rng.random() < share else {}

    tokens = [rng.randrange(3, 259) for _ in range(40)]
    guided = sometimes(0.2, structured_outputs=rng.choice(FORMS))
    without_a_form = {  # together with one they may leave no token
        "min_tokens": rng.choice([0, 0, 3]),
        **sometimes(0.1, allowed_token_ids=tokens),
        **sometimes(0.1, bad_words=[chr(rng.randrange(97, 123)) for _ in range(3)]),
    }
    return {
        "max_tokens": rng.randint(3, MOST_TOKENS),
        "ignore_eos": rng.random() < 0.7,
        **sometimes(0.7, temperature=rng.choice([0.3, 0.8, 1.0, 1.5]), seed=rng.randrange(2**64)),
        **sometimes(0.3, top_p=rng.choice([0.5, 0.9, 0.99])),
        **sometimes(0.3, top_k=rng.choice([1, 3, 50, 10**9])),
        **sometimes(0.2, min_p=rng.choice([0.01, 0.2])),
        **sometimes(0.2, n=rng.choice([2, 3])),
        **sometimes(0.3, repetition_penalty=rng.choice([0.8, 1.3])),
        **sometimes(0.2, presence_penalty=0.7, frequency_penalty=-0.3),
        **sometimes(0.2, logit_bias={token: rng.uniform(-5, 5) for token in tokens[:8]}),
        **sometimes(0.2, stop_token_ids=tokens[:12]),
        **sometimes(0.2, skip_special_tokens=False),
        **sometimes(0.4, logprobs=rng.choice([0, 2, 5])),
        **sometimes(0.3, prompt_logprobs=rng.choice([0, 3])),
        **sometimes(0.2, truncate_prompt_tokens=rng.choice([-1, 1, 9, 40])),
        **(guided or without_a_form),
    }


def random_churn(rng: random.Random, count: int, solo: Engine) -> list[GenerateRequest]:
    """Prompts with shared beginnings, and stop strings that really occur."""
    stems = [[rng.randrange(3, 259) for _ in range(50)] for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = rng.choice(stems)[: rng.choice([0, 0, 4, 21, 50])]
        prompt = prompt + [rng.randrange(3, 259) for _ in range(rng.randint(1, LONGEST_PROMPT - len(prompt)))]
        sampling = random_sampling(rng)
        if rng.random() < 0.3:
            text = run(solo, request("first", prompt, **sampling)).text("first")
            start = rng.randrange(len(text)) if text else 0
            stops = [text[start : start + rng.choice([1, 2, 4])], "never in it"]
            sampling["stop"] = [stop for stop in stops if stop]
            sampling["include_stop_str_in_output"] = rng.random() < 0.3
        item = request(f"r{number}", prompt, **sampling)
        requests.append(
            GenerateRequest(item.request_id, prompt, item.sampling, priority=rng.choice([0, 0, 1]))
        )
    return requests


def churn(
    target: Engine, requests: list[GenerateRequest], cancelled: dict[str, int], rng: random.Random
) -> Answers:
    """Run all of them, a few at a time; some are cancelled so many steps after they came. The books are checked at each step."""
    answers = Answers()
    waiting, ends = list(requests), dict(cancelled)
    living: set[str] = set()
    while waiting or target.has_work:
        while waiting and (not target.has_work or (target.scheduler.num_waiting < 6 and rng.random() < 0.5)):
            item = waiting.pop(0)
            target.add(target.prepare(item))
            living.add(item.request_id)
        for name in [name for name in living & ends.keys() if ends[name] == 0]:
            answers.take(target.abort(name, RequestError.cancelled()))
            living.remove(name)
        answers.take(target.step())
        target.check_integrity()
        for name in living & ends.keys():
            ends[name] -= 1
    statistics = target.statistics()
    assert (statistics.num_pages_used, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
    return answers


def assert_same_scores(got: list[SampledToken], expected: list[SampledToken]) -> None:
    """Steps of different shapes round differently, so numbers are equal to 1e-4 and neighbours within that may change places."""
    assert [token.token_id for token in got] == [token.token_id for token in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [entry.logprob for entry in one.top] == pytest.approx(
            [entry.logprob for entry in other.top], abs=1e-4
        )
        mine = {entry.token_id: entry.logprob for entry in one.top}
        for entry in other.top[:-1]:  # the last may be left out for an equal
            assert mine.get(entry.token_id, other.top[-1].logprob) == pytest.approx(entry.logprob, abs=1e-4)


def assert_is_as_alone(
    item: GenerateRequest, together: Answers, alone: Answers, *, is_cancelled: bool
) -> None:
    """The same to the last character; of a cancelled request, as far as it came."""
    name = item.request_id
    for index in range(item.sampling.n):
        if (name, index) not in together.outputs:
            assert is_cancelled
            continue
        tokens, text = together.tokens(name, index), together.text(name, index)
        expected = alone.tokens(name, index)
        if isinstance(together.ending(name, index), RequestError):
            assert is_cancelled
            assert tokens == expected[: len(tokens)]
            assert alone.text(name, index).startswith(text)
        else:
            assert (tokens, text) == (expected, alone.text(name, index)), item
            assert together.ending(name, index) == alone.ending(name, index), item
        assert_same_scores(together.logprobs(name, index), alone.logprobs(name, index)[: len(tokens)])
        if tokens:
            assert_same_scores(together.prompt_logprobs(name, index), alone.prompt_logprobs(name, index))


@pytest.mark.parametrize(
    ("seed", "count", "parameters"),
    [
        (1, 200, {"num_pages": 26}),
        (6, 60, {"num_pages": 22, "look_ahead": True}),
        pytest.param(2, 400, {"num_pages": 22, "max_num_tokens": 9}, marks=pytest.mark.slow),
        pytest.param(3, 400, {"num_pages": 26, "long_prefill_token_threshold": 5}, marks=pytest.mark.slow),
        pytest.param(4, 400, {"num_pages": 26, "enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param(
            5,
            400,
            {"num_pages": 13, "page_size": 7, "chunking_policy": "equal_progress"},
            marks=pytest.mark.slow,
        ),
        pytest.param(7, 400, {"num_pages": 22, "look_ahead": True}, marks=pytest.mark.slow),
        pytest.param(
            9, 400, {"num_pages": 6, "page_size": 16, "kv_cache_dtype": "int8"}, marks=pytest.mark.slow
        ),
        pytest.param(
            8,
            400,
            {"num_pages": 26, "look_ahead": True, "enable_prefix_caching": False, "max_num_tokens": 9},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_each_of_many_requests_is_as_if_alone(
    checkpoint: Path, seed: int, count: int, parameters: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    solo = engine(
        checkpoint,
        max_seq_len=MAX_SEQ_LEN,
        max_num_tokens=512,
        enable_prefix_caching=False,
        kv_cache_dtype=parameters.get("kv_cache_dtype", "auto"),
        page_size=parameters.get("page_size", 4),
    )
    looks_ahead = "look_ahead" in parameters
    if looks_ahead:
        defer(solo)  # with top_p alone a seed brings other tokens on other devices
    requests = random_churn(rng, count, solo)
    alone = {item.request_id: run(solo, item) for item in requests}
    assert not any(
        output.error for of_one in alone.values() for outputs in of_one.outputs.values() for output in outputs
    )
    cancelled = {item.request_id: rng.randrange(30) for item in rng.sample(requests, count // 8)}
    target = engine(checkpoint, **{"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 4, **parameters})
    if looks_ahead:
        defer(target)
    together = churn(target, requests, cancelled, rng)
    statistics = target.statistics()
    assert statistics.num_preemptions > count // 20
    assert (statistics.num_prefix_cached_tokens > count) == target.config.enable_prefix_caching
    codes = [output.error.code for of_one in together.outputs.values() for output in of_one if output.error]
    assert set(codes) == {ErrorCode.CANCELLED}
    for item in requests:
        is_cancelled = item.request_id in cancelled
        assert_is_as_alone(item, together, alone[item.request_id], is_cancelled=is_cancelled)
