"""What is read from Triton's arguments and requests; a real server tells the rest (tests/server)."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving_harness import MemoryMetrics

from paged_engine.engine import EngineStatistics
from paged_engine.errors import ConfigurationError


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, which can only be imported where Triton's own is."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", ModuleType("triton_python_backend_utils"))
    monkeypatch.delitem(sys.modules, "paged_engine.serving.triton", raising=False)
    from paged_engine.serving import triton

    return triton


def arguments(parameters: dict[str, str], kind: str = "CPU", **model_config: Any) -> dict[str, str]:
    written = {key: {"string_value": value} for key, value in parameters.items()}
    return {
        "model_config": json.dumps({"parameters": written, **model_config}),
        "model_instance_kind": kind,
        "model_instance_device_id": "1",
        "model_instance_name": "llm_0_1",
        "model_name": "llm",
        "model_version": "3",
    }


def test_parameters_of_the_python_backend_are_not_ours(triton: ModuleType) -> None:
    config = triton.read_config(
        arguments({"model": "x", "page_size": "32", "EXECUTION_ENV_PATH": "y", "max_batch_size": "${UNSET}"})
    )
    assert (config.page_size, config.max_batch_size) == (32, 64)
    with pytest.raises(ConfigurationError, match="chunk_sze"):
        triton.read_config(arguments({"model": "x", "chunk_sze": "1"}))


@pytest.mark.parametrize(
    ("kind", "device", "effective"),
    [
        ("GPU", "auto", "cuda:1"),
        ("GPU", "cuda", "cuda:1"),
        ("GPU", "cuda:3", "cuda:3"),
        ("GPU", "cpu", "cpu"),
        ("CPU", "auto", "auto"),
        ("MODEL", "auto", "auto"),
    ],
)
def test_an_instance_placed_on_a_gpu_runs_there(
    triton: ModuleType, kind: str, device: str, effective: str
) -> None:
    assert triton.read_config(arguments({"model": "x", "device": device}, kind)).device == effective


def test_requests_are_copied_out_of_shared_memory(triton: ModuleType) -> None:
    shared = {
        "text_input": np.array([b"\xffhi"], dtype=np.object_),
        "temperature": np.array([0.1], np.float32),
        "top_p": np.array([np.nan], np.float32),
        "seed": np.array([2**64 - 1], np.uint64),
        "input_ids": np.array([], np.int32),
        "stream": np.array([True]),
    }

    def tensor(name: str, array: Any) -> Any:
        return SimpleNamespace(name=lambda: name, as_numpy=lambda: array)

    inputs = [tensor(name, array) for name, array in shared.items()]
    raw = triton.read_request(SimpleNamespace(inputs=lambda: inputs, parameters=lambda: ""))
    assert raw.tensors["text_input"] == [b"\xffhi"]
    assert raw.tensors["temperature"] == [0.1]
    assert str(raw.tensors["top_p"]) == "[nan]"
    assert raw.tensors["seed"] == [2**64 - 1]
    assert list(raw.tensors["input_ids"]) == []
    assert raw.tensors["stream"] == [True]
    assert raw.parameters == "{}"


def test_token_ids_take_the_memory_that_is_counted_for_them(triton: ModuleType) -> None:
    shared = np.arange(100_000, 101_000, dtype=np.int32)
    tensor = SimpleNamespace(name=lambda: "input_ids", as_numpy=lambda: shared)
    raw = triton.read_request(SimpleNamespace(inputs=lambda: [tensor], parameters=lambda: ""))
    token_ids = raw.tensors["input_ids"]
    shared[:] = 0
    assert list(token_ids) == list(range(100_000, 101_000))
    assert 4000 <= raw.num_bytes <= sys.getsizeof(token_ids) < 5000


def test_a_server_built_without_metrics_serves_all_the_same(
    triton: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TritonModelException(Exception):
        pass

    class MetricFamily:
        COUNTER = GAUGE = HISTOGRAM = 0

        def __init__(self, **arguments: Any) -> None:
            raise TritonModelException("metrics not supported")

    monkeypatch.setattr(triton.pb_utils, "TritonModelException", TritonModelException, raising=False)
    monkeypatch.setattr(triton.pb_utils, "MetricFamily", MetricFamily, raising=False)
    metrics = triton.open_metrics(arguments({"model": "x"}))
    metrics.record(metrics.queue_seconds, [1.0])
    metrics.publish(EngineStatistics(*range(10)), 1, 2)
    metrics.close()


def test_series_are_not_shared_with_an_instance_that_is_being_replaced(
    triton: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton loads the new instance first, and would free shared series when the old one lets go of them."""
    made: list[tuple[str, list[float]]] = []

    class MetricFamily:
        COUNTER = GAUGE = HISTOGRAM = 0

        def __init__(self, name: str, **arguments: Any) -> None:
            self.name = name

        def Metric(self, **arguments: Any) -> Any:
            values: list[float] = []
            made.append((self.name, values))
            return SimpleNamespace(increment=values.append, observe=values.append)

    monkeypatch.setattr(triton.pb_utils, "MetricFamily", MetricFamily, raising=False)
    old = triton.open_metrics(arguments({"model": "x"}))
    num_series = len(made)
    assert num_series > 0
    other_version = triton.open_metrics({**arguments({"model": "x"}), "model_version": "4"})
    assert len(made) == 2 * num_series
    new = triton.open_metrics(arguments({"model": "x"}))
    new.record(new.queue_seconds, [1.0])
    new.publish(EngineStatistics(*range(10)), 1, 2)
    assert len(made) == 2 * num_series
    old.close()
    new.publish(EngineStatistics(*range(10)), 1, 2)
    assert len(made) == 3 * num_series
    values = dict(made[2 * num_series :])
    assert values["llm_queue_seconds"] == [1.0]
    assert values["llm_requests_waiting"] == [2]
    new.close()
    other_version.close()


def test_the_instance_is_a_label_where_there_are_several(
    triton: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = MemoryMetrics()
    monkeypatch.setattr(triton, "TritonMetrics", lambda turn: registry)

    def instance_labels(groups: list[dict[str, Any]]) -> set[str | None]:
        registry.values.clear()
        triton.open_metrics(arguments({"model": "x"}, instance_group=groups))
        return {dict(labels).get("instance") for _, labels in registry.values}

    assert instance_labels([{"count": 1, "kind": "KIND_MODEL"}]) == {None}
    assert instance_labels([{"count": 2}]) == {"llm_0_1"}
    assert instance_labels([{"count": 1, "gpus": [0, 1]}]) == {"llm_0_1"}
    assert registry.value("llm_requests_total", model="llm", version="3") == 0


def test_only_what_has_changed_since_the_response_before_is_made_again(
    triton: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of another response, of another array or of the response before last is never sent instead."""
    sent: list[dict[str, tuple[Any, list[int]]]] = []
    monkeypatch.setattr(
        triton.pb_utils,
        "Tensor",
        lambda name, array: SimpleNamespace(name=name, array=array.copy()),
        raising=False,
    )
    monkeypatch.setattr(
        triton.pb_utils, "InferenceResponse", lambda output_tensors, error: output_tensors, raising=False
    )
    sender = SimpleNamespace(
        send=lambda tensors, flags: sent.append({each.name: (each, each.array.tolist()) for each in tensors})
    )
    responder = triton.TritonResponder(sender)
    kept, once = np.array([7]), np.array([1])
    for tensors in (
        {"a": kept, "b": once},
        {"a": kept, "b": np.array([2])},
        {"b": once},
        {"a": kept, "b": once},
    ):
        responder.prepare(triton.Response(tensors))()
    assert [{name: content for name, (_, content) in each.items()} for each in sent] == [
        {"a": [7], "b": [1]},
        {"a": [7], "b": [2]},
        {"b": [1]},
        {"a": [7], "b": [1]},
    ]
    first, second, third, fourth = sent
    assert first["a"][0] is second["a"][0]
    assert third["b"][0] is fourth["b"][0]
    assert len({id(each["b"][0]) for each in (first, second, third)}) == 3
