"""A real tritonserver for tests: started on free ports with a temporary model repository, watched, and always ended."""

from __future__ import annotations

import http.client
import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from paged_engine.tools.ports import Ports
from paged_engine.tools.render_repository import set_parameters
from paged_engine.tools.triton import TritonProcess

REPOSITORY = Path(__file__).parents[2] / "model_repository"
EXIT_TIMEOUT_S = 60
READY_TIMEOUT_S = 180.0
_POLL_S = 0.05
_SETTLED_S = 0.3
"""How long the pool must look clean: longer than the model takes to publish its metrics once more."""
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RepositoryApiError(Exception):
    """Triton refused to load or unload a model; the message is its own."""


@dataclass(frozen=True)
class Sample:
    """One line of Prometheus' text format."""

    name: str
    labels: Mapping[str, str]
    value: float


class TritonServer:
    """A tritonserver serving ``model_repository`` with the parameters a test needs.

    Attributes:
        model_name: the model's name on the server.
        model: the checkpoint it serves.
        process: the server's process, for what is not forwarded here.
    """

    def __init__(
        self,
        work_dir: Path,
        model: Path | str,
        parameters: Mapping[str, Any] | None = None,
        *,
        explicit: bool = False,
        repository: Path = REPOSITORY,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server. Call `wait_ready` before using it, and `close` (or leave the `with` block) in the end.

        Args:
            work_dir: an empty folder for the log.
            model: checkpoint to serve.
            parameters: model parameters; values are written as Triton wants them (True becomes "true").
            explicit: start without the model, to `load` and `unload` it by request.
            repository: the model repository to serve a copy of.
            arguments: further arguments for tritonserver.
            environment: variables for the server and the model, besides those of this process.
        """
        self.model = str(model)
        self._explicit = explicit
        self.process = TritonProcess(
            repository,
            Ports.free(),
            work_dir / "triton.log",
            parameters=self._as_strings(parameters),
            exit_timeout_s=EXIT_TIMEOUT_S,
            arguments=[*(["--model-control-mode=explicit"] if explicit else []), *arguments],
            environment=environment,
        )
        self.model_name = self.process.model_name

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def http_url(self) -> str:
        """``host:port`` of the HTTP endpoint, the form tritonclient wants; put http:// before it for the others."""
        return f"{self.process.host}:{self.process.ports.http}"

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the gRPC endpoint."""
        return f"{self.process.host}:{self.process.ports.grpc}"

    @property
    def pid(self) -> int:
        """Process id of tritonserver."""
        return self.process.pid

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> TritonServer:
        """Return once requests can be sent (or, started with ``explicit``, models can be loaded)."""
        self.process.wait_ready(timeout_s, model=not self._explicit)
        return self

    def is_running(self) -> bool:
        """Whether tritonserver has not ended."""
        return self.process.exit_code() is None

    def is_model_ready(self) -> bool:
        """Whether the server says that the model takes requests."""
        return self.process.is_model_ready()

    def log_text(self) -> str:
        """Everything the server and the model have printed so far."""
        return self.process.log_text()

    def stub_pids(self) -> list[int]:
        """Process ids of the Python backend's stubs that are alive, one for each model instance."""
        return [pid for pid in self.process.group_pids() if pid != self.pid]

    def memory_bytes(self) -> int:
        """Resident memory of the server and its stubs together."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.process.group_pids())

    def shared_memory_bytes(self) -> int:
        """Size of the regions in /dev/shm between the server and its stubs."""
        return sum(file.stat().st_size for file in self.shared_memory_files())

    def shared_memory_files(self) -> list[Path]:
        """The regions in /dev/shm between the server and its stubs."""
        return sorted(Path("/dev/shm").glob(f"{self.process.shared_memory_prefix}*"))

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to tritonserver."""
        self.process.send_signal(signal_number)

    def wait(self, timeout_s: float = EXIT_TIMEOUT_S + 30.0) -> int:
        """Wait for tritonserver to end and return its exit code; subprocess.TimeoutExpired if it does not."""
        return self.process.wait(timeout_s)

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = EXIT_TIMEOUT_S + 30.0) -> int:
        """Send a signal, wait for tritonserver to end, and return its exit code. Its stubs are left as they are."""
        self.send_signal(signal_number)
        return self.wait(timeout_s)

    def close(self) -> None:
        """End what is still running, at once."""
        self.process.close()

    def load(self, parameters: Mapping[str, Any] | None = None) -> None:
        """Load the model, or load it again; with ``parameters``, change those in its config.pbtxt first.

        Raises:
            RepositoryApiError: the load failed.
        """
        set_parameters(self.process.repository / self.model_name, self._as_strings(parameters))
        self._repository_api("load")

    def unload(self) -> None:
        """Unload the model and return when its stub is gone; AssertionError if it does not go."""
        self._repository_api("unload")
        self.wait_for_stubs(0)

    def wait_for_stubs(self, count: int, timeout_s: float = 60.0) -> None:
        """Return when so many stubs are alive: a reload ends the old one only after the new one is up."""
        deadline = time.monotonic() + timeout_s
        while len(self.stub_pids()) != count:
            assert time.monotonic() < deadline, f"{count} stubs expected, there are {self.stub_pids()}"
            time.sleep(_POLL_S)

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 120.0
    ) -> tuple[int, bytes]:
        """Send one HTTP request, ``body`` as JSON, and return status and body of the answer."""
        return _request(self.process.ports.http, method, path, body, timeout_s)

    def version(self) -> tuple[int, ...]:
        """Triton's version: (2, 51, 0)."""
        return tuple(
            int(number) for number in json.loads(self.request("GET", "/v2")[1])["version"].split(".")
        )

    def metrics(self) -> list[Sample]:
        """What the metrics page shows now."""
        status, page = _request(self.process.ports.metrics, "GET", "/metrics", None, 30.0)
        assert status == 200, f"the metrics page answered {status}"
        matches = (_SAMPLE.match(line) for line in page.decode().splitlines())
        return [
            Sample(match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"]))
            for match in matches
            if match
        ]

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples of that name that have these labels; KeyError if there is none."""
        values = [s.value for s in self.metrics() if s.name == name and labels.items() <= s.labels.items()]
        if not values:
            raise KeyError(f"no metric {name} {labels}")
        return sum(values)

    def wait_pool_clean(self, timeout_s: float = 20.0) -> None:
        """Return when no page is held and no request is running or waiting, and that stays so.

        Raises:
            AssertionError: that did not come to pass; the message has the figures.
        """
        names = {"llm_kv_pages_used", "llm_requests_running", "llm_requests_waiting"}
        deadline = time.monotonic() + timeout_s
        clean_since: float | None = None
        while True:
            figures = {s.name: s.value for s in self.metrics() if s.name in names}
            assert figures.keys() == names, "the model publishes no metrics"
            now = time.monotonic()
            if any(figures.values()):
                clean_since = None
            elif clean_since is None:
                clean_since = now
            elif now - clean_since >= _SETTLED_S:
                return
            assert now < deadline or clean_since is not None, (
                f"the pool is not clean after {timeout_s} s: {figures}"
            )
            time.sleep(_POLL_S)

    def _repository_api(self, action: str) -> None:
        status, body = self.request("POST", f"/v2/repository/models/{self.model_name}/{action}", {})
        if status != 200:
            raise RepositoryApiError(json.loads(body).get("error", body.decode()))

    def _as_strings(self, parameters: Mapping[str, Any] | None) -> dict[str, str]:
        """Parameters as config.pbtxt has them, with the model of this server unless they name another."""
        named = {"model": self.model, **(parameters or {})}
        return {
            key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in named.items()
        }


def _request(port: int, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
