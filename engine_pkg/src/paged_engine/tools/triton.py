"""Finds a tritonserver, and runs one as a child process that never outlives its parent.

Two places have the server: NVIDIA's images, where it is on the PATH, and the package nvidia-pytriton, which carries a
server for machines without Docker. The latter needs three things put right: a backends folder with the Python stub
of the running interpreter, the interpreter's shared library on the loader's path, and the virtual environment first
on the PATH, since the stub embeds the `python3` it finds there.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paged_engine.tools.interpreter import libpython_folder
from paged_engine.tools.ports import Ports, ServerError
from paged_engine.tools.render_repository import render_repository, server_arguments
from paged_engine.tools.server_log import telling_lines

_POLL_S = 0.1
_KILL_WAIT_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class TritonProcess:
    """A tritonserver on a rendered copy of a model repository, in a process group of its own.

    The group is what makes it safe to stop: the server starts one stub process per model instance, and after
    ``close`` none of them is left, whatever state the server was in. It is also stopped when its parent dies.
    """

    def __init__(
        self,
        repository: Path,
        ports: Ports,
        log_file: Path,
        *,
        parameters: Mapping[str, str] | None = None,
        default_model: str | None = None,
        address: str = "127.0.0.1",
        exit_timeout_s: int = 600,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server; it is not ready yet.

        Args:
            repository: the model repository to serve a copy of.
            ports: where to listen.
            log_file: gets everything the server and its models print; overwritten.
            parameters: model parameters to set in the copy's config.pbtxt.
            default_model: the parameter ``model`` where nothing else sets it.
            address: the address to listen on; 0.0.0.0 for all.
            exit_timeout_s: how long the server waits for requests in flight when told to stop, in seconds.
            arguments: further arguments for tritonserver; they win.
            environment: variables to add to those of this process.

        Raises:
            ServerError: no tritonserver is installed, or a port is taken.
            RepositoryError: the repository or the parameters are wrong.
        """
        binary, backends = _find_server()
        ports.check_free(address)
        self.ports = ports
        self.log_file = log_file
        self.host = "127.0.0.1" if address == "0.0.0.0" else address
        self._closed = False
        self._folder = Path(tempfile.mkdtemp(prefix="triton-"))
        self.shared_memory_prefix = f"triton_{self._folder.name}_"
        try:
            self.repository = self._folder / "model_repository"
            self.model_name = render_repository(repository, self.repository, parameters, default_model)
            command = [
                str(binary),
                f"--model-repository={self.repository}",
                f"--http-address={address}",
                f"--http-port={ports.http}",
                f"--grpc-address={address}",
                f"--grpc-port={ports.grpc}",
                f"--metrics-address={address}",
                f"--metrics-port={ports.metrics}",
                f"--exit-timeout-secs={exit_timeout_s}",
                f"--backend-config=python,shm-region-prefix-name={self.shared_memory_prefix}",
            ]
            if backends is not None:
                command.append(f"--backend-directory={_link_backends(backends, self._folder / 'backends')}")
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, *arguments, *server_arguments(self.repository)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**_server_environment(), **(environment or {})},
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """Process id of tritonserver, which is also the id of its process group."""
        return self._process.pid

    def log_text(self) -> str:
        """Everything the server and its models have printed so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def exit_code(self) -> int | None:
        """How the server ended: None while it runs, negative for a signal."""
        return self._process.poll()

    def is_model_ready(self) -> bool:
        """Whether the server is up and says that its model takes requests."""
        return all(
            answers_ok(self.host, self.ports.http, path)
            for path in ("/v2/health/ready", f"/v2/models/{self.model_name}/ready")
        )

    def wait_ready(
        self,
        timeout_s: float,
        *,
        model: bool = True,
        on_poll: Callable[[float], None] = lambda elapsed_s: None,
    ) -> None:
        """Return once the server answers, and its model is ready.

        Args:
            timeout_s: how long that may take, in seconds.
            model: False to wait for the server alone, where models are loaded on request.
            on_poll: called with the seconds waited so far, several times a second; what it raises ends the wait.

        Raises:
            ServerError: the server ended, or was not ready in time; with the end of its log.
        """
        started = time.monotonic()
        while True:
            code = self.exit_code()
            if code is not None:
                raise ServerError(f"the server ended with exit code {code} while starting\n{self.log_tail()}")
            up = self.is_model_ready() if model else self._is_live()
            if up:
                return
            elapsed = time.monotonic() - started
            if elapsed > timeout_s:
                raise ServerError(f"the server was not ready after {timeout_s:.0f} s\n{self.log_tail()}")
            on_poll(elapsed)
            time.sleep(_POLL_S)

    def log_tail(self) -> str:
        """The part of the log that tells why something failed."""
        return "\n".join([f"--- from {self.log_file} ---", *telling_lines(self.log_text()), "---"])

    def send_signal(self, signal_number: int) -> None:
        """Send a signal to tritonserver alone; on SIGTERM it lets requests in flight finish."""
        self._process.send_signal(signal_number)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for tritonserver to end and return its exit code; subprocess.TimeoutExpired if it does not."""
        return self._process.wait(timeout_s)

    def group_pids(self) -> list[int]:
        """Process ids of the server's group that are alive: tritonserver and its stubs."""
        return [pid for pid in _all_pids() if _session_of(pid) == self.pid]

    def close(self) -> None:
        """End the whole process group at once, stubs included, and remove the temporary files. May be repeated."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _KILL_WAIT_S
        while (pids := self.group_pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        self._process.wait(_KILL_WAIT_S)
        for region in Path("/dev/shm").glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_live(self) -> bool:
        return answers_ok(self.host, self.ports.http, "/v2/health/live")


def answers_ok(host: str, port: int, path: str) -> bool:
    """Whether an HTTP GET is answered with 200. Proxies of the environment are not asked."""
    return _get(host, port, path) is not None


def served_parameters(host: str, port: int, model_name: str) -> dict[str, str]:
    """The parameters of a model that a server is serving, as its config.pbtxt has them; none where it does not tell."""
    try:
        config = json.loads(_get(host, port, f"/v2/models/{model_name}/config") or "{}")
        return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    except ValueError:
        return {}


def _get(host: str, port: int, path: str) -> bytes | None:
    """The body of an answer with status 200; None for any other, or none."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _find_server() -> tuple[Path, Path | None]:
    """The tritonserver to run, and its backends folder if that has to be prepared: the one on the PATH goes first."""
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Path(on_path), None
    package = importlib.util.find_spec("pytriton")
    if package is None or package.origin is None:
        raise ServerError(
            "there is no tritonserver on the PATH, and nvidia-pytriton is not installed: ./build.sh setup"
        )
    root = Path(package.origin).parent / "tritonserver"
    return root / "bin" / "tritonserver", root / "backends"


def _link_backends(backends: Path, target: Path) -> Path:
    """Make a backends folder out of links to the package's Python backend and the stub of this interpreter."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = backends.parent / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServerError(f"nvidia-pytriton has no Python stub for Python {version}")
    folder = target / "python"
    shutil.copytree(
        backends / "python",
        folder,
        copy_function=os.symlink,
        ignore=shutil.ignore_patterns(stub.name, "__pycache__"),
    )
    (folder / stub.name).symlink_to(stub)
    return target


def _server_environment() -> dict[str, str]:
    """This process's environment, changed so that the stub embeds this process's interpreter and packages."""
    environment = dict(os.environ)
    folders = {"PATH": str(Path(sys.executable).parent), "LD_LIBRARY_PATH": libpython_folder()}
    for variable, folder in folders.items():
        if folder:
            environment[variable] = os.pathsep.join(filter(None, (folder, environment.get(variable))))
    if sys.prefix != sys.base_prefix:
        environment["VIRTUAL_ENV"] = sys.prefix
    environment.pop("PYTHONHOME", None)
    return environment


def die_with_parent() -> Callable[[], None]:
    """A function for the new process to run: the kernel shall send it SIGTERM when this process is gone."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _all_pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def _session_of(pid: int) -> int | None:
    """The session a living process belongs to; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, _parent, _group, session = stat.rpartition(")")[2].split()[:4]
    return None if state == "Z" else int(session)
