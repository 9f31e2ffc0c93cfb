"""The whole engine over pages in int8: a request's tokens still depend on nothing but the request, and lose little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import engine, random_requests, request, run

from paged_engine.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [(37 * i + 11) % 256 + 3 for i in range(90)]


def int8_engine(checkpoint: Path, **parameters: object) -> Engine:
    given = {"kv_cache_dtype": "int8", "page_size": 16, "num_pages": 64}
    return engine(checkpoint, **{**given, **parameters})


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"max_num_tokens": 17, "max_batch_size": 16},
        {"long_prefill_token_threshold": 1, "enable_prefix_caching": False},
        {"page_size": 32, "num_pages": 32},
    ],
    ids=lambda parameters: " ".join(f"{key}={value}" for key, value in parameters.items()) or "default",
)
def test_a_request_gives_the_same_in_any_company(checkpoint: Path, parameters: dict[str, object]) -> None:
    """In chunks, in a batch, from cached pages: what is kept of a token is what is computed with when it is new."""
    requests = random_requests(seed=5, count=12)
    solo = int8_engine(checkpoint, enable_prefix_caching=False, max_num_tokens=512)
    target = int8_engine(checkpoint, **parameters)
    together = run(target, *requests, stagger=2)
    assert (target.statistics().num_prefix_cached_tokens > 0) == parameters.get("enable_prefix_caching", True)
    for item in requests:
        alone = run(solo, item)
        for index in range(item.sampling.n):
            expected, got = (each.tokens(item.request_id, index) for each in (alone, together))
            assert got == expected, item


def test_preempted_it_goes_on_as_if_nothing_had_happened(checkpoint: Path) -> None:
    requests = [request(f"r{i}", PROMPT[i : i + 40], max_tokens=80) for i in range(4)]
    target = int8_engine(checkpoint, num_pages=16)
    together = run(target, *requests)
    assert target.statistics().num_preemptions > 0
    solo = int8_engine(checkpoint)
    for item in requests:
        expected = run(solo, item).tokens(item.request_id)
        assert together.tokens(item.request_id) == expected


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_it_loses_a_fraction_of_what_float8_does(checkpoint: Path, backend: str) -> None:
    """In the log-probabilities of a prompt; and something, since the pages are in int8 indeed."""
    asked = request("a", PROMPT, max_tokens=4, prompt_logprobs=0)

    def scores(kv_cache_dtype: str) -> torch.Tensor:
        answers = run(
            int8_engine(checkpoint, attention_backend=backend, kv_cache_dtype=kv_cache_dtype), asked
        )
        return torch.tensor([token.logprob for token in answers.prompt_logprobs("a")])

    exact = scores("float32")
    of_int8, of_float8 = ((scores(each) - exact).abs().mean() for each in ("int8", "float8_e4m3fn"))
    assert 0.001 < of_int8 < of_float8 / 2
