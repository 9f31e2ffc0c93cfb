"""The metrics of one model instance: recorded by any thread in plain Python, published now and then in one go.

A call into Triton's metrics is a message to another process, so nothing is sent where it happens. Gauges, too, are sent
as differences: instances that share labels then add up, and unlike `set` an increment lets other threads run meanwhile.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paged_engine.engine import EngineStatistics

_MAX_OBSERVATIONS_PER_PUBLICATION = 500
"""Of one histogram. Triton takes values one by one; beyond this they are thinned out evenly, keeping shape and mean."""

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Outcome(str, Enum):
    """How a request ended; every request, once."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    """Its deadline passed while text was being made."""
    CANCELLED = "cancelled"
    INVALID = "invalid"
    UNAVAILABLE = "unavailable"
    """Queue full, deadline passed in the queue, engine down or stopping."""
    ERROR = "error"


class Adjustable(Protocol):
    """One series of a counter or a gauge."""

    def increment(self, difference: float) -> None:
        """Add to its value."""


class Observable(Protocol):
    """One series of a histogram."""

    def observe(self, value: float) -> None:
        """Count one value."""


class MetricsRegistry(Protocol):
    """Where metrics are published. Series may be asked for at any time, and used while it is open."""

    def open(self) -> bool:
        """Whether values can be published now; where not, what is to be published is kept, and this asked again."""

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> Adjustable:
        """A series that only grows."""

    def gauge(self, name: str, description: str, labels: Mapping[str, str]) -> Adjustable:
        """A series that goes up and down."""

    def histogram(
        self, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Observable:
        """A distribution over buckets, given by their upper bounds."""

    def close(self) -> None:
        """Take all series away again."""


class _Level:
    """A series brought to a value by increments."""

    def __init__(self, series: Adjustable) -> None:
        self._series = series
        self._published = 0.0

    def set(self, value: float) -> None:
        """Publish the difference to what was published last, if there is one."""
        if value != self._published:
            self._series.increment(value - self._published)
            self._published = value


class Histogram:
    """Values not yet published, by bucket; memory does not grow with their number."""

    def __init__(self, series: Observable, bounds: Sequence[float]) -> None:
        self._series = series
        self._bounds = bounds
        self._clear()

    def record(self, value: float) -> None:
        """Keep one value."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self._sums[bucket] += value

    def take(self) -> list[float]:
        """The values to publish: for each bucket its mean, as often as there were values. Forgets them."""
        total = sum(self._counts)
        share = min(1.0, _MAX_OBSERVATIONS_PER_PUBLICATION / total) if total else 0.0
        values = []
        for count, amount in zip(self._counts, self._sums, strict=True):
            values += [amount / count] * max(1, round(count * share)) if count else []
        self._clear()
        return values

    def publish(self, values: Iterable[float]) -> None:
        """Send values."""
        for value in values:
            self._series.observe(value)

    def _clear(self) -> None:
        self._counts = [0] * (len(self._bounds) + 1)
        self._sums = [0.0] * (len(self._bounds) + 1)


class ServiceMetrics:
    """All families of one model instance."""

    def __init__(self, registry: MetricsRegistry, labels: Mapping[str, str]) -> None:
        """
        Args:
            registry: where to publish.
            labels: of every series: model, version, and instance where there are several.
        """
        self._registry = registry
        self._lock = threading.Lock()
        self._num_requests = dict.fromkeys(Outcome, 0)

        def gauge(name: str, description: str, **more: str) -> _Level:
            return _Level(registry.gauge(name, description, {**labels, **more}))

        def counter(name: str, description: str, **more: str) -> _Level:
            return _Level(registry.counter(name, description, {**labels, **more}))

        def histogram(name: str, description: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(registry.histogram(name, description, labels, bounds), bounds)

        self._running = gauge(
            "llm_requests_running", "Requests that a step has worked on, and that have not ended"
        )
        self._waiting = gauge("llm_requests_waiting", "Requests taken in that no step has worked on yet")
        self._pages_total = gauge("llm_kv_pages_total", "Pages of the KV cache")
        self._pages_used = gauge("llm_kv_pages_used", "Pages held by sequences")
        self._pages_cached = gauge(
            "llm_kv_pages_cached", "Free pages whose content the prefix cache remembers"
        )
        self._prompt_tokens = counter(
            "llm_prompt_tokens_total", "Prompt tokens of requests handed to the engine"
        )
        self._generated_tokens = counter("llm_generated_tokens_total", "Tokens generated")
        self._prefix_cached_tokens = counter(
            "llm_prefix_cached_tokens_total", "Prompt tokens whose pages came from the prefix cache"
        )
        self._preemptions = counter(
            "llm_preemptions_total", "Sequences sent back to the queue for want of pages"
        )
        self._requests = {
            outcome: counter("llm_requests_total", "Requests answered, by outcome", outcome=outcome.value)
            for outcome in Outcome
        }
        self._blocks = {
            kind: gauge(
                "nv_trt_llm_kv_cache_block_metrics",
                "Pages of the KV cache, for load reports",
                kv_cache_block_type=kind,
            )
            for kind in ("tokens_per", "used", "max")
        }
        self.first_token_seconds = histogram(
            "llm_time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token_seconds = histogram(
            "llm_inter_token_seconds", "Between one token of a sequence and the next", _INTER_TOKEN_BUCKETS
        )
        self.queue_seconds = histogram("llm_queue_seconds", "From arrival to the first step", _QUEUE_BUCKETS)
        self.request_seconds = histogram(
            "llm_request_seconds",
            "From arrival to the end, of requests a step has worked on",
            _REQUEST_BUCKETS,
        )
        self._histograms = (
            self.first_token_seconds,
            self.inter_token_seconds,
            self.queue_seconds,
            self.request_seconds,
        )

    def count_request(self, outcome: Outcome) -> None:
        """Count one answered request."""
        with self._lock:
            self._num_requests[outcome] += 1

    def record(self, histogram: Histogram, values: Iterable[float]) -> None:
        """Keep values, in seconds, for one of the histograms of this object."""
        with self._lock:
            for value in values:
                histogram.record(value)

    def publish(self, statistics: EngineStatistics, num_running: int, num_waiting: int) -> None:
        """Send what has changed since the last time. One thread at a time."""
        if not self._registry.open():
            return
        with self._lock:
            num_requests = dict(self._num_requests)
            observations = [histogram.take() for histogram in self._histograms]
        self._running.set(num_running)
        self._waiting.set(num_waiting)
        self._pages_total.set(statistics.num_pages_total)
        self._pages_used.set(statistics.num_pages_used)
        self._pages_cached.set(statistics.num_pages_cached)
        self._prompt_tokens.set(statistics.num_prompt_tokens)
        self._generated_tokens.set(statistics.num_generated_tokens)
        self._prefix_cached_tokens.set(statistics.num_prefix_cached_tokens)
        self._preemptions.set(statistics.num_preemptions)
        self._blocks["tokens_per"].set(statistics.page_size)
        self._blocks["used"].set(statistics.num_pages_used)
        self._blocks["max"].set(statistics.num_pages_total)
        for outcome, number in num_requests.items():
            self._requests[outcome].set(number)
        for histogram, values in zip(self._histograms, observations, strict=True):
            histogram.publish(values)

    def close(self) -> None:
        """Take all series away; nothing may be published any more."""
        self._registry.close()
