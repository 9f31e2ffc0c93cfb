"""The service between Triton and the engine: requests that end early, by a deadline, a cancellation or an unload."""

from __future__ import annotations

import random
import threading

import pytest
from serving_harness import ALPHABET, MemoryResponder, Serve, ServedModel, wait_until


def threads_of_a_service() -> list[str]:
    names = ("sender", "step-loop", "intake", "intake-large", "intake-guided")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


# Deadlines


def test_a_waiting_request_is_refused_when_its_deadline_passes(serve: Serve) -> None:
    served = serve(max_batch_size=1)
    served.model.pause_after(1)
    running = served.ask(stream=True)
    wait_until(lambda: bool(running.responses))
    waiting = served.ask(timeout_ms=30)
    served.model.pause_after(2)  # a step in progress ends before deadlines are looked at
    threading.Event().wait(0.05)
    served.model.pause_after(2)
    assert waiting.wait().error.startswith("UNAVAILABLE: queue deadline passed")
    assert not running.is_done
    served.model.go_on()
    assert running.wait().text == ALPHABET
    served.assert_clean()


def test_a_request_still_being_tokenized_is_refused_when_its_deadline_passes(serve: Serve) -> None:
    served = serve(default_timeout_ms=30)
    tokenized = threading.Event()
    served.tokenizer.before_encoding = lambda text: tokenized.wait()
    assert served.ask().wait().error.startswith("UNAVAILABLE: queue deadline passed")
    tokenized.set()
    served.assert_clean()


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_being_made_ends_at_the_deadline(serve: Serve, stream: bool) -> None:
    served = serve(default_timeout_ms=500)
    served.model.pause_after(3)
    answer = served.ask(stream=stream, return_finish_reason=True)
    wait_until(lambda: served.model.num_steps == 3)
    threading.Event().wait(0.55)
    served.model.pause_after(1)
    answer.wait()
    assert answer.finish_reason == "timeout"
    assert answer.error == ""
    assert answer.text == ALPHABET[: len(answer.text)]
    assert 3 <= len(answer.text) <= 5
    served.model.go_on()
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total", outcome="timeout") == 1)


def test_a_deadline_in_ages_ends_nothing(serve: Serve) -> None:
    served = serve()
    assert served.ask(timeout_ms=2**63 - 1).wait().text == ALPHABET
    served.assert_clean()
    assert served.ask().wait().text == ALPHABET
    assert served.service.is_ready()


def test_deadlines_of_ended_requests_do_not_pile_up(serve: Serve) -> None:
    served = serve(max_batch_size=4)
    for _ in range(40):
        for answer in [served.ask(timeout_ms=2**63 - 1, max_tokens=1) for _ in range(20)]:
            answer.wait()
    assert len(served.service._loop._deadlines) < 400


def test_a_timeout_of_zero_is_none(serve: Serve) -> None:
    assert serve(default_timeout_ms=1).ask(timeout_ms=0).wait().text == ALPHABET


# Cancellation


def assert_cancelled(served: ServedModel, answer: MemoryResponder) -> None:
    assert answer.wait().error.startswith("CANCELLED")
    served.model.go_on()
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total", outcome="cancelled") == 1)


def test_cancelled_while_tokenized(serve: Serve) -> None:
    served = serve()
    tokenized = threading.Event()
    served.tokenizer.before_encoding = lambda text: tokenized.wait()
    answer = served.ask()
    answer.is_cancelled = True
    answer.wait()
    tokenized.set()
    assert_cancelled(served, answer)


def test_cancelled_while_queued(serve: Serve) -> None:
    served = serve(max_batch_size=1)
    served.model.pause_after(1)
    running = served.ask(stream=True)
    wait_until(lambda: bool(running.responses))
    queued = served.ask()
    queued.is_cancelled = True
    while not queued.is_done:
        served.model.pause_after(1)
        threading.Event().wait(0.1)
    assert served.metrics.value("llm_requests_total", outcome="stop") == 0, "it was answered too late to tell"
    assert_cancelled(served, queued)
    assert running.wait().text == ALPHABET


@pytest.mark.parametrize("prompt", ["hi", "a long prompt, in several chunks " * 4])
def test_cancelled_while_computed(serve: Serve, prompt: str) -> None:
    served = serve(long_prefill_token_threshold=8)
    served.model.pause_after(2)
    answer = served.ask(prompt, stream=True)
    wait_until(lambda: served.model.num_steps == 2)
    answer.is_cancelled = True
    while not answer.is_done:
        served.model.pause_after(1)
        threading.Event().wait(0.05)
    assert_cancelled(served, answer)


def test_random_clients_each_get_one_final_response(serve: Serve) -> None:
    served = serve(max_batch_size=4, num_pages=40, max_seq_len=64, long_prefill_token_threshold=8)
    dice = random.Random(7)
    answers: list[MemoryResponder] = []
    lock = threading.Lock()

    def client(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(40):
            options: dict[str, object] = {
                "stream": own.random() < 0.5,
                "max_tokens": own.choice([1, 5, 30, 0]),
                "n": own.choice([1, 1, 3]),
                "timeout_ms": own.choice([0, 0, 5]),
            }
            answer = served.ask("x" * own.randrange(1, 50), **options)
            answer.is_cancelled = own.random() < 0.2
            with lock:
                answers.append(answer)
            if own.random() < 0.5:
                answer.wait()

    clients = [threading.Thread(target=client, args=(dice.random(),)) for _ in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    for answer in answers:
        answer.wait()
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total") == len(answers) == 160)


# Shutdown


def test_closing_answers_everything_that_is_left_and_ends_the_threads(serve: Serve) -> None:
    served = serve(max_batch_size=2)
    served.model.pause_after(3)
    answers = [served.ask(stream=True) for _ in range(7)]
    wait_until(lambda: served.model.num_steps == 3)
    closing = threading.Thread(target=served.service.close)
    closing.start()
    wait_until(lambda: not served.service.is_ready())
    late = served.ask()
    served.model.go_on()
    closing.join()
    assert all(answer.wait().error == "UNAVAILABLE: the model is being unloaded" for answer in answers)
    assert late.wait().error == "UNAVAILABLE: the model is being unloaded"
    assert answers[0].text in ("abc", "abcd")
    assert threads_of_a_service() == []
    assert served.metrics.is_closed
    assert served.engine.statistics().num_pages_used == 0
