"""Clients that go away, and deadlines that pass: what they held is free again, and nobody else notices."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
from triton_server import TritonServer
from wire import (
    SLOW,
    GrpcStream,
    HttpRequest,
    at_once,
    generate,
    grpc_answer,
    grpc_infer,
    outputs_of,
    wait_for,
)

LONG = {"text_input": SLOW + "Count:", "max_tokens": 2000, "ignore_eos": True, "stream": True}
"""Takes 100 s at least, so that a clean pool soon after its client has gone can only come from cancelling it."""
NEIGHBOUR = {**LONG, "text_input": SLOW + "A request next door", "max_tokens": 24, "seed": 3}


def drop_http(server: TritonServer, num_events: int) -> None:
    with HttpRequest(server) as request:
        request.send(LONG)
        for _ in zip(range(num_events), request.events(), strict=False):
            pass


def reset_http(server: TritonServer, num_events: int) -> None:
    request = HttpRequest(server).send(LONG)
    for _ in zip(range(num_events), request.events(), strict=False):
        pass
    request.close(reset=True)


def cancel_grpc(server: TritonServer, num_events: int) -> None:
    stream = GrpcStream(server).send(LONG)
    for _ in range(num_events):
        assert stream.next()[1] is None
    stream.close(cancel_requests=True)


def cancel_grpc_without_streaming(server: TritonServer, num_events: int) -> None:
    stream = GrpcStream(server).send({**LONG, "stream": False})
    time.sleep(0.1 * num_events)
    stream.close(cancel_requests=True)


def test_8_streams_that_are_left_alone_free_what_they_held(tiny_server):
    solo = grpc_infer(tiny_server, NEIGHBOUR).checked().text
    before = cancelled(tiny_server)
    leave = [drop_http, reset_http, cancel_grpc, cancel_grpc_without_streaming] * 2
    answers = at_once(
        [*(partial(way, tiny_server, 5) for way in leave), partial(grpc_infer, tiny_server, NEIGHBOUR)]
    )
    assert answers[-1].checked().text == solo
    tiny_server.wait_pool_clean()
    assert cancelled(tiny_server) == before + 8


def test_50_streams_reset_at_random_moments(tiny_server):
    """While they wait, in prefill (prompts of several chunks) and while they stream."""
    chance = random.Random(0)
    solo = grpc_infer(tiny_server, NEIGHBOUR).checked().text
    requests = [HttpRequest(tiny_server) for _ in range(50)]
    with GrpcStream(tiny_server) as neighbour:
        neighbour.send(NEIGHBOUR)
        for request in requests:
            request.send({**LONG, "text_input": SLOW + "Once more. " * chance.choice([1, 100, 400])})
        chance.shuffle(requests)
        for request in requests:
            time.sleep(chance.uniform(0.0, 0.03))
            request.close(reset=True)
        assert grpc_answer(neighbour.finish()).checked().text == solo
    tiny_server.wait_pool_clean()
    assert tiny_server.is_model_ready()
    assert generate(tiny_server, {"text_input": "Hello", "max_tokens": 2}).checked()


def test_a_stream_with_several_requests_is_cancelled_as_a_whole(tiny_server):
    before = cancelled(tiny_server)
    stream = GrpcStream(tiny_server)
    for number in range(4):
        stream.send(LONG, request_id=str(number))
    seen: set[str] = set()
    while len(seen) < 4:
        result, error = stream.next()
        assert error is None
        seen.add(result.get_response().id)
    stream.close(cancel_requests=True)
    tiny_server.wait_pool_clean()
    assert cancelled(tiny_server) == before + 4


def test_cancelled_while_waiting(queue_server):
    """Two run, two wait; the waiting ones are cancelled, and the running ones never know."""
    solo = grpc_infer(queue_server, NEIGHBOUR).checked().text
    with GrpcStream(queue_server) as first, GrpcStream(queue_server) as second:
        for running in (first, second):
            running.send(NEIGHBOUR)
        for running in (first, second):
            running.next()
        before = cancelled(queue_server)
        over_grpc, over_http = GrpcStream(queue_server).send(LONG), HttpRequest(queue_server).send(LONG)
        wait_for(lambda: queue_server.metric("llm_requests_waiting") == 2)
        over_grpc.close(cancel_requests=True)
        wait_for(lambda: cancelled(queue_server) == before + 1)
        over_http.close()
        for running in (first, second):
            assert solo.endswith(grpc_answer(running.finish()).checked().text)


def test_deadline_that_passes_while_text_is_made_ends_with_the_text_so_far(tiny_server):
    fields = {**LONG, "seed": 4, "return_finish_reason": True, "timeout_ms": 1000}
    whole = grpc_infer(tiny_server, {**fields, "max_tokens": 30, "timeout_ms": 0}).checked().text
    for way, stream in ((grpc_infer, True), (generate, False)):
        answer = way(tiny_server, {**fields, "stream": stream}).checked()
        assert answer.joined("finish_reason")[-1] == "timeout"
        assert answer.text and whole.startswith(answer.text)


def test_deadline_that_passes_in_the_queue_is_refused_while_it_waits(queue_server):
    with GrpcStream(queue_server) as first, GrpcStream(queue_server) as second:
        for running in (first, second):
            running.send(LONG)
        for running in (first, second):
            running.next()
        for way in (generate, grpc_infer):
            answer = way(queue_server, {"text_input": "Hello", "max_tokens": 2, "timeout_ms": 300})
            assert answer.error is not None and answer.error.startswith("UNAVAILABLE: ")
            assert "deadline" in answer.error and not answer.responses
            assert answer.status in (None, 400, 503)
        for running in (first, second):
            result, error = running.next()
            assert error is None and outputs_of(result)["text_output"] != [""]


def test_deadline_ends_a_request_whose_client_has_gone_unseen(tiny_server):
    """Triton does not notice that the client of a whole answer has gone."""
    before = tiny_server.metric("llm_requests_total", outcome="timeout")
    request = HttpRequest(tiny_server, "generate")
    request.send({**LONG, "stream": False, "timeout_ms": 1000})
    wait_for(lambda: tiny_server.metric("llm_requests_running") == 1)
    request.close(reset=True)
    tiny_server.wait_pool_clean()
    assert tiny_server.metric("llm_requests_total", outcome="timeout") == before + 1


@pytest.mark.slow
def test_default_deadline(start_server):
    server = start_server({"default_timeout_ms": 700}, environment={"PAGED_ENGINE_FAULTS": "1"})
    asked = {**LONG, "return_finish_reason": True}
    assert grpc_infer(server, asked).checked().joined("finish_reason")[-1] == "timeout"
    longer = grpc_infer(server, {**asked, "max_tokens": 20, "timeout_ms": 60_000}).checked()
    assert longer.joined("finish_reason")[-1] == "length"
    without = grpc_infer(server, {**asked, "max_tokens": 20, "timeout_ms": 0}).checked()
    assert without.joined("finish_reason")[-1] == "length"


def cancelled(server: TritonServer) -> float:
    return server.metric("llm_requests_total", outcome="cancelled")
