"""Gets NVIDIA's perf_analyzer: from the PATH, or out of a package, without installing that package.

The package perf-analyzer needs glibc 2.38. On older systems an older build does, which the client library's packages
carried up to version 2.50; the two libraries it misses are among those that nvidia-pytriton brings along.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_NEW = ("perf-analyzer==2.60.0", (2, 38))
_OLD = "tritonclient==2.50.0"
_BINARY = "perf_analyzer"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


class PerfAnalyzerError(RuntimeError):
    """perf_analyzer cannot be had, or has failed; the message says why."""


def find_perf_analyzer(cache_dir: Path) -> tuple[Path, dict[str, str]]:
    """Return the binary, fetched into ``cache_dir`` the first time, and the environment to run it in.

    Raises:
        PerfAnalyzerError: it is not on the PATH and cannot be fetched.
    """
    on_path = shutil.which(_BINARY)
    if on_path is not None:
        return Path(on_path), dict(os.environ)
    package, needed = _NEW
    is_new = _glibc() >= needed
    folder = cache_dir / (package if is_new else _OLD).replace("==", "-")
    binary = folder / _BINARY
    if not binary.is_file():
        _fetch(package if is_new else _OLD, binary)
    environment = dict(os.environ)
    if not is_new:
        libraries = os.pathsep.join(
            filter(None, (str(_link_libraries(folder)), os.environ.get("LD_LIBRARY_PATH")))
        )
        environment["LD_LIBRARY_PATH"] = libraries
    return binary, environment


def _glibc() -> tuple[int, ...]:
    """The C library's version."""
    version = platform.libc_ver()[1]
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _fetch(package: str, binary: Path) -> None:
    """Take the binary out of the package's wheel and put it in its place in one go."""
    print(f"fetching perf_analyzer ({package})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        download = subprocess.run(
            [*command, "--dest", scratch, package], capture_output=True, text=True, check=False
        )
        if download.returncode != 0:
            raise PerfAnalyzerError(f"cannot download {package}:\n{download.stderr}")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(f"bin/{_BINARY}"))
            binary.parent.mkdir(parents=True, exist_ok=True)
            partial = binary.with_name(f".{_BINARY}.{os.getpid()}")
            partial.write_bytes(wheel.read(member))
    partial.chmod(0o755)
    partial.rename(binary)


def _link_libraries(folder: Path) -> Path:
    """A folder with the libraries that the older build misses, under the names it asks for."""
    package = importlib.util.find_spec("pytriton")
    if package is None or package.origin is None:
        raise PerfAnalyzerError(
            "perf_analyzer needs libraries of the package nvidia-pytriton: ./build.sh setup"
        )
    source = Path(package.origin).parents[1] / "nvidia_pytriton.libs"
    target = folder / "lib"
    target.mkdir(exist_ok=True)
    for name, pattern in _LIBRARIES.items():
        found = next(source.glob(pattern), None)
        if found is None:
            raise PerfAnalyzerError(f"perf_analyzer needs {name}, which {source} does not have")
        link = target / name
        link.unlink(missing_ok=True)
        link.symlink_to(found)
    return target
