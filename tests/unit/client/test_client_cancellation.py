"""Leaving early: the call returns, the server learns of it, and the client object goes on working."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest
from client_drivers import Driver
from fake_triton import Fail, FakeTriton, Hang, Received, Send, endless, pieces

from paged_client import AsyncClient, Cancelled, Client


def endless_or_short(received: Received) -> object:
    return pieces("short") if received.prompt == "short" else endless()


def test_leaving_the_loop_ends_the_request_and_the_client_can_be_used_again(
    server: FakeTriton, driver: Driver
) -> None:
    server.respond = endless_or_short  # type: ignore[assignment]
    for _ in range(3):
        assert len(driver.leave_after(1, "endless")) == 1
        assert server.wait_until_client_has_gone()
        assert driver.generate("short").text == "short"


def test_a_dropped_stream_ends_the_request(server: FakeTriton, client: Client) -> None:
    server.respond = endless_or_short  # type: ignore[assignment]
    for _ in client.stream("endless"):
        break
    gc.collect()
    assert server.wait_until_client_has_gone()
    assert client.generate("short").text == "short"


async def test_a_dropped_async_stream_ends_the_request(server: FakeTriton) -> None:
    server.respond = endless_or_short  # type: ignore[assignment]
    async with AsyncClient(server.url) as client:
        async for _ in client.stream("endless"):
            break
        gc.collect()
        assert await asyncio.to_thread(server.wait_until_client_has_gone)
        assert (await client.generate("short")).text == "short"


def test_an_exception_in_the_loop_ends_the_request(server: FakeTriton, client: Client) -> None:
    server.respond = endless_or_short  # type: ignore[assignment]
    with pytest.raises(KeyError), client.stream("endless") as stream:
        for _ in stream:
            raise KeyError
    assert server.wait_until_client_has_gone()


def test_after_close_the_iteration_is_over_and_there_is_no_result(server: FakeTriton, client: Client) -> None:
    server.respond = lambda received: endless()
    stream = client.stream("x")
    next(stream)
    with pytest.raises(RuntimeError, match="not complete yet"):
        _ = stream.result
    stream.close()
    stream.close()
    assert list(stream) == []
    with pytest.raises(Cancelled):
        _ = stream.result


def test_a_cancelled_loop_simply_ends(server: FakeTriton, client: Client) -> None:
    server.respond = lambda received: endless()
    stream = client.stream("x")
    num_deltas = 0
    for _ in stream:
        num_deltas += 1
        stream.cancel()
    assert num_deltas == 1
    assert server.wait_until_client_has_gone()
    with pytest.raises(Cancelled):
        _ = stream.result


def test_a_stream_cancelled_before_it_began_sends_nothing(server: FakeTriton, client: Client) -> None:
    stream = client.stream("x")
    stream.cancel()
    assert list(stream) == []
    assert server.requests == []


def test_a_complete_stream_keeps_its_result_when_it_is_closed(server: FakeTriton, client: Client) -> None:
    server.respond = lambda received: pieces("a", "b")
    with client.stream("x") as stream:
        assert len(list(stream)) == 2
    stream.cancel()
    assert stream.result.text == "ab"


@pytest.mark.parametrize("end", ["cancel", "close"])
@pytest.mark.parametrize("num_deltas_before", [0, 1])
def test_another_thread_ends_a_waiting_loop(
    server: FakeTriton, client: Client, num_deltas_before: int, end: str
) -> None:
    server.respond = lambda received: [*pieces("a", "b")[:num_deltas_before], Hang()]
    stream = client.stream("x")
    texts: list[str] = []
    reader = threading.Thread(target=lambda: texts.extend(delta.text for delta in stream))
    reader.start()
    server.wait_for_request()
    deadline = time.monotonic() + 20
    while len(texts) < num_deltas_before and time.monotonic() < deadline:
        time.sleep(0.005)
    getattr(stream, end)()
    reader.join(20)
    assert not reader.is_alive()
    assert texts == ["a"] * num_deltas_before
    assert server.wait_until_client_has_gone()
    with pytest.raises(Cancelled):
        _ = stream.result


def test_another_thread_ends_the_pause_before_a_retry(server: FakeTriton) -> None:
    server.respond = lambda received: [Fail("UNAVAILABLE: queue full")]
    with Client(server.url, retries=5, retry_delay_s=1000) as client:
        stream = client.stream("x")
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        server.wait_for_request()
        time.sleep(0.2)
        stream.cancel()
        # The pause is 6 seconds at least, so only the cancellation ends it in time.
        reader.join(4)
        assert not reader.is_alive()
    assert len(server.requests) == 1


@pytest.mark.parametrize("num_deltas_before", [0, 1])
async def test_another_task_ends_a_waiting_loop(server: FakeTriton, num_deltas_before: int) -> None:
    server.respond = lambda received: [*pieces("a", "b")[:num_deltas_before], Hang()]
    async with AsyncClient(server.url) as client:
        stream = client.stream("x")

        async def read() -> list[str]:
            return [delta.text async for delta in stream]

        reader = asyncio.create_task(read())
        await asyncio.to_thread(server.wait_for_request)
        await asyncio.sleep(0.1)
        stream.cancel()
        assert await asyncio.wait_for(reader, 20) == ["a"] * num_deltas_before
        assert await asyncio.to_thread(server.wait_until_client_has_gone)
        with pytest.raises(Cancelled):
            _ = stream.result


@pytest.mark.parametrize("kind", ["stream", "generate"])
async def test_cancelling_the_task_ends_the_request(server: FakeTriton, kind: str) -> None:
    server.respond = lambda received: pieces("short") if received.prompt == "short" else [Hang()]
    async with AsyncClient(server.url) as client:

        async def read() -> None:
            if kind == "generate":
                await client.generate("x")
            async for _ in client.stream("x"):
                pass

        reader = asyncio.create_task(read())
        await asyncio.to_thread(server.wait_for_request)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await asyncio.to_thread(server.wait_until_client_has_gone)
        assert (await client.generate("short")).text == "short"


async def test_aclose_while_another_task_waits(server: FakeTriton) -> None:
    server.respond = lambda received: [Hang()]
    async with AsyncClient(server.url) as client:
        stream = client.stream("x")

        async def read() -> list[str]:
            return [delta.text async for delta in stream]

        reader = asyncio.create_task(read())
        await asyncio.to_thread(server.wait_for_request)
        await stream.aclose()
        assert await asyncio.wait_for(reader, 20) == []


def test_leaving_a_stream_of_several_sequences(server: FakeTriton, driver: Driver) -> None:
    outputs: dict[str, list[Any]] = {"text_output": ["a", "b"], "finish_reason": ["None", "None"]}
    server.respond = lambda received: [Send({**outputs, "num_output_tokens": [1, 1]}), Hang()]
    assert [delta.text for delta in driver.leave_after(1, "x", n=2)] == ["a"]
    assert server.wait_until_client_has_gone()
