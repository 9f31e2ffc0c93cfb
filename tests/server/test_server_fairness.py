"""Long prompts beside others, seen from outside: in counts and in the order of what comes back, never in seconds."""

from __future__ import annotations

import random
import threading
from functools import partial

import pytest
from triton_server import TritonServer
from wire import SLOW, GrpcStream, at_once, grpc_answer, grpc_infer, outputs_of

from paged_client import Client, InvalidRequest

CONTEXT = 8192
MAX_NUM_TOKENS = 256
"""Of the tiny server's model and steps."""


class Counter(threading.Thread):
    """Reads a stream, so that anyone can see how many responses it has brought by now."""

    def __init__(self, server: TritonServer, seed: int) -> None:
        super().__init__(daemon=True)
        self.num_responses = 0
        self._stream = GrpcStream(server)
        self._stream.send(
            {
                "text_input": SLOW + "A running stream",
                "max_tokens": 2000,
                "ignore_eos": True,
                "stream": True,
                "seed": seed,
            }
        )
        self._read()
        self.start()

    def run(self) -> None:
        while self._read():
            pass

    def end(self) -> None:
        self._stream.close(cancel_requests=True)
        self.join()

    def _read(self) -> bool:
        _, error = self._stream.next()
        self.num_responses += error is None
        return error is None


def test_a_long_prompt_holds_up_neither_a_running_stream_nor_a_newcomer(tiny_server):
    chance = random.Random(7)
    num_prompt_tokens = CONTEXT - 10
    long_prompt = [chance.randrange(100, 40_000) for _ in range(num_prompt_tokens)]
    num_steps = num_prompt_tokens // MAX_NUM_TOKENS
    order: list[str] = []
    stream = Counter(tiny_server, seed=1)
    try:
        seen: dict[str, int] = {}

        def finish(name: str, request: GrpcStream) -> None:
            assert grpc_answer(request.finish()).checked()
            order.append(name)
            seen[name] = stream.num_responses

        with GrpcStream(tiny_server) as big, GrpcStream(tiny_server) as newcomer:
            big.send({"input_ids": long_prompt, "max_tokens": 1, "ignore_eos": True})
            before = stream.num_responses
            newcomer.send({"input_ids": long_prompt[-10:], "max_tokens": 2, "ignore_eos": True})
            at_once([partial(finish, "big", big), partial(finish, "newcomer", newcomer)])
    finally:
        stream.end()
    assert order == ["newcomer", "big"]
    # Each step gives the stream a token; what is under way when a count is taken makes a difference of a few.
    assert seen["big"] - before >= num_steps - 6, "the stream waited for more than one step at a time"
    assert seen["newcomer"] - before <= num_steps // 2, "the newcomer waited for the long prompt"


def test_a_prompt_of_6_mb_is_the_models_own_error_and_holds_nobody_up(tiny_server):
    """The transports let it pass; tokenizing it takes seconds, in which five streams go on."""
    prompt = "All work and no play makes Jack a dull boy. " * (6_000_000 // 44)
    streams = [Counter(tiny_server, seed) for seed in range(5)]
    try:
        before = [stream.num_responses for stream in streams]
        error = r"prompt too long: it has \d{7} tokens, at most 8191"
        with Client(f"grpc://{tiny_server.grpc_url}") as client, pytest.raises(InvalidRequest, match=error):
            list(client.stream(prompt))
        between = [stream.num_responses for stream in streams]
        with Client(f"http://{tiny_server.http_url}") as client, pytest.raises(InvalidRequest, match=error):
            client.generate(prompt)
        after = [stream.num_responses for stream in streams]
    finally:
        at_once([stream.end for stream in streams])
    assert all(early + 3 <= late for early, late in zip(before, between, strict=True)), (before, between)
    assert all(early + 3 <= late for early, late in zip(between, after, strict=True)), (between, after)


def test_prompts_beyond_max_prompt_bytes_are_refused_unread(tiny_server):
    prompt = "x" * (16 * 1024 * 1024 + 1)
    for url in (f"grpc://{tiny_server.grpc_url}", f"http://{tiny_server.http_url}"):
        with Client(url) as client, pytest.raises(InvalidRequest, match="max_prompt_bytes = 16777216"):
            client.generate(prompt)


def test_many_long_prompts_and_many_short_ones_all_end_and_equal_their_solo_runs(tiny_server):
    """More requests than fit in a step, prompts of up to a dozen chunks."""
    chance = random.Random(3)
    requests = [
        {
            "input_ids": [
                chance.randrange(100, 40_000) for _ in range(chance.choice([1, 15, 16, 17, 300, 3000]))
            ],
            "max_tokens": chance.choice([1, 8, 20]),
            "ignore_eos": True,
            "temperature": 0.0 if chance.random() < 0.5 else 0.9,
            "seed": number,
            "return_token_ids": True,
        }
        for number in range(32)
    ]
    together = at_once([partial(grpc_infer, tiny_server, fields) for fields in requests])
    for fields, answer in zip(requests, together, strict=True):
        solo = grpc_infer(tiny_server, fields).checked()
        assert answer.checked().joined("token_ids") == solo.joined("token_ids")


def test_a_stream_gets_each_of_its_tokens_in_a_response_of_its_own(tiny_server):
    """While others come and go, no step's token waits for the next one's."""
    fields = {
        "text_input": SLOW + "One by one",
        "max_tokens": 30,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.0,
        "return_num_output_tokens": True,
    }
    with GrpcStream(tiny_server) as stream:
        stream.send(fields)
        counts = [outputs_of(stream.next()[0])["num_output_tokens"][0]]
        for _ in range(5):
            assert grpc_infer(tiny_server, {"text_input": "Hello", "max_tokens": 2}).checked()
        counts += grpc_answer(stream.finish()).checked().joined("num_output_tokens")
    assert counts == [1] * 30
