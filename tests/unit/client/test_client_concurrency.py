"""Many generations through one client object."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from fake_triton import FakeTriton, Received, Step, endless, pieces

from paged_client import AsyncClient, Client


def echo(received: Received) -> list[Step]:
    return pieces(*[f"{received.prompt}.{index} " for index in range(5)])


def expected(prompt: str) -> str:
    return "".join(f"{prompt}.{index} " for index in range(5))


def test_threads_share_a_client(server: FakeTriton, client: Client) -> None:
    server.respond = echo

    def work(prompt: str) -> str:
        stream = client.stream(prompt)
        text = "".join(delta.text for delta in stream)
        assert stream.result.text == text
        return text

    prompts = [f"p{index}" for index in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, prompts)) == [expected(prompt) for prompt in prompts]


def test_two_streams_are_read_in_turns(server: FakeTriton, client: Client) -> None:
    server.respond = echo
    pairs = list(zip(client.stream("a"), client.stream("b"), strict=True))
    assert [(first.text, second.text) for first, second in pairs] == [
        (f"a.{i} ", f"b.{i} ") for i in range(5)
    ]


def test_ending_one_of_two_streams_leaves_the_other_alone(server: FakeTriton, client: Client) -> None:
    barrier = threading.Event()

    def respond(received: Received) -> object:
        if received.prompt == "endless":
            yield from endless()
        first, *rest = echo(received)
        yield first
        barrier.wait(20)
        yield from rest

    server.respond = respond  # type: ignore[assignment]
    other = client.stream("other")
    texts = [next(other).text]
    with client.stream("endless") as stream:
        next(stream)
    assert server.wait_until_client_has_gone()
    barrier.set()
    texts += [delta.text for delta in other]
    assert "".join(texts) == expected("other")


async def test_coroutines_share_a_client(server: FakeTriton) -> None:
    server.respond = echo
    async with AsyncClient(server.url) as client:

        async def work(prompt: str) -> str:
            return "".join([delta.text async for delta in client.stream(prompt)])

        prompts = [f"p{index}" for index in range(24)]
        for begin in range(0, 24, 8):
            group = prompts[begin : begin + 8]
            assert await asyncio.gather(*map(work, group)) == [expected(prompt) for prompt in group]


def test_one_client_after_another(server: FakeTriton) -> None:
    server.respond = echo
    for _ in range(10):
        with Client(server.url) as client:
            assert client.generate("x").text.startswith("x.0")
