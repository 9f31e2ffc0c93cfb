"""The service between Triton and the engine: what a fault ends, and that everything else goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from serving_harness import ALPHABET, WAIT_S, MemoryResponder, Serve, ServedModel, wait_until


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


@pytest.mark.parametrize("look_ahead", [False, True])
def test_a_fault_outside_the_model_beside_a_stream(serve: Serve, look_ahead: bool) -> None:
    """A step may be in flight then."""
    served = serve(look_ahead=look_ahead, faults=True)
    served.model.pause_after(2)
    running = served.ask(stream=True)
    wait_until(lambda: not served.model.may_step.is_set())
    failing = served.ask("[[fault:step]]")
    served.model.go_on()
    assert failing.wait().error == "INTERNAL: the step failed: Fault: step"
    assert running.wait().error in ("", "INTERNAL: the step failed: Fault: step")
    assert served.service.is_ready()
    assert served.ask().wait().text == ALPHABET
    served.assert_clean()


def test_a_scheduler_that_fails_behind_a_step_in_flight(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(look_ahead=True)
    plan = served.engine.scheduler.plan
    faults = [ZeroDivisionError("scheduler")]

    def failing_once() -> Any:
        return plan() if not served.engine._in_flight or not faults else raise_(faults.pop())

    monkeypatch.setattr(served.engine.scheduler, "plan", failing_once)
    assert served.ask().wait().error == "INTERNAL: the step failed: ZeroDivisionError: scheduler"
    assert served.service.is_ready()
    assert served.ask().wait().text == ALPHABET
    served.assert_clean()


def let_results_come_late(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, when_nobody_waits: Callable[[], object]
) -> None:
    """Look ahead over a model whose results do this first where all requests have gone."""
    launch = served.model.launch

    def late(*arguments: Any) -> Any:
        launched = launch(*arguments)
        result = launched.result

        def late_result() -> Any:
            if not served.engine._generations:
                when_nobody_waits()
            return result()

        launched.result = late_result
        return launched

    monkeypatch.setattr(served.model, "launch", late)


def cancelled_in_flight(served: ServedModel) -> None:
    """A stream that its client leaves while a step is in flight."""
    served.model.pause_after(3)
    leaving = served.ask(stream=True)
    wait_until(lambda: len(leaving.responses) > 0)
    leaving.is_cancelled = True
    served.model.go_on()
    leaving.wait()


def test_a_fault_of_a_step_that_nobody_waits_for_is_nobodys(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is taken in at once, not with the next request."""
    served = serve(look_ahead=True)
    faults: list[str] = []

    def fail() -> NoReturn:
        faults.append("CUDA error")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    let_results_come_late(served, monkeypatch, fail)
    cancelled_in_flight(served)
    wait_until(lambda: faults == ["CUDA error"])
    served.assert_clean()
    assert served.ask(max_tokens=3).wait().text == "abc"
    assert served.service.is_ready()


def test_a_step_that_hangs_when_all_have_gone_is_noticed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(look_ahead=True, wedged_after_s=0.3)
    goes_on = threading.Event()
    let_results_come_late(served, monkeypatch, lambda: goes_on.wait(WAIT_S))
    cancelled_in_flight(served)
    wait_until(lambda: not served.service.is_ready())
    goes_on.set()
    wait_until(served.service.is_ready)
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


@pytest.mark.parametrize("attribute", ["build_failure", "send_failure"])
def test_others_of_the_same_step_get_theirs_when_a_response_fails(serve: Serve, attribute: str) -> None:
    served = serve()
    served.model.pause_after(2)
    others = [served.ask(stream=True, max_tokens=5)]
    bad = served.ask(stream=True, max_tokens=5)
    others.append(served.ask(stream=True, max_tokens=5))
    wait_until(lambda: all(len(answer.responses) for answer in (bad, *others)))
    setattr(bad, attribute, OSError("the pipe is broken"))
    served.model.go_on()
    assert bad.wait().error == "INTERNAL: the response failed: OSError: the pipe is broken"
    assert [answer.wait().text for answer in others] == [ALPHABET[:5]] * 2
    served.assert_clean()


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


def raise_(error: Exception) -> NoReturn:
    raise error
