"""Our own client against the real server: both kinds, both transports, and the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from triton_server import TritonServer
from wire import SLOW, at_once, wait_for

from paged_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InternalError,
    InvalidRequest,
    TimedOut,
    Unavailable,
)

ENDLESS = {"max_tokens": 2000, "ignore_eos": True}
SCHEMES = ["grpc", "http"]

# Whoever runs the tests may have SIGINT ignored.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from paged_client.__main__ import main
main()
"""


def url(server: TritonServer, scheme: str) -> str:
    return f"{scheme}://{server.grpc_url if scheme == 'grpc' else server.http_url}"


@pytest.mark.parametrize("scheme", SCHEMES)
class TestEitherTransport:
    def test_leaving_the_loop_frees_the_place_and_the_client_goes_on(self, tiny_server, scheme):
        with Client(url(tiny_server, scheme)) as client:
            for _ in range(3):
                stream = client.stream(SLOW + "Count:", **ENDLESS)
                for delta in stream:
                    assert delta.text
                    break
                stream.close()
                tiny_server.wait_pool_clean()
            assert client.generate("Hello", max_tokens=3, ignore_eos=True).num_output_tokens == 3

    async def test_leaving_the_loop_frees_the_place_with_asyncio(self, tiny_server, scheme):
        async with AsyncClient(url(tiny_server, scheme)) as client:
            async with client.stream(SLOW + "Count:", **ENDLESS) as stream:
                async for delta in stream:
                    assert delta.text
                    break
            await asyncio.to_thread(tiny_server.wait_pool_clean)
            task = asyncio.create_task(client.generate(SLOW + "Count:", timeout_ms=1000, **ENDLESS))
            await asyncio.to_thread(wait_for, lambda: tiny_server.metric("llm_requests_running") == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(tiny_server.wait_pool_clean)
            assert (await client.generate("Hello", max_tokens=3, ignore_eos=True)).num_output_tokens == 3

    def test_two_threads_and_eight_coroutines_on_one_client(self, tiny_server, scheme):
        prompts = [f"Number {number}" for number in range(8)]
        options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}
        with Client(url(tiny_server, scheme)) as client:
            solo = [client.generate(prompt, **options).text for prompt in prompts]

            def stream_all(part: list[str]) -> list[str]:
                return ["".join(delta.text for delta in client.stream(prompt, **options)) for prompt in part]

            halves = at_once([lambda: stream_all(prompts[:4]), lambda: stream_all(prompts[4:])])
        assert halves[0] + halves[1] == solo

        async def all_at_once() -> list[str]:
            async with AsyncClient(url(tiny_server, scheme)) as client:

                async def one(prompt: str) -> str:
                    return "".join([delta.text async for delta in client.stream(prompt, **options)])

                return await asyncio.gather(*(one(prompt) for prompt in prompts))

        assert asyncio.run(all_at_once()) == solo

    def test_results_carry_everything(self, tiny_server, scheme):
        with Client(url(tiny_server, scheme)) as client:
            options: dict[str, Any] = {
                "max_tokens": 5,
                "ignore_eos": True,
                "seed": 3,
                "n": 2,
                "logprobs": 2,
                "prompt_logprobs": 1,
                "return_token_ids": True,
                "return_cumulative_logprob": True,
            }
            whole = client.generate("Hello there", **options)
            stream = client.stream("Hello there", **options)
            deltas = list(stream)
        assert stream.result.sequences == whole.sequences
        assert {delta.sequence_index for delta in deltas} == {0, 1}
        for sequence in whole.sequences:
            assert sequence.finish_reason == "length"
            assert sequence.num_output_tokens == len(sequence.token_ids) == len(sequence.logprobs) == 5
            total = sum(
                entry[token].logprob
                for token, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)
            )
            assert sequence.cumulative_logprob == pytest.approx(total, rel=1e-4)
        assert whole.num_input_tokens == len(whole.prompt_logprobs) == 2
        assert whole.prompt_logprobs[0] is None
        assert stream.result.prompt_logprobs == whole.prompt_logprobs

    def test_errors_are_typed(self, tiny_server, scheme):
        with Client(url(tiny_server, scheme)) as client:
            for call in (client.generate, lambda *a, **k: list(client.stream(*a, **k))):
                with pytest.raises(InvalidRequest, match="top_p must be a number"):
                    call("Hello", top_p=1.5)
                with pytest.raises(InternalError, match="prepare"):
                    call("[[fault:prepare]]")
                with pytest.raises(TimedOut):
                    call(SLOW + "Count:", timeout_s=0.5, timeout_ms=1000, **ENDLESS)
            assert client.generate("Hello", max_tokens=2)
        tiny_server.wait_pool_clean()
        with Client(url(tiny_server, scheme), model="another") as client:
            assert not client.is_ready()
            with pytest.raises(Exception, match="another"):
                client.generate("Hello")

    def test_a_full_queue_is_unavailable_and_a_retry_finds_a_place(self, queue_server, scheme):
        slow: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
        with Client(url(queue_server, scheme)) as client, ThreadPoolExecutor() as pool:
            running = [pool.submit(client.generate, SLOW + "Hello", **slow) for _ in range(6)]
            wait_for(lambda: queue_server.metric("llm_requests_waiting") == 4)
            with pytest.raises(Unavailable, match="the queue is full"):
                client.generate("Hello", max_tokens=1)
            with Client(url(queue_server, scheme), retries=20) as patient:
                assert patient.generate("Hello", max_tokens=1)
            assert all(future.result().num_output_tokens == 12 for future in running)

    def test_nobody_there(self, scheme):
        with Client(f"{scheme}://127.0.0.1:9") as client:
            assert not client.is_ready()
            with pytest.raises(ConnectionFailed):
                client.generate("Hello")


class TestCommandLine:
    def start(self, server: TritonServer, scheme: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--url", url(server, scheme), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "utf-8"},
        )

    def run(
        self, server: TritonServer, scheme: str, *arguments: str, stdin: str = ""
    ) -> tuple[int, str, str]:
        process = self.start(server, scheme, *arguments)
        out, err = process.communicate(stdin, timeout=120)
        return process.returncode, out, err

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_an_answer(self, server, scheme):
        question = "What is the capital of France?"
        code, out, err = self.run(server, scheme, question, "--temperature", "0", "--max-tokens", "12")
        assert code == 0, err
        assert "Paris" in out
        assert "tokens/s" in err and "first token after" in err

    def test_a_text_from_stdin_as_it_is_and_not_streamed(self, tiny_server):
        options = ["--raw", "--no-stream", "--temperature", "0", "--max-tokens", "4"]
        code, out, err = self.run(tiny_server, "grpc", "-", *options, stdin="Hello there")
        with Client(url(tiny_server, "grpc")) as client:
            expected = client.generate("Hello there", max_tokens=4, temperature=0.0).text
        assert (code, out) == (0, expected + "\n"), err

    def test_an_error_is_one_line_and_an_exit_code(self, tiny_server):
        code, out, err = self.run(tiny_server, "http", "Hello", "--top-p", "1.5")
        assert (code, out) == (1, "")
        assert "INVALID_ARG: top_p must be" in err and len(err.splitlines()) == 1

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_ctrl_c_ends_the_request_too(self, tiny_server, scheme):
        process = self.start(
            tiny_server, scheme, SLOW + "Count:", "--raw", "--max-tokens", "2000", "--seed", "1"
        )
        try:
            assert process.stdout is not None and process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
            assert process.returncode == 130
            tiny_server.wait_pool_clean()
        finally:
            process.kill()
            process.communicate()

    def test_a_conversation(self, server):
        lines = "What is the capital of France?\nAnd of Italy?\n/exit\n"
        code, out, err = self.run(
            server, "grpc", "--chat", "--temperature", "0", "--max-tokens", "12", stdin=lines
        )
        assert code == 0, err
        assert "Paris" in out and "Rome" in out
