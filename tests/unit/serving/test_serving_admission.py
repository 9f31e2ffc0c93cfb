"""The service between Triton and the engine: who is taken in, and who waits for whom."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from serving_harness import ALPHABET, WAIT_S, Serve, wait_until

from paged_engine.request import GenerateRequest


def test_bad_requests_are_refused_and_good_ones_beside_them_served(serve: Serve) -> None:
    served = serve()
    good = [served.ask() for _ in range(3)]
    bad = [served.ask(sampling_parameters=text) for text in (b'{"bad', b"[1]", b"null")]
    assert all(answer.wait().text == ALPHABET for answer in good)
    assert all(answer.wait().error.startswith("INVALID_ARG: sampling_parameters must be") for answer in bad)
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total", outcome="invalid") == 3)


def test_what_can_never_fit_is_refused_with_the_numbers(serve: Serve) -> None:
    served = serve(max_seq_len=16, num_pages=4)
    assert "100 tokens" in served.ask("x" * 100).wait().error
    assert served.ask("hello").wait().text == ALPHABET[:11]


def test_without_chunks_a_prompt_that_no_step_holds_is_refused_with_the_numbers(serve: Serve) -> None:
    served = serve(enable_chunked_prefill=False, max_num_tokens=65)
    error = served.ask("x" * 66).wait().error
    assert error.startswith(
        "INVALID_ARG: prompt too long: it has 66 tokens, at most max_num_tokens = 65 fit in one step"
    )
    assert served.ask("x" * 65, max_tokens=3).wait().text == "abc"


def test_a_prompt_of_too_many_bytes_is_refused_before_it_is_tokenized(serve: Serve) -> None:
    served = serve(max_prompt_bytes=100)
    served.tokenizer.before_encoding = lambda text: pytest.fail("it was tokenized")
    assert "101 bytes" in served.ask("x" * 101).wait().error


def test_beyond_the_queue_requests_are_refused_while_the_engine_is_busy(serve: Serve) -> None:
    served = serve(max_batch_size=2, max_queue_size=4)
    served.model.pause_after(0)
    answers = [served.ask() for _ in range(50)]
    wait_until(lambda: sum(answer.is_done for answer in answers) == 44)
    refused = [answer for answer in answers if answer.is_done]
    assert all(answer.error.startswith("UNAVAILABLE: the queue is full") for answer in refused)
    assert served.model.num_steps == 0
    served.model.go_on()
    assert sum(answer.wait().text == ALPHABET for answer in answers) == 6
    assert served.ask().wait().text == ALPHABET
    served.assert_clean()


def test_a_client_that_has_its_answer_finds_the_place_free(serve: Serve) -> None:
    served = serve(max_batch_size=1, max_queue_size=1)
    for _ in range(50):
        pair = [served.ask(max_tokens=1), served.ask(max_tokens=1)]
        assert [answer.wait().text for answer in pair] == ["a", "a"]


def test_a_large_prompt_does_not_hold_up_small_ones(serve: Serve) -> None:
    served = serve(max_seq_len=512)
    tokenized = threading.Event()
    served.tokenizer.before_encoding = lambda text: len(text) < 1000 or tokenized.wait()
    large = served.ask("x" * 100_000)
    assert served.ask().wait().text == ALPHABET
    assert not large.is_done
    tokenized.set()
    assert "prompt too long" in large.wait().error


@pytest.mark.parametrize(
    "parameters", [{"bad_words": ["slow" * 20_000]}, {"structured_outputs": {"regex": "slow"}}]
)
def test_what_takes_long_to_prepare_does_not_hold_up_others(serve: Serve, parameters: dict[str, Any]) -> None:
    served = serve()
    prepared = threading.Event()
    prepare = served.engine.prepare

    def prepare_slowly(request: GenerateRequest) -> Any:
        assert "slow" not in str(request.sampling) or prepared.wait(WAIT_S)
        return prepare(request)

    served.engine.prepare = prepare_slowly  # type: ignore[method-assign]
    slow = served.ask(sampling_parameters=json.dumps(parameters).encode())
    assert served.ask().wait().text == ALPHABET
    assert not slow.is_done
    prepared.set()
    slow.wait()
    served.assert_clean()
