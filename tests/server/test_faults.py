"""What breaks inside: it ends the requests it concerns with one error each, and the rest goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

from wire import SLOW, GrpcStream, at_once, generate, generate_stream, grpc_answer, grpc_infer

NEIGHBOUR = {
    "text_input": SLOW + "A request next door",
    "max_tokens": 24,
    "ignore_eos": True,
    "stream": True,
    "seed": 3,
}


def test_a_fault_in_one_request_ends_that_request_alone(tiny_server):
    """In tokenizing, in detokenizing, in building a response."""
    solo = grpc_infer(tiny_server, NEIGHBOUR).checked().text
    before = tiny_server.metric("llm_requests_total", outcome="error")
    ways: list[Any] = [generate, generate_stream, grpc_infer]
    faulty = [
        {"text_input": f"[[fault:{fault}]]", "max_tokens": 5, "stream": stream}
        for fault in ("prepare", "detokenize", "respond")
        for stream in (False, True)
    ]
    with GrpcStream(tiny_server) as neighbour:
        neighbour.send(NEIGHBOUR).next()
        answers = at_once([partial(way, tiny_server, fields) for way in ways for fields in faulty])
        assert solo.endswith(grpc_answer(neighbour.finish()).checked().text)
    for answer in answers:
        assert answer.error is not None and answer.error.startswith("INTERNAL: ")
        assert not answer.responses
        assert answer.status in (None, 400, 500)
    tiny_server.wait_pool_clean()
    assert tiny_server.metric("llm_requests_total", outcome="error") == before + len(answers)


def test_a_fault_in_a_step_ends_those_in_it_and_the_loop_goes_on(tiny_server):
    """In the model, and in the scheduler's part of the step."""
    solo = grpc_infer(tiny_server, NEIGHBOUR).checked().text
    for fault in ("model", "step"):
        with GrpcStream(tiny_server) as neighbour:
            neighbour.send(NEIGHBOUR).next()
            answer = generate(tiny_server, {"text_input": f"[[fault:{fault}]]", "max_tokens": 5})
            assert answer.error is not None and answer.error.startswith("INTERNAL: ")
            ended = grpc_answer(neighbour.finish())
            assert ended.error is not None and ended.error.startswith("INTERNAL: ")
        assert tiny_server.is_model_ready()
        tiny_server.wait_pool_clean()
    assert grpc_infer(tiny_server, NEIGHBOUR).checked().text == solo


def test_faults_are_off_unless_the_server_was_started_with_them(server):
    for fault in ("prepare", "model", "detokenize", "respond", "step", "fatal"):
        fields = {"text_input": f"[[fault:{fault}]]", "max_tokens": 1}
        assert generate(server, fields).checked()
