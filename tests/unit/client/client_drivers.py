"""Both transports, synchronous and asyncio, behind one face, so that one suite runs over all four."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from paged_client import AsyncClient, Client, Delta, Generation, Prompt

T = TypeVar("T")


class SyncDriver:
    """Drives a `Client`."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.client = Client(url, **settings)

    def stream(self, prompt: Prompt, **options: Any) -> tuple[list[Delta], Generation]:
        stream = self.client.stream(prompt, **options)
        return list(stream), stream.result

    def leave_after(self, num_deltas: int, prompt: Prompt, **options: Any) -> list[Delta]:
        deltas = []
        with self.client.stream(prompt, **options) as stream:
            for delta in stream:
                deltas.append(delta)
                if len(deltas) == num_deltas:
                    break
        return deltas

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        return self.client.generate(prompt, **options)

    def is_ready(self) -> bool:
        return self.client.is_ready()

    def wait_until_ready(self, timeout_s: float) -> None:
        self.client.wait_until_ready(timeout_s)

    def close(self) -> None:
        self.client.close()


class AsyncDriver:
    """Drives an `AsyncClient` on an event loop of its own."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(url, **settings)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def stream(self, prompt: Prompt, **options: Any) -> tuple[list[Delta], Generation]:
        async def work() -> tuple[list[Delta], Generation]:
            stream = self.client.stream(prompt, **options)
            return [delta async for delta in stream], stream.result

        return self.run(work())

    def leave_after(self, num_deltas: int, prompt: Prompt, **options: Any) -> list[Delta]:
        async def work() -> list[Delta]:
            deltas = []
            async with self.client.stream(prompt, **options) as stream:
                async for delta in stream:
                    deltas.append(delta)
                    if len(deltas) == num_deltas:
                        break
            return deltas

        return self.run(work())

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        return self.run(self.client.generate(prompt, **options))

    def is_ready(self) -> bool:
        return self.run(self.client.is_ready())

    def wait_until_ready(self, timeout_s: float) -> None:
        self.run(self.client.wait_until_ready(timeout_s))

    def close(self) -> None:
        self.run(self.client.aclose())
        self.run(self.loop.shutdown_asyncgens())
        self.loop.close()


Driver = SyncDriver | AsyncDriver


class MakeDriver:
    """Makes drivers of one kind, and closes them at the end."""

    def __init__(self, kind: type[SyncDriver] | type[AsyncDriver]) -> None:
        self._kind = kind
        self._made: list[Driver] = []

    def __call__(self, url: str, **settings: Any) -> Driver:
        driver = self._kind(url, **settings)
        self._made.append(driver)
        return driver

    def close(self) -> None:
        for driver in self._made:
            driver.close()
