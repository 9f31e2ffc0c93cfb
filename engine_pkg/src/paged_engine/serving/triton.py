"""Triton's Python API behind the service's own interfaces; besides model.py the only place that knows it."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from paged_engine.config import EngineConfig
from paged_engine.serving.metrics import ServiceMetrics
from paged_engine.serving.outputs import Response
from paged_engine.serving.sources import RawRequest
from paged_engine.serving.turn import Turn

logger = logging.getLogger(__name__)

_BACKEND_PARAMETERS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
"""Keys of config.pbtxt's `parameters` that belong to Triton's Python backend."""


def read_config(arguments: Mapping[str, str]) -> EngineConfig:
    """The configuration in what Triton passes to `initialize`.

    An instance that Triton has placed on a GPU (KIND_GPU) runs there, unless the parameter `device` names another place.

    Raises:
        ConfigurationError: names the key, its value and what is allowed.
    """
    parameters = json.loads(arguments["model_config"]).get("parameters", {})
    config = EngineConfig.from_parameters(
        {key: value["string_value"] for key, value in parameters.items() if key not in _BACKEND_PARAMETERS}
    )
    if config.device in ("auto", "cuda") and arguments["model_instance_kind"] == "GPU":
        return config.model_copy(update={"device": f"cuda:{arguments['model_instance_device_id']}"})
    return config


def open_metrics(arguments: Mapping[str, str]) -> ServiceMetrics:
    """The metrics of the instance that `initialize` was called for; they go nowhere on a server without metrics."""
    labels = _metric_labels(arguments)
    registry = TritonMetrics(Turn(f"metrics {json.dumps(labels, sort_keys=True)}"))
    metrics = ServiceMetrics(registry, labels)
    registry.open()
    return metrics


def _metric_labels(arguments: Mapping[str, str]) -> dict[str, str]:
    """Model, version, and the instance's name where there are several."""
    labels = {"model": arguments["model_name"], "version": arguments["model_version"]}
    groups = json.loads(arguments["model_config"]).get("instance_group", [])
    num_instances = sum(group.get("count", 1) * max(1, len(group.get("gpus", []))) for group in groups)
    if num_instances > 1:
        labels["instance"] = arguments["model_instance_name"]
    return labels


def read_request(request: Any) -> RawRequest:
    """Copy what a request holds: its arrays are views of shared memory that is gone after `execute`."""
    return RawRequest(
        tensors={tensor.name(): _elements(tensor.as_numpy()) for tensor in request.inputs()},
        parameters=request.parameters() or "{}",
    )


def _elements(tensor: Any) -> Sequence[Any]:
    flat = tensor.reshape(-1)
    if flat.dtype == np.float32:
        # 0.1 shall mean the same as a tensor and in JSON, and read the same in an error.
        return [float(str(value)) for value in flat]
    if flat.dtype == np.int32:
        # A prompt of token ids may wait for long; a list takes nine times as much memory.
        return array("i", flat.tobytes())
    elements: list[Any] = flat.tolist()
    return elements


class TritonResponder:
    """Responder over the response sender of one request."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._tensors: dict[str, tuple[npt.NDArray[Any], Any]] = {}
        """The last response's, each with the array it was made of: it stays in shared memory and can be sent again."""

    def prepare(self, response: Response) -> Callable[[], None]:
        """See `Responder.prepare`."""
        self._tensors = {name: self._tensor(name, array) for name, array in response.tensors.items()}
        message = pb_utils.InferenceResponse(
            output_tensors=[tensor for _, tensor in self._tensors.values()],
            error=None if response.error is None else _triton_error(response.error),
        )
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if response.is_final else 0
        return partial(self._sender.send, message, flags=flags)

    def cancelled(self) -> bool:
        """See `Responder.cancelled`."""
        return bool(self._sender.is_cancelled())

    def _tensor(self, name: str, array: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Any]:
        before = self._tensors.get(name)
        if before is not None and before[0] is array:
            return before
        return array, pb_utils.Tensor(name, array)


def _triton_error(error: Any) -> Any:
    return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, error.code.value))


class TritonMetrics:
    """MetricsRegistry over Triton's /metrics.

    When a model is loaded again, Triton starts the new instance before it ends the old one. Series of the same name and
    labels are one object for both then, which Triton frees as soon as one of the two lets go of it; the server crashes
    when the other uses it. So series are made only when the predecessor has ended, and values wait until then.
    """

    def __init__(self, turn: Turn) -> None:
        """
        Args:
            turn: the right to have these series in this server.
        """
        self._turn = turn
        self._families: dict[str, Any] = {}
        self._series: list[_TritonSeries] = []
        self._is_open = False
        self._is_supported = True

    def open(self) -> bool:
        """See `MetricsRegistry.open`."""
        if not self._is_open and self._is_supported and self._turn.take():
            try:
                for series in self._series:
                    self._create(series)
                self._is_open = True
            except pb_utils.TritonModelException as error:
                if "not supported" not in str(error):
                    raise
                logger.info("no metrics: %s", error)
                self._is_supported = False
        return self._is_open

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> _TritonSeries:
        """See `MetricsRegistry.counter`."""
        return self._add("COUNTER", name, description, labels)

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> _TritonSeries:
        """See `MetricsRegistry.gauge`."""
        return self._add("GAUGE", name, description, labels)

    def histogram(
        self, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> _TritonSeries:
        """See `MetricsRegistry.histogram`."""
        return self._add("HISTOGRAM", name, description, labels, buckets=list(buckets))

    def close(self) -> None:
        """See `MetricsRegistry.close`; series go before their families, as Triton asks."""
        for series in self._series:
            series.metric = None
        self._series.clear()
        self._families.clear()
        self._is_open = self._is_supported = False
        self._turn.give_back()

    def _add(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], **more: Any
    ) -> _TritonSeries:
        series = _TritonSeries(kind, name, description, {"labels": dict(labels), **more})
        self._series.append(series)
        return series

    def _create(self, series: _TritonSeries) -> None:
        if series.name not in self._families:
            self._families[series.name] = pb_utils.MetricFamily(
                name=series.name,
                description=series.description,
                kind=getattr(pb_utils.MetricFamily, series.kind),
            )
        series.metric = self._families[series.name].Metric(**series.arguments)


class _TritonSeries:
    """One series of any kind."""

    def __init__(self, kind: str, name: str, description: str, arguments: Mapping[str, Any]) -> None:
        self.kind = kind
        self.name = name
        self.description = description
        self.arguments = arguments
        self.metric: Any = None
        """Triton's, while the registry is open."""

    def increment(self, difference: float) -> None:
        """See `Adjustable.increment`."""
        self.metric.increment(difference)

    def observe(self, value: float) -> None:
        """See `Observable.observe`."""
        self.metric.observe(value)


class TritonLogHandler(logging.Handler):
    """Sends Python's log records to the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record at Triton's nearest level."""
        message = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(message)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(message)
        else:
            pb_utils.Logger.log_info(message)
