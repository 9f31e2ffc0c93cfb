"""Metrics: recorded in Python, published as differences, right after every kind of ending."""

from __future__ import annotations

import threading

import pytest
from serving_harness import MemoryMetrics, Serve, wait_until

from paged_engine.engine import EngineStatistics
from paged_engine.serving.metrics import Outcome, ServiceMetrics


def statistics(**values: int) -> EngineStatistics:
    return EngineStatistics(**{**dict.fromkeys(EngineStatistics.__dataclass_fields__, 0), **values})


def test_gauges_and_counters_are_brought_to_their_values() -> None:
    registry = MemoryMetrics()
    metrics = ServiceMetrics(registry, {"model": "llm"})
    for used, generated in ((5, 10), (3, 12), (0, 12)):
        metrics.publish(statistics(num_pages_used=used, num_generated_tokens=generated), used, 2 * used)
        assert registry.value("llm_kv_pages_used", model="llm") == used
        assert registry.value("llm_generated_tokens_total") == generated
        assert registry.value("llm_requests_running") == used
        assert registry.value("llm_requests_waiting") == 2 * used


def test_there_is_a_series_for_every_outcome_from_the_start() -> None:
    registry = MemoryMetrics()
    ServiceMetrics(registry, {})
    outcomes = {
        dict(labels).get("outcome") for name, labels in registry.values if name == "llm_requests_total"
    }
    assert outcomes == {outcome.value for outcome in Outcome}


def test_load_reports_have_their_three_series() -> None:
    registry = MemoryMetrics()
    metrics = ServiceMetrics(registry, {})
    metrics.publish(statistics(page_size=16, num_pages_used=3, num_pages_total=100), 0, 0)
    got = {
        kind: registry.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("tokens_per", "used", "max")
    }
    assert got == {"tokens_per": 16, "used": 3, "max": 100}


def test_observations_keep_number_and_sum() -> None:
    registry = MemoryMetrics()
    metrics = ServiceMetrics(registry, {})
    values = [0.004, 0.006, 0.02, 0.021, 7.0]
    metrics.record(metrics.inter_token_seconds, values)
    metrics.publish(statistics(), 0, 0)
    metrics.publish(statistics(), 0, 0)
    got = registry.observations["llm_inter_token_seconds"]
    assert len(got) == len(values)
    assert sum(got) == pytest.approx(sum(values))


def test_very_many_observations_are_thinned_out_evenly() -> None:
    registry = MemoryMetrics()
    metrics = ServiceMetrics(registry, {})
    metrics.record(metrics.inter_token_seconds, [0.002] * 30_000 + [0.2] * 10_000)
    metrics.publish(statistics(), 0, 0)
    got = registry.observations["llm_inter_token_seconds"]
    assert len(got) == pytest.approx(500, abs=2)
    assert sum(value > 0.1 for value in got) / len(got) == pytest.approx(0.25, abs=0.01)


def test_one_request_moves_the_metrics_by_the_right_amounts(serve: Serve) -> None:
    served = serve()
    served.model.pause_after(3)
    answer = served.ask("hello", stream=True, max_tokens=10)
    wait_until(lambda: served.metrics.value("llm_kv_pages_used") == 2)
    assert served.metrics.value("llm_requests_running") == 1
    served.model.go_on()
    answer.wait()
    served.assert_clean()
    observations = served.metrics.observations
    wait_until(lambda: len(observations["llm_request_seconds"]) == 1)
    assert len(observations["llm_time_to_first_token_seconds"]) == 1
    assert len(observations["llm_inter_token_seconds"]) == 9
    assert len(observations["llm_queue_seconds"]) == 1
    assert served.metrics.value("llm_prompt_tokens_total") == 5
    assert served.metrics.value("llm_generated_tokens_total") == 10
    assert served.metrics.value("llm_requests_total") == 1
    assert served.metrics.value("llm_requests_total", outcome="length") == 1
    assert observations["llm_queue_seconds"][0] <= observations["llm_time_to_first_token_seconds"][0]


def test_waiting_requests_are_counted_as_such(serve: Serve) -> None:
    served = serve(max_batch_size=1)
    served.model.pause_after(1)
    answers = [served.ask() for _ in range(4)]
    wait_until(lambda: served.metrics.value("llm_requests_running") == 1)
    assert served.metrics.value("llm_requests_waiting") == 3
    served.model.go_on()
    for answer in answers:
        answer.wait()
    served.assert_clean()


def test_invalid_and_cancelled_requests_are_counted_once_each(serve: Serve) -> None:
    served = serve()
    tokenized = threading.Event()
    served.tokenizer.before_encoding = lambda text: tokenized.wait()
    cancelled = [served.ask() for _ in range(5)]
    invalid = [served.ask(top_p=1.5) for _ in range(5)]
    for answer in cancelled:
        answer.is_cancelled = True
    for answer in [*cancelled, *invalid]:
        answer.wait()
    tokenized.set()
    served.assert_clean()
    wait_until(lambda: served.metrics.value("llm_requests_total") == 10)
    assert served.metrics.value("llm_requests_total", outcome="cancelled") == 5
    assert served.metrics.value("llm_requests_total", outcome="invalid") == 5
    assert served.metrics.observations["llm_request_seconds"] == []
