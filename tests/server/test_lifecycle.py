"""Starting, stopping and changing what is served: nothing is lost on the way, and nothing is left behind."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from triton_server import RepositoryApiError, TritonServer
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

FAULTS = {"PAGED_ENGINE_FAULTS": "1"}
HELLO = {"text_input": "Hello there", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
RUNNING = {**HELLO, "text_input": SLOW + "Hello there", "max_tokens": 40, "stream": True}


def families(server: TritonServer) -> set[str]:
    """The metrics of the model that the server shows."""
    return {s.name for s in server.metrics() if s.name.startswith(("llm_", "nv_trt_llm_"))}


def tokens_per_page(server: TritonServer) -> float | None:
    """What the metrics say, None as long as they say nothing."""
    try:
        return server.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per")
    except KeyError:
        return None


class TestStopping:
    """SIGTERM: Triton lets what is in flight finish, and ends."""

    def test_4_running_and_3_queued_are_answered(self, start_server):
        server: TritonServer = start_server({"max_batch_size": 4}, environment=FAULTS)
        solo = grpc_infer(server, RUNNING).checked().text
        running = [GrpcStream(server).send(RUNNING) for _ in range(4)]
        firsts = [outputs_of(stream.next()[0])["text_output"][0] for stream in running]
        queued = [GrpcStream(server).send({**RUNNING, "stream": stream}) for stream in (True, False)]
        over_http = HttpRequest(server).send(RUNNING)
        wait_for(lambda: server.metric("llm_requests_waiting") == 3)
        server.send_signal(signal.SIGTERM)
        with ThreadPoolExecutor() as pool:
            later = [pool.submit(stream.finish) for stream in (*running, *queued)]
            assert over_http.answer().checked().text == solo
            answers = [grpc_answer(future.result()).checked().text for future in later]
        over_http.close()
        rest = [first + answer for first, answer in zip(firsts, answers[:4], strict=True)]
        assert rest == [solo] * 4
        assert answers[4:] == [solo] * 2
        assert server.wait() == 0
        assert not server.stub_pids()
        assert not server.shared_memory_files()
        assert "successfully unloaded 'llm'" in server.log_text()

    def test_an_idle_server_stops(self, start_server):
        server: TritonServer = start_server(explicit=True)
        server.load()
        assert generate(server, HELLO).checked()
        assert server.stop() == 0
        assert not server.stub_pids()
        assert not server.shared_memory_files()


@pytest.fixture(scope="module")
def explicit_server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server that loads its model by request only; each test finds it without one."""
    parameters = {"dtype": "float32", "page_size": 16, "max_num_tokens": 256, "max_batch_size": 4}
    with TritonServer(
        tmp_path_factory.mktemp("explicit"), tiny_checkpoint, parameters, explicit=True, environment=FAULTS
    ) as server:
        yield server.wait_ready()


@pytest.fixture
def unloaded_server(explicit_server: TritonServer) -> Iterator[TritonServer]:
    """The same; checked for what a test leaves behind."""
    yield explicit_server
    assert explicit_server.is_running(), explicit_server.log_text()[-2000:]
    if explicit_server.is_model_ready():
        explicit_server.unload()
    wait_for(lambda: not explicit_server.stub_pids())
    assert not explicit_server.shared_memory_files()
    assert not families(explicit_server)


class TestLoading:
    def test_loaded_unloaded_and_loaded_with_another_configuration(self, unloaded_server):
        server = unloaded_server
        server.load({"page_size": 16})
        text = generate(server, HELLO).checked().text
        assert tokens_per_page(server) == 16
        shown = families(server)
        server.unload()
        assert generate(server, HELLO).error
        assert not families(server)
        server.load({"page_size": 32})
        assert generate(server, HELLO).checked().text == text
        assert tokens_per_page(server) == 32
        assert families(server) == shown

    def test_a_load_that_fails_says_why_and_what_was_loaded_goes_on(self, unloaded_server, tmp_path):
        """Values that are wrong, a path that is, and weights that are: then the right ones again."""
        server = unloaded_server
        server.load({"page_size": 16})
        text = generate(server, HELLO).checked().text
        right = {"page_size": 16, "max_num_tokens": 256, "enable_prefix_caching": True, "model": server.model}
        for wrong, words in (
            ({"page_size": "0"}, ["page_size", "1 to 1024", "0"]),
            ({"page_size": "-1"}, ["page_size", "-1"]),
            ({"page_size": "16.0"}, ["page_size", "whole number", "16.0"]),
            ({"enable_prefix_caching": "maybe"}, ["enable_prefix_caching", "true or false", "maybe"]),
            ({"enable_prefix_caching": "yes"}, ["enable_prefix_caching", "true or false", "yes"]),
            ({"max_num_tokens": "16"}, ["max_num_tokens", "greater than", "page_size", "16"]),
            ({"model": ""}, ["model must be"]),
            ({"model": "${MODEL}"}, ["model must be"]),
            ({"model": str(tmp_path / "nowhere")}, ["model must be", str(tmp_path / "nowhere")]),
            ({"model": corrupt_weights(server, tmp_path)}, ["cannot load the model", str(tmp_path)]),
        ):
            with pytest.raises(RepositoryApiError) as raised:
                server.load({**right, **wrong})
            assert all(word in str(raised.value) for word in words), f"{wrong}: {raised.value}"
            assert generate(server, HELLO).checked().text == text
            assert len(server.stub_pids()) == 1
        server.load({**right, "page_size": 8})
        server.wait_for_stubs(1)
        assert generate(server, HELLO).checked().text == text
        wait_for(lambda: tokens_per_page(server) == 8)

    def test_values_that_mean_unset_and_words_for_true(self, unloaded_server):
        unset = {"page_size": "${PAGE_SIZE}", "num_pages": "", "max_seq_len": " "}
        unloaded_server.load({**unset, "enable_prefix_caching": "True", "enable_chunked_prefill": "1"})
        assert generate(unloaded_server, HELLO).checked()
        assert tokens_per_page(unloaded_server) == 16

    @pytest.mark.slow
    def test_reloaded_ten_times_with_work_in_flight(self, unloaded_server):
        server = unloaded_server
        server.load({"page_size": 16})
        text = generate(server, HELLO).checked().text
        shown = families(server)
        solo = grpc_infer(server, RUNNING).checked().text
        server.wait_pool_clean()
        memory: list[int] = []
        for page_size in (32, 16) * 5:
            with GrpcStream(server) as stream:
                stream.send(RUNNING)
                first = outputs_of(stream.next()[0])["text_output"][0]
                server.load({"page_size": page_size})
                assert generate(server, HELLO).checked().text == text
                assert first + grpc_answer(stream.finish()).checked().text == solo
            server.wait_for_stubs(1)
            wait_for(lambda page_size=page_size: tokens_per_page(server) == page_size)
            assert families(server) == shown
            assert len(server.shared_memory_files()) == 1
            server.wait_pool_clean()
            memory.append(server.memory_bytes())
        assert memory[-1] < memory[2] + (64 << 20), f"resident memory after each reload: {memory}"


class TestUnloading:
    def test_under_load(self, unloaded_server):
        """What runs is answered, what comes is refused, and then the model is gone."""
        server = unloaded_server
        server.load({"page_size": 16})
        solo = grpc_infer(server, RUNNING).checked().text
        streams = [GrpcStream(server).send(RUNNING) for _ in range(6)]  # four run, two wait
        firsts = [outputs_of(stream.next()[0])["text_output"][0] for stream in streams[:4]]
        with ThreadPoolExecutor(1) as pool:
            unloading = pool.submit(server.unload)
            wait_for(lambda: not server.is_model_ready())
            assert generate(server, HELLO).error
            answers = [grpc_answer(arrived) for arrived in at_once([stream.finish for stream in streams])]
            unloading.result()
        for first, answer in zip(firsts, answers, strict=False):
            assert first + answer.checked().text == solo
        for answer in answers[4:]:
            assert answer.checked().text == solo

    def test_after_20_requests_cancelled_at_random(self, unloaded_server):
        server = unloaded_server
        server.load({"page_size": 16})
        chance = random.Random(1)
        requests = [HttpRequest(server) for _ in range(10)]
        streams = [GrpcStream(server) for _ in range(10)]
        for request, stream in zip(requests, streams, strict=True):
            fields = {**RUNNING, "text_input": SLOW + "Once more. " * chance.choice([1, 100, 300])}
            for sender in (request, stream):
                sender.send({**fields, "max_tokens": 2000})
                time.sleep(chance.uniform(0.0, 0.05))
        leave = [
            *(lambda request=request: request.close(reset=True) for request in requests),
            *(lambda stream=stream: stream.close(cancel_requests=True) for stream in streams),
        ]
        chance.shuffle(leave)
        for call in leave:
            time.sleep(chance.uniform(0.0, 0.05))
            call()
        server.unload()


def corrupt_weights(server: TritonServer, folder: Path) -> str:
    """A copy of the checkpoint whose weights break off."""
    copy = folder / "corrupt"
    shutil.copytree(server.model, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return str(copy)
