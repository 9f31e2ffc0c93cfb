"""Starting, stopping and changing what is served: nothing is lost on the way, and nothing is left behind."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from triton_server import RepositoryApiError, TritonServer
from wire import (
    SLOW,
    GrpcStream,
    HttpRequest,
    at_once,
    generate,
    generate_stream,
    grpc_answer,
    grpc_infer,
    outputs_of,
    wait_for,
)

FAULTS = {"PAGED_ENGINE_FAULTS": "1"}
HELLO = {"text_input": "Hello there", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
RUNNING = {**HELLO, "text_input": SLOW + "Hello there", "max_tokens": 30, "stream": True}

WRONG: list[tuple[dict[str, str], list[str]]] = [
    ({"page_size": "0"}, ["page_size", "1 to 1024", "got 0"]),
    ({"enable_prefix_caching": "maybe"}, ["enable_prefix_caching", "true or false", "got maybe"]),
    ({"page_size": "-1"}, ["page_size", "got -1"]),
    ({"page_size": "16.0"}, ["page_size", "whole number", "got 16.0"]),
    ({"enable_prefix_caching": "yes"}, ["enable_prefix_caching", "true or false", "got yes"]),
    ({"max_num_tokens": "16"}, ["max_num_tokens", "greater than", "page_size", "got 16"]),
    ({"model": ""}, ["model must be"]),
    ({"model": "${MODEL}"}, ["model must be"]),
    ({"chunk_sze": "16"}, ["chunk_sze"]),
]
"""Parameters that are wrong -> what the load's error must say. The last one's key stays in the configuration."""


def test_sigterm_with_4_running_and_3_queued_answers_them_all(start_server):
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
    assert [first + rest for first, rest in zip(firsts, answers, strict=False)] == [solo] * 4
    assert answers[4:] == [solo] * 2
    assert server.wait() == 0
    assert not server.stub_pids()
    assert not server.shared_memory_files()
    assert "successfully unloaded 'llm'" in server.log_text()


@pytest.fixture(scope="module")
def explicit_server(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server that loads and unloads its model by request only."""
    parameters = {"dtype": "float32", "page_size": 16, "max_num_tokens": 256, "max_batch_size": 4}
    with TritonServer(
        tmp_path_factory.mktemp("explicit"), tiny_checkpoint, parameters, explicit=True, environment=FAULTS
    ) as server:
        yield server.wait_ready()


@pytest.fixture
def loaded_server(explicit_server: TritonServer) -> Iterator[TritonServer]:
    """The same with its model loaded, in whatever configuration the test before has left it."""
    if not explicit_server.is_model_ready():
        explicit_server.load()
    yield explicit_server
    assert explicit_server.is_running(), explicit_server.log_text()[-2000:]
    if explicit_server.is_model_ready():
        explicit_server.wait_pool_clean()


def families(server: TritonServer) -> set[str]:
    """The metrics of the model that the server shows."""
    return {s.name for s in server.metrics() if s.name.startswith(("llm_", "nv_trt_llm_"))}


def tokens_per_page(server: TritonServer) -> float | None:
    """What the metrics say, None as long as they say nothing."""
    try:
        return server.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="tokens_per")
    except KeyError:
        return None


def unload(server: TritonServer) -> None:
    """Unload the model, and check that nothing of it is left."""
    server.unload()
    assert not server.shared_memory_files()
    assert not families(server)
    assert generate(server, HELLO).error


def test_the_log_has_the_effective_configuration_once_with_the_pools_size(tiny_server):
    log = tiny_server.log_text()
    assert log.count("effective configuration: ") == 1
    values = dict(re.findall(r"(\w+)=([^,\s\"]+)", log.split("effective configuration: ")[1].splitlines()[0]))
    pool = re.search(r"KV cache: (\d+) pages of (\d+) tokens = (\d+) tokens, [\d.]+ MiB", log)
    assert pool is not None
    num_pages, page_size, num_tokens = map(int, pool.groups())
    assert (int(values["num_pages"]), int(values["page_size"])) == (num_pages, page_size)
    assert num_tokens == num_pages * page_size > 0
    assert int(values["max_num_tokens"]) > 0 < int(values["max_seq_len"])


def check_refused(server: TritonServer, parameters: dict[str, Any], words: list[str]) -> None:
    """A load with these parameters fails and says so, and what was loaded before goes on as it was."""
    text = generate(server, HELLO).checked().text
    with pytest.raises(RepositoryApiError) as raised:
        server.load(parameters)
    assert all(word in str(raised.value) for word in words), f"{parameters}: {raised.value}"
    assert generate(server, HELLO).checked().text == text
    assert len(server.stub_pids()) == 1


def test_loads_that_fail_say_why_and_the_corrected_one_works(loaded_server, tmp_path):
    server, checkpoint = loaded_server, loaded_server.model
    right: dict[str, Any] = {"page_size": 16, "enable_prefix_caching": True, "model": checkpoint}
    corrupt = tmp_path / "corrupt"
    shutil.copytree(checkpoint, corrupt)
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    nowhere = str(tmp_path / "nowhere")
    for wrong, words in (
        WRONG[0],
        ({"model": nowhere}, ["model must be", nowhere]),
        ({"model": str(corrupt)}, [str(corrupt), "is cut off"]),
    ):
        check_refused(server, {**right, **wrong}, words)
    text = generate(server, HELLO).checked().text
    server.load({**right, "page_size": 8})
    server.wait_for_stubs(1)
    assert generate(server, HELLO).checked().text == text
    wait_for(lambda: tokens_per_page(server) == 8)


def test_unloaded_under_load(loaded_server):
    """What runs is answered, what comes is refused, and then the model is gone."""
    server = loaded_server
    solo = grpc_infer(server, RUNNING).checked().text
    streams = [GrpcStream(server).send(RUNNING) for _ in range(6)]  # four run, two wait
    firsts = [outputs_of(stream.next()[0])["text_output"][0] for stream in streams[:4]]
    with ThreadPoolExecutor(1) as pool:
        unloading = pool.submit(unload, server)
        wait_for(lambda: not server.is_model_ready())
        assert generate(server, HELLO).error
        answers = [grpc_answer(arrived) for arrived in at_once([stream.finish for stream in streams])]
        unloading.result()
    for first, answer in zip(firsts, answers, strict=False):
        assert first + answer.checked().text == solo
    for answer in answers[4:]:
        assert answer.checked().text == solo


def test_loaded_unloaded_and_loaded_with_another_configuration(loaded_server):
    server = loaded_server
    text = generate(server, HELLO).checked().text
    shown = families(server)
    unload(server)
    server.load({"page_size": 32, "enable_prefix_caching": "True", "num_pages": "", "max_seq_len": "${X}"})
    assert generate(server, HELLO).checked().text == text
    assert tokens_per_page(server) == 32
    assert families(server) == shown


def test_an_engine_that_cannot_go_on_says_so_at_once(loaded_server):
    """Those in flight get an error, new ones UNAVAILABLE; loading the model again is the way out."""
    server = loaded_server
    with GrpcStream(server) as first, GrpcStream(server) as second:
        for stream in (first, second):
            stream.send(RUNNING).next()
        fatal = generate(server, {"text_input": "[[fault:fatal]]", "max_tokens": 5})
        assert fatal.error is not None and fatal.error.startswith("INTERNAL: ")
        for stream in (first, second):
            answer = grpc_answer(stream.finish())
            assert answer.error is not None and answer.error.startswith("INTERNAL: ")
    for way in (generate, generate_stream, grpc_infer):
        refused = way(server, HELLO)
        assert refused.error is not None and refused.error.startswith("UNAVAILABLE: the engine is down")
        assert refused.status in (None, 400, 503)
    if server.version() >= (2, 68):  # from where on Triton asks the model
        assert not server.is_model_ready()
    server.wait_pool_clean()
    server.unload()
    server.load()
    assert generate(server, HELLO).checked()
    assert server.is_model_ready()


def test_unloaded_after_20_requests_cancelled_at_random(loaded_server):
    server = loaded_server
    chance = random.Random(1)
    requests = [HttpRequest(server) for _ in range(10)]
    streams = [GrpcStream(server) for _ in range(10)]
    for pair in zip(requests, streams, strict=True):
        prompt = SLOW + "Once more. " * chance.choice([1, 100, 300])
        for sender in pair:
            sender.send({**RUNNING, "text_input": prompt, "max_tokens": 2000})
            time.sleep(chance.uniform(0.0, 0.05))
    leave = [
        *(partial(request.close, reset=True) for request in requests),
        *(partial(stream.close, cancel_requests=True) for stream in streams),
    ]
    chance.shuffle(leave)
    for call in leave:
        time.sleep(chance.uniform(0.0, 0.05))
        call()
    unload(server)


@pytest.mark.slow
def test_reloaded_ten_times_with_work_in_flight(loaded_server):
    server = loaded_server
    server.load({"page_size": 16})
    server.wait_for_stubs(1)
    wait_for(lambda: tokens_per_page(server) == 16)
    text = generate(server, HELLO).checked().text
    shown = families(server)
    solo = grpc_infer(server, RUNNING).checked().text
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


@pytest.mark.slow
def test_every_kind_of_wrong_parameter(loaded_server):
    for wrong, words in WRONG[1:]:
        server_default = {"page_size": 16, "enable_prefix_caching": True, "model": loaded_server.model}
        check_refused(loaded_server, {**server_default, "max_num_tokens": 256, **wrong}, words)
    loaded_server.unload()
