"""The service between Triton and the engine: answers, admission, deadlines, cancellation, faults, shutdown."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from serving_harness import WAIT_S, MemoryResponder, ServedModel, wait_until

from paged_engine.request import GenerateRequest
from paged_engine.serving.sources import RawRequest

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
Serve = Callable[..., ServedModel]


def threads_of_a_service() -> list[str]:
    names = ("sender", "step-loop", "intake", "intake-large", "intake-guided")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


# Answers


def test_without_streaming_there_is_exactly_one_response(serve: Serve) -> None:
    answer = serve().ask(return_finish_reason=True).wait()
    assert len(answer.responses) == 1
    assert answer.text == ALPHABET
    assert answer.finish_reason == "stop"


def test_streaming_sends_a_response_for_each_step_that_has_text_and_final_rides_on_the_last(
    serve: Serve,
) -> None:
    answer = serve().ask(stream=True, max_tokens=5, return_finish_reason=True).wait()
    assert answer.texts == ["a", "b", "c", "d", "e"]
    assert [response.is_final for response in answer.responses] == [False] * 4 + [True]
    assert answer.finish_reason == "length"


def test_steps_that_show_no_text_send_nothing(serve: Serve) -> None:
    answer = serve().ask(stream=True, max_tokens=6, stop=[b"cdx"]).wait()
    assert answer.texts == ["a", "b", "cde", "f"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_at_the_first_token_is_one_empty_response(serve: Serve, stream: bool) -> None:
    answer = serve().ask(stream=stream, stop=[b"a"], return_finish_reason=True).wait()
    assert len(answer.responses) == 1
    assert answer.texts == [""]
    assert answer.finish_reason == "stop"


def test_sixteen_streams_at_once_each_equal_the_lone_one(serve: Serve) -> None:
    served = serve()
    answers = [served.ask(stream=True) for _ in range(16)]
    assert {answer.wait().text for answer in answers} == {ALPHABET}
    served.assert_clean()


@pytest.mark.parametrize("stream", [False, True])
def test_looking_ahead_changes_no_answer(serve: Serve, stream: bool) -> None:
    """Ends at a token, at a string and at the length, several sequences, one that is cancelled, and then an empty house."""
    ways = [{"max_tokens": 7}, {"stop": [b"cd"]}, {"n": 3, "max_tokens": 4}, {"max_tokens": 60}, {}]
    texts = []
    for look_ahead in (False, True):
        served = serve(look_ahead=look_ahead)
        answers = [served.ask(stream=stream, return_finish_reason=True, **way) for way in ways]
        texts.append([(answer.wait().text, answer.finish_reason) for answer in answers])
        wait_until(lambda served=served: served.engine.statistics().num_running == 0)
        served.engine.check_integrity()
        assert served.engine.statistics().num_pages_used == 0
    assert texts[0] == texts[1]


def test_several_sequences_answer_together(serve: Serve) -> None:
    answer = serve().ask(n=3, max_tokens=2, return_num_output_tokens=True).wait()
    tensors = answer.responses[0].tensors
    assert list(tensors["text_output"]) == [b"ab"] * 3
    assert tensors["num_output_tokens"].tolist() == [2, 2, 2]


def test_the_prompt_stands_in_front_of_the_text_where_it_is_wanted(serve: Serve) -> None:
    served = serve()
    assert served.ask("hi ", exclude_input_in_output=False, max_tokens=1).wait().text == "hi a"
    ids = RawRequest(
        {"input_ids": [104, 105], "exclude_input_in_output": [False], "max_tokens": [1], "n": [2]}
    )
    assert list(served.ask_raw(ids).wait().responses[0].tensors["text_output"]) == [b"hia", b"hia"]
    messages: dict[str, Any] = {
        "messages": [b'[{"role": "user", "content": "yo"}]'],
        "exclude_input_in_output": [False],
    }
    assert served.ask_raw(RawRequest(messages)).wait().text == "<user>yo" + ALPHABET


def test_a_parameter_of_the_model_decides_where_a_request_does_not(serve: Serve) -> None:
    served = serve(exclude_input_in_output=False)
    assert served.ask("hi ", max_tokens=1).wait().text == "hi a"
    assert served.ask("hi ", max_tokens=1, stream=True).wait().text == "a"
    assert served.ask("hi ", max_tokens=1, exclude_input_in_output=True).wait().text == "a"


# Admission


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


# Faults


def test_a_fault_in_tokenizing_ends_one_request(serve: Serve) -> None:
    served = serve()

    def before_encoding(text: str) -> None:
        if text == "bad":
            raise ZeroDivisionError("tokenizer")

    served.tokenizer.before_encoding = before_encoding
    bad, good = served.ask("bad"), served.ask("good")
    assert bad.wait().error == "INTERNAL: ZeroDivisionError: tokenizer"
    assert good.wait().text == ALPHABET


def test_a_fault_in_the_model_ends_those_of_the_step(serve: Serve) -> None:
    served = serve()
    served.model.failure = ZeroDivisionError("model")
    assert served.ask().wait().error == "INTERNAL: ZeroDivisionError: model"
    assert served.ask().wait().text == ALPHABET
    assert served.service.is_ready()
    served.assert_clean()


def test_a_fault_in_the_scheduler_ends_those_in_the_engine_and_the_loop_goes_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    plan, faults = served.engine.scheduler.plan, [ZeroDivisionError("scheduler")]
    monkeypatch.setattr(
        served.engine.scheduler, "plan", lambda: plan() if not faults else raise_(faults.pop())
    )
    assert served.ask().wait().error == "INTERNAL: the step failed: ZeroDivisionError: scheduler"
    assert served.service.is_ready()
    assert served.ask().wait().text == ALPHABET
    served.assert_clean()


def test_an_engine_that_is_unsound_afterwards_is_not_used_any_more(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    served.model.pause_after(1)
    running = served.ask(stream=True)
    wait_until(lambda: served.metrics.value("llm_kv_pages_used") > 0)
    untouched = [served.ask(stream=True) for _ in range(3)]
    monkeypatch.setattr(served.engine.scheduler, "plan", lambda: raise_(ZeroDivisionError("scheduler")))
    monkeypatch.setattr(served.engine, "check_integrity", lambda: raise_(ValueError("a page is lost")))
    served.model.go_on()
    assert running.wait().error.startswith("INTERNAL")
    for answer in untouched:
        assert answer.wait().error.startswith(("INTERNAL", "UNAVAILABLE"))
    wait_until(lambda: not served.service.is_ready())
    assert served.ask().wait().error == "UNAVAILABLE: the engine is down: ValueError: a page is lost"
    wait_until(lambda: served.metrics.value("llm_kv_pages_used") == 0)
    assert served.metrics.value("llm_requests_running") == 0


def test_a_response_that_cannot_be_built_ends_one_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    decode_token = served.tokenizer.decode_token
    monkeypatch.setattr(
        served.tokenizer,
        "decode_token",
        lambda token_id: "\ud800" if token_id == ord("c") else decode_token(token_id),
    )
    bad, good = served.ask(stream=True), served.ask(stream=True, max_tokens=2)
    assert bad.wait().error.startswith("INTERNAL: the response failed: UnicodeEncodeError")
    assert bad.text == "ab"
    assert good.wait().text == "ab"
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total", outcome="error") == 1)


@pytest.mark.parametrize("failing", [1, 5])
def test_a_response_that_cannot_be_sent_ends_one_request(serve: Serve, failing: int) -> None:
    served = serve()
    served.model.pause_after(failing - 1)
    bad = served.ask(stream=True, max_tokens=5)
    wait_until(lambda: len(bad.responses) == failing - 1)
    bad.send_failure = OSError("the pipe is broken")
    served.model.go_on()
    assert bad.wait().error == "INTERNAL: the response failed: OSError: the pipe is broken"
    assert served.ask().wait().text == ALPHABET
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total") == 2)
    assert served.metrics.value("llm_requests_total", outcome="error") == 1


def test_a_request_that_cannot_be_read_is_answered(serve: Serve) -> None:
    served = serve()
    answer = MemoryResponder()
    served.service.submit(lambda: raise_(ValueError("the tensor is on a GPU")), answer)
    assert answer.wait().error == "INTERNAL: ValueError: the tensor is on a GPU"


def test_a_step_that_hangs_makes_the_model_not_ready_until_it_ends(serve: Serve) -> None:
    served = serve(wedged_after_s=0.3)
    assert served.service.is_ready()
    served.model.pause_after(2)
    hanging = served.ask(stream=True)
    assert hanging.wait().error.startswith("UNAVAILABLE: the engine hangs")
    assert hanging.text == "ab"
    assert not served.service.is_ready()
    assert served.ask().wait().error.startswith("UNAVAILABLE: the engine hangs")
    served.model.go_on()
    wait_until(served.service.is_ready)
    served.assert_clean()
    assert served.ask().wait().text == ALPHABET


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


def raise_(error: Exception) -> NoReturn:
    raise error
