"""The model's metrics move by the right amounts, whatever way requests end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from triton_server import TritonServer
from wire import SLOW, GrpcStream, HttpRequest, at_once, generate, grpc_infer, wait_for

OUTCOMES = ("stop", "length", "timeout", "cancelled", "invalid", "unavailable", "error")
HISTOGRAMS = (
    "llm_time_to_first_token_seconds",
    "llm_inter_token_seconds",
    "llm_queue_seconds",
    "llm_request_seconds",
)
COUNTERS = (
    "llm_prompt_tokens_total",
    "llm_generated_tokens_total",
    "llm_prefix_cached_tokens_total",
    "llm_preemptions_total",
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("count", "sum")),
)


def counters(server: TritonServer) -> dict[str, float]:
    """Everything that only grows, by name; requests by outcome."""
    values = {name: server.metric(name) for name in COUNTERS}
    return values | {outcome: server.metric("llm_requests_total", outcome=outcome) for outcome in OUTCOMES}


@contextmanager
def changes(server: TritonServer) -> Iterator[dict[str, float]]:
    """A dictionary that is filled, once what is done in the block has been published, with what it has changed."""
    server.wait_pool_clean()
    before = counters(server)
    moved: dict[str, float] = {}
    yield moved
    server.wait_pool_clean()
    after = counters(server)
    moved.update({name: after[name] - before[name] for name in after if after[name] != before[name]})


def test_every_metric_has_the_models_labels(tiny_server):
    samples = [s for s in tiny_server.metrics() if s.name.startswith(("llm_", "nv_trt_llm_"))]
    names = {sample.name for sample in samples}
    assert {*COUNTERS, "llm_requests_total", *(f"{name}_bucket" for name in HISTOGRAMS)} <= names
    assert {"llm_requests_running", "llm_requests_waiting"} <= names
    assert {"llm_kv_pages_total", "llm_kv_pages_used", "llm_kv_pages_cached"} <= names
    for sample in samples:
        expected = {"model": "llm", "version": "1"}
        own = {key: value for key, value in sample.labels.items() if key not in expected}
        assert {key: sample.labels[key] for key in expected} == expected
        assert own.keys() <= {"outcome", "kv_cache_block_type", "le"}, sample


def test_one_request_moves_them_by_the_right_amounts(tiny_server):
    num_tokens = 30
    with changes(tiny_server) as moved, GrpcStream(tiny_server) as stream:
        stream.send(
            {
                "text_input": SLOW + "The amounts of one request",
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": True,
                "return_num_input_tokens": True,
            }
        )
        num_prompt_tokens = int(stream.next()[0].as_numpy("num_input_tokens")[0])
        wait_for(lambda: tiny_server.metric("llm_requests_running") == 1)
        assert tiny_server.metric("llm_requests_waiting") == 0
        used = tiny_server.metric("llm_kv_pages_used")
        assert 1 <= used <= -(-(num_prompt_tokens + num_tokens) // 16)
        for _, error in stream.finish():
            assert error is None
    assert moved.pop("length") == 1
    assert moved.pop("llm_prompt_tokens_total") == num_prompt_tokens
    assert moved.pop("llm_generated_tokens_total") == num_tokens
    assert moved.pop("llm_time_to_first_token_seconds_count") == 1
    assert moved.pop("llm_queue_seconds_count") == 1
    assert moved.pop("llm_request_seconds_count") == 1
    assert moved.pop("llm_inter_token_seconds_count") == num_tokens - 1
    first_token = moved.pop("llm_time_to_first_token_seconds_sum")
    inter_token = moved.pop("llm_inter_token_seconds_sum")
    whole = moved.pop("llm_request_seconds_sum")
    assert moved.pop("llm_queue_seconds_sum", 0.0) <= first_token
    assert first_token >= 0.05, "the first step alone sleeps as long"
    assert inter_token >= 0.05 * (num_tokens - 1)
    assert whole == pytest.approx(first_token + inter_token, rel=0.1)
    assert not moved, "nothing else moves"


def test_a_prompt_with_the_same_beginning_is_taken_from_the_cache(tiny_server):
    prompt = [int(time.time()) % 40_000 + 5, *range(1000, 1079)]  # 80 tokens that no test has sent before
    assert generate(tiny_server, {"input_ids": prompt, "max_tokens": 1}).checked()
    with changes(tiny_server) as moved:
        assert generate(tiny_server, {"input_ids": prompt, "max_tokens": 1}).checked()
    assert moved["llm_prefix_cached_tokens_total"] == 64, (
        "at least one token is computed, so four of five pages"
    )
    assert moved["llm_prompt_tokens_total"] == 80
    assert tiny_server.metric("llm_kv_pages_cached") >= 5


def test_five_invalid_requests_count_as_such_and_as_nothing_else(tiny_server):
    with changes(tiny_server) as moved:
        for way in (generate, grpc_infer):
            for _ in range(5):
                assert way(tiny_server, {"text_input": "Hello", "top_p": 1.5}).error
    assert moved == {"invalid": 10}


def test_five_cancelled_requests_count_as_such(tiny_server):
    fields = {"text_input": SLOW + "Hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with changes(tiny_server) as moved:
        streams = [GrpcStream(tiny_server).send(fields) for _ in range(5)]
        for stream in streams:
            stream.next()
        for stream in streams:
            stream.close(cancel_requests=True)
    assert moved.pop("cancelled") == 5
    assert moved.pop("llm_request_seconds_count") == 5
    assert moved.pop("llm_time_to_first_token_seconds_count") == 5
    assert moved.pop("llm_queue_seconds_count") == 5
    assert moved["llm_generated_tokens_total"] == moved["llm_inter_token_seconds_count"] + 5
    assert not set(moved) & set(OUTCOMES)


def test_outcomes_of_whatever_ends_well(tiny_server):
    end = {"sampling_parameters": json.dumps({"logit_bias": {"2": 100}})}
    slow = {"text_input": SLOW + "Hello", "max_tokens": 2000, "ignore_eos": True, "timeout_ms": 600}
    with changes(tiny_server) as moved:
        at_once(
            [
                lambda: generate(tiny_server, {"text_input": "Hello", "max_tokens": 5, **end}).checked(),
                lambda: generate(tiny_server, {"text_input": "Hello", "max_tokens": 2, "ignore_eos": True}),
                lambda: generate(tiny_server, slow).checked(),
            ]
        )
    assert {name: moved.get(name) for name in OUTCOMES if name in moved} == {
        "stop": 1,
        "length": 1,
        "timeout": 1,
    }


def test_several_sequences_are_one_request(tiny_server):
    with changes(tiny_server) as moved:
        fields = {"text_input": "Hello there", "n": 3, "max_tokens": 5, "ignore_eos": True}
        assert generate(tiny_server, fields).checked()
    assert moved["length"] == moved["llm_request_seconds_count"] == 1
    assert moved["llm_time_to_first_token_seconds_count"] == moved["llm_queue_seconds_count"] == 1
    assert moved["llm_generated_tokens_total"] == 15
    assert moved["llm_inter_token_seconds_count"] == 12
    assert moved["llm_prompt_tokens_total"] == 2


def test_preemptions_are_counted(cramped_server):
    """Two requests that need the whole pool between them: one has to wait for the other's pages."""
    fields = {"text_input": SLOW + "Hello", "max_tokens": 64, "ignore_eos": True}
    with changes(cramped_server) as moved:
        for answer in at_once([lambda: generate(cramped_server, fields)] * 2):
            assert answer.checked()
    assert moved["llm_preemptions_total"] >= 1
    assert moved["llm_generated_tokens_total"] == 128
    assert moved["llm_inter_token_seconds_count"] == 126
    assert moved["length"] == moved["llm_queue_seconds_count"] == 2


def test_pool_gauges(cramped_server):
    kinds = {
        kind: cramped_server.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("tokens_per", "used", "max")
    }
    assert kinds == {"tokens_per": 16, "used": 0, "max": 8}
    assert cramped_server.metric("llm_kv_pages_total") == 8
    fields = {"text_input": SLOW + "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with GrpcStream(cramped_server) as stream:
        stream.send(fields).next()
        wait_for(lambda: cramped_server.metric("llm_kv_pages_used") >= 1)
        used = cramped_server.metric("llm_kv_pages_used")
        in_report = cramped_server.metric("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
        assert 1 <= used <= in_report + 1 <= 8


def test_load_report_in_the_answers_headers(tiny_server):
    """Triton makes it of the three gauges for whoever asks for it (ORCA), here in JSON."""
    with HttpRequest(tiny_server, "generate") as request:
        request.send({"text_input": "Hello", "max_tokens": 2}, {"endpoint-load-metrics-format": "json"})
        report = request.response.getheader("endpoint-load-metrics")
    if report is None:
        assert tiny_server.version() < (2, 57), "Tritons from there on send it"
        return
    assert report.startswith("JSON ")
    named = json.loads(report.removeprefix("JSON "))["named_metrics"]
    assert named["kv_cache_utilization"] == 0
    assert named["max_token_capacity"] == 16 * tiny_server.metric("llm_kv_pages_total")
