"""What waiting requests may hold in memory together, and that it is given back however a request leaves the queue."""

from __future__ import annotations

import gc
import random
import threading

from hypothesis import given
from hypothesis import strategies as st
from serving_harness import MemoryMetrics, MemoryResponder, Serve, ServedModel, wait_until

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.serving.contract import ParsedRequest
from paged_engine.serving.ledger import Ledger
from paged_engine.serving.metrics import Outcome, ServiceMetrics
from paged_engine.serving.sources import RawRequest
from paged_engine.serving.ticket import Ticket

MAX_BYTES = 1000
LIMITS = {"max_queue_bytes": MAX_BYTES, "max_prompt_bytes": MAX_BYTES}
FITS_ALONE = "x" * (MAX_BYTES // 5 - 2)
"""A prompt of which nothing more may wait: a byte and a token of four bytes for each character, and the `{}` of no parameters."""


def assert_queue_is_empty(served: ServedModel) -> None:
    """What only an empty queue can take is served."""
    served.assert_clean()
    assert served.ask(FITS_ALONE, max_tokens=1).wait().error == ""
    served.assert_clean()


# The account


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "charge", "begin", "stop", "cancelled", "unavailable", "close"]),
            st.integers(0, 7),
            st.integers(0, MAX_BYTES + 200),
        ),
        max_size=60,
    )
)
def test_the_account_is_the_sum_of_those_that_wait(operations: list[tuple[str, int, int]]) -> None:
    ledger = Ledger(2, 4, MAX_BYTES, ServiceMetrics(MemoryMetrics(), {"model": "llm", "version": "1"}))
    tickets = [Ticket(str(number), MemoryResponder()) for number in range(8)]
    held: dict[int, int] = {}
    waiting: set[int] = set()
    for operation, number, num_bytes in operations:
        ticket = tickets[number]
        try:
            if operation == "admit" and not ticket.is_finished and ticket not in ledger.live():
                ledger.admit(ticket)
                waiting.add(number)
            elif operation == "charge" and number in waiting:
                ledger.charge(ticket, num_bytes)
                held[number] = held.get(number, 0) + num_bytes
            elif operation == "charge" and ticket.is_finished:
                ledger.charge(ticket, num_bytes)  # intake may come too late
            elif operation == "begin" and number in waiting:
                ledger.begin(ticket)
                waiting.remove(number)
                held.pop(number, None)
            elif operation in ("stop", "cancelled", "unavailable") and ticket in ledger.live():
                error = (
                    RequestError.cancelled() if operation == "cancelled" else RequestError.unavailable("x")
                )
                ledger.finish(ticket, Outcome.STOP if operation == "stop" else error)
                waiting.discard(number)
                held.pop(number, None)
            elif operation == "close":
                ledger.close("unloaded")
        except RequestError as error:
            if operation == "charge":
                alone = held.get(number, 0) + num_bytes > MAX_BYTES
                assert error.code is (ErrorCode.INVALID_ARG if alone else ErrorCode.UNAVAILABLE)
                assert sum(held.values()) + num_bytes > MAX_BYTES
        assert ledger.waiting_bytes == sum(held.values()) <= MAX_BYTES
    for ticket in ledger.live():
        ledger.finish(ticket, RequestError.unavailable("the end"))
    assert ledger.waiting_bytes == 0


# The service


def test_requests_are_refused_when_those_that_wait_hold_too_much(serve: Serve) -> None:
    served = serve(max_batch_size=1, max_num_tokens=512, **LIMITS)
    served.model.pause_after(0)
    running = served.ask()
    wait_until(
        lambda: (
            served.metrics.value("llm_requests_running") + served.metrics.value("llm_requests_waiting") == 1
        )
    )
    waiting = [served.ask("x" * 60) for _ in range(3)]  # 3 times 302 bytes
    wait_until(lambda: served.service._ledger.waiting_bytes >= 906)
    refused = served.ask("x" * 90)
    assert refused.wait().error.startswith("UNAVAILABLE: the queue is full: the requests that wait hold 9")
    assert "with the 92 of this one more than max_queue_bytes = 1000; try again later" in refused.error
    assert not any(answer.is_done for answer in waiting)
    served.model.go_on()
    for answer in (running, *waiting):
        assert answer.wait().error == ""
    assert_queue_is_empty(served)


def test_what_can_never_wait_is_the_clients_fault(serve: Serve) -> None:
    served = serve(**LIMITS)
    many_sequences = served.ask("x" * 50, n=5).wait().error
    assert many_sequences.startswith(
        "INVALID_ARG: the request is too large to wait: its inputs and tokens take 1056 bytes"
    )
    assert "at most max_queue_bytes = 1000" in many_sequences
    long_stop = served.ask(stop=[b"x" * 1000]).wait().error
    assert long_stop.startswith("INVALID_ARG: the request is too large to wait")
    assert_queue_is_empty(served)


def test_a_request_that_has_begun_does_not_count(serve: Serve) -> None:
    served = serve(**LIMITS)
    running: list[MemoryResponder] = []
    for _ in range(3):
        running.append(served.ask(FITS_ALONE, stream=True))
        while not running[-1].responses:  # a step at a time, so that none of them ends
            served.model.pause_after(1)
            threading.Event().wait(0.02)
    assert not any(answer.is_done for answer in running)
    served.model.go_on()
    assert [answer.wait().error for answer in running] == ["", "", ""]
    assert_queue_is_empty(served)


def test_every_way_out_of_the_queue_gives_the_memory_back(serve: Serve) -> None:
    served = serve(max_batch_size=1, **LIMITS)

    def fill(**options: object) -> MemoryResponder:
        """Wait with a request beside which there is no room for another."""
        answer = served.ask("x" * 900, **options)
        assert served.ask("x" * 100).wait().error.startswith("UNAVAILABLE: the queue is full")
        return answer

    # while it is tokenized
    tokenized = threading.Event()
    served.tokenizer.before_encoding = lambda text: tokenized.wait()
    assert "queue deadline passed" in fill(timeout_ms=30).wait().error
    cancelled = fill()
    cancelled.is_cancelled = True
    assert cancelled.wait().error.startswith("CANCELLED")
    tokenized.set()
    assert_queue_is_empty(served)

    def fail(text: str) -> None:
        raise ZeroDivisionError("tokenizer")

    served.tokenizer.before_encoding = fail
    assert "ZeroDivisionError" in served.ask(FITS_ALONE).wait().error
    served.tokenizer.before_encoding = lambda text: None
    assert_queue_is_empty(served)
    assert "stop must be" in served.ask(FITS_ALONE, stop=[b""]).wait().error
    assert "prompt too long" in served.ask_raw(RawRequest({"input_ids": [1] * 10_000})).wait().error
    assert_queue_is_empty(served)

    # while it waits for a step, and in its first step
    served.model.pause_after(1)
    running = served.ask(stream=True)
    wait_until(lambda: bool(running.responses))
    cancelled = served.ask(FITS_ALONE)
    wait_until(lambda: served.service._ledger.waiting_bytes > 900)
    cancelled.is_cancelled = True
    while not cancelled.is_done:
        served.model.pause_after(1)
        threading.Event().wait(0.1)
    served.model.go_on()
    assert running.wait().error == ""
    served.model.failure = ZeroDivisionError("model")
    assert "ZeroDivisionError" in served.ask(FITS_ALONE).wait().error
    assert_queue_is_empty(served)


def test_random_clients_leave_nothing_on_the_account(serve: Serve) -> None:
    served = serve(max_batch_size=3, num_pages=64, max_seq_len=250, long_prefill_token_threshold=8, **LIMITS)
    answers: list[MemoryResponder] = []

    def client(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(40):
            options = {
                "max_tokens": own.choice([1, 20, 0]),
                "n": own.choice([1, 1, 3]),
                "timeout_ms": own.choice([0, 0, 4]),
            }
            answer = served.ask("x" * own.choice([1, 20, 60, 150, 300]), stream=own.random() < 0.5, **options)
            answer.is_cancelled = own.random() < 0.2
            answers.append(answer)
            if own.random() < 0.3:
                answer.wait()

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    errors = [answer.wait().error for answer in answers]
    assert any("max_queue_bytes" in error for error in errors)
    assert any(error == "" for error in errors)
    assert_queue_is_empty(served)


def test_closing_empties_the_account(serve: Serve) -> None:
    served = serve(max_batch_size=1, **LIMITS)
    served.model.pause_after(1)
    answers = [served.ask("x" * 50) for _ in range(4)]
    wait_until(lambda: served.model.num_steps == 1)
    closing = threading.Thread(target=served.service.close)
    closing.start()
    wait_until(lambda: not served.service.is_ready())
    served.model.go_on()
    closing.join()
    assert all(answer.wait().error for answer in answers)
    assert served.service._ledger.waiting_bytes == 0


def test_what_an_ended_request_asked_for_is_let_go_of_before_intake_comes_to_it(serve: Serve) -> None:
    def num_alive() -> int:
        gc.collect()
        return sum(type(item) is ParsedRequest for item in gc.get_objects())

    served = serve(**LIMITS)
    tokenized = threading.Event()
    served.tokenizer.before_encoding = lambda text: tokenized.wait()
    before = num_alive()
    first = served.ask()
    for answer in [served.ask(timeout_ms=20) for _ in range(10)]:
        assert "queue deadline passed" in answer.wait().error
    wait_until(lambda: num_alive() - before == 1)
    tokenized.set()
    assert first.wait().error == ""
