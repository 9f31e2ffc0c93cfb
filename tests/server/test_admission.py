"""Who is let in: what can never run is refused with the figures, what cannot run now is refused at once or waits its turn."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from wire import SLOW, Answer, GrpcStream, HttpRequest, at_once, generate, grpc_answer, grpc_infer, wait_for

GREEDY = {"temperature": 0.0}
MAX_SEQ_LEN = 128
"""Of the cramped server: its pool of 8 pages of 16 tokens; the checkpoint's context is 8192."""


def prompt(num_tokens: int, first: int = 100) -> list[int]:
    return [first + position % 1000 for position in range(num_tokens)]


def refused(answer: Answer, *words: str) -> str:
    """The message of a request that was refused as invalid and names all that."""
    assert answer.error is not None and not answer.responses, answer
    assert answer.error.startswith("INVALID_ARG: "), answer.error
    assert all(word in answer.error for word in words), answer.error
    return answer.error


@pytest.mark.parametrize("way", [generate, grpc_infer])
def test_prompts_around_the_longest(cramped_server, way):
    fields = {"max_tokens": 1, "ignore_eos": True, "return_num_output_tokens": True, **GREEDY}
    for num_tokens in (MAX_SEQ_LEN - 2, MAX_SEQ_LEN - 1):
        answer = way(cramped_server, {"input_ids": prompt(num_tokens), **fields}).checked()
        assert answer.joined("num_output_tokens") == [1]
    for num_tokens in (MAX_SEQ_LEN, MAX_SEQ_LEN + 1, 10 * MAX_SEQ_LEN):
        answer = way(cramped_server, {"input_ids": prompt(num_tokens), **fields})
        refused(answer, "prompt too long", str(num_tokens), str(MAX_SEQ_LEN - 1))


def test_a_prompt_that_fits_the_context_but_not_the_pool(cramped_server):
    error = refused(generate(cramped_server, {"input_ids": prompt(200), "max_tokens": 1}), "200")
    assert "8 pages of 16 tokens" in error
    assert generate(cramped_server, {"input_ids": prompt(5), "max_tokens": 3}).checked()


@pytest.mark.parametrize("stream", [True, False])
def test_output_ends_where_there_is_no_more_room(cramped_server, stream):
    for max_tokens in (1000, 2**63 - 1):
        answer = grpc_infer(
            cramped_server,
            {
                "input_ids": prompt(100),
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stream": stream,
                "return_finish_reason": True,
                "return_token_ids": True,
            },
        ).checked()
        assert len(answer.joined("token_ids")) == MAX_SEQ_LEN - 100
        assert answer.joined("finish_reason")[-1] == "length"


def test_max_tokens_absent_takes_the_default_capped_by_what_fits(cramped_server, tiny_server):
    fields = {"input_ids": prompt(100), "ignore_eos": True, "return_token_ids": True}
    assert len(generate(cramped_server, fields).checked().joined("token_ids")) == MAX_SEQ_LEN - 100
    assert len(generate(tiny_server, fields).checked().joined("token_ids")) == 256


def test_max_tokens_at_its_bounds_has_one_defined_response_each(cramped_server):
    for max_tokens in (0, -1, -(2**63)):
        refused(
            grpc_infer(cramped_server, {"text_input": "Hi", "max_tokens": max_tokens}), "max_tokens", ">= 1"
        )
        refused(
            generate(cramped_server, {"text_input": "Hi", "max_tokens": max_tokens}), "max_tokens", ">= 1"
        )
    too_large = '{"max_tokens": 9223372036854775808}'
    refused(generate(cramped_server, {"text_input": "Hi", "sampling_parameters": too_large}), "max_tokens")


def test_empty_prompt_beside_a_running_stream(tiny_server):
    """It begins with BOS, which this checkpoint has."""
    neighbour = {
        "text_input": SLOW + "A request next door",
        "max_tokens": 20,
        "ignore_eos": True,
        "stream": True,
        **GREEDY,
    }
    solo = grpc_infer(tiny_server, neighbour).checked().text
    with GrpcStream(tiny_server) as stream:
        stream.send(neighbour)
        stream.next()
        fields = {"max_tokens": 4, "ignore_eos": True, **GREEDY}
        empty = generate(tiny_server, {"text_input": "", **fields}).checked()
        assert empty.text == generate(tiny_server, {"input_ids": [1], **fields}).checked().text
        assert solo.endswith(grpc_answer(stream.finish()).checked().text)


def test_huge_max_tokens_reserve_nothing(cramped_server):
    """Four requests that may fill the pool each, and end at their tenth token, run together."""
    fields = {"text_input": SLOW, "max_tokens": 1000, "seed": 8, "stream": True, "return_token_ids": True}
    tokens = grpc_infer(cramped_server, {**fields, "max_tokens": 10, "ignore_eos": True}).joined("token_ids")
    stop = {"sampling_parameters": f'{{"stop_token_ids": [{tokens[-1]}]}}', "ignore_eos": True}
    assert tokens[-1] not in tokens[:-1]
    order: list[tuple[int, bool]] = []
    lock = threading.Lock()

    def read(number: int) -> list[int]:
        token_ids: list[int] = []
        while len(token_ids) < len(tokens):
            result, error = streams[number].next()
            assert error is None, error
            token_ids += result.as_numpy("token_ids").tolist()
            with lock:
                order.append((number, len(token_ids) == len(tokens)))
        return token_ids

    streams = [GrpcStream(cramped_server) for _ in range(4)]
    for stream in streams:
        stream.send({**fields, **stop})
    for token_ids in at_once([partial(read, number) for number in range(4)]):
        assert token_ids == tokens
    for stream in streams:
        stream.close()
    first_end = next(position for position, (_, ended) in enumerate(order) if ended)
    assert {number for number, _ in order[:first_end]} == {0, 1, 2, 3}, "one ended before another began"


def test_queue_of_2_running_and_4_waiting_serves_6_of_50_and_refuses_44_meanwhile(queue_server):
    fields = {"text_input": SLOW + "Hello", "max_tokens": 24, "ignore_eos": True, **GREEDY}
    solo = generate(queue_server, fields).checked().text
    before = queue_server.metric("llm_requests_total", outcome="unavailable")
    requests = [HttpRequest(queue_server, "generate") for _ in range(50)]
    ended: list[Answer] = []
    for request in requests:
        request.send(fields)
    at_once([lambda request=request: ended.append(request.answer()) for request in requests])
    for request in requests:
        request.close()
    served = [answer for answer in ended if answer.error is None]
    assert [answer.text for answer in served] == [solo] * 6
    assert all(answer.error is not None for answer in ended[:44]), "a refusal came after an answer"
    for answer in ended[:44]:
        assert answer.error is not None and answer.error.startswith("UNAVAILABLE: the queue is full: 6 ")
        assert "max_batch_size 2, max_queue_size 4" in answer.error
        assert answer.status in (400, 503)
    queue_server.wait_pool_clean()
    assert queue_server.metric("llm_requests_total", outcome="unavailable") == before + 44
    assert generate(queue_server, {"text_input": "Hello", "max_tokens": 2}).checked()


def test_lower_priority_is_sooner(queue_server):
    """Two run; of those that wait, the one with the lowest number goes first, and equals in order of arrival."""
    order: list[str] = []
    running = {"text_input": SLOW + "Hello", "max_tokens": 20, "ignore_eos": True, **GREEDY}

    def finish(name: str, stream: GrpcStream) -> None:
        grpc_answer(stream.finish()).checked()
        order.append(name)

    def send(fields: dict[str, Any]) -> GrpcStream:
        return GrpcStream(queue_server).send({**running, **fields})

    first, second = send({"stream": True}), send({"stream": True, "max_tokens": 40})
    for stream in (first, second):
        stream.next()
    streams = {}
    # One at a time gets the place of the first.
    for name, priority in (("late", 5), ("usual", 0), ("usual again", 0), ("soon", -5)):
        streams[name] = send({"max_tokens": 1, "priority": priority})
        wait_for(lambda: queue_server.metric("llm_requests_waiting") == len(streams))
    at_once([partial(finish, name, stream) for name, stream in streams.items()])
    for stream in (first, second):
        grpc_answer(stream.finish()).checked()
    assert order == ["soon", "usual", "usual again", "late"]
