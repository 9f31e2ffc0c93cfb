"""Compiling the native kernels with the machine's C++ compiler: at install, or on first use from a source checkout.

Needs the standard library only, so that an installer can run it without torch. One shared library holds every variant
that the compiler can make; which one runs is decided when it is loaded (library.py), never by the building machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
INSTALLED = Path(__file__).parent
"""Where an installation puts the library that it built."""
FLAGS_VARIABLE = "PAGED_ENGINE_CXXFLAGS"
"""Environment variable with further compiler flags, such as those of a sanitizer."""

_FLAGS = (
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx512bf16")
_X86_VARIANTS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512, "-mamx-tile", "-mamx-bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": (),
}


class BuildError(RuntimeError):
    """The library could not be compiled; the message says what is missing or repeats the compiler."""


def variant_flags() -> dict[str, tuple[str, ...]]:
    """Compiler flags of each variant for this machine's architecture, the best first."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return dict(_X86_VARIANTS)
    return {"generic": ()}


def library_name() -> str:
    """File name that changes with the sources, the flags and the architecture."""
    digest = hashlib.sha256(
        repr((_FLAGS, variant_flags(), _extra_flags(), platform.machine(), sys.platform)).encode()
    )
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".h", ".cpp"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"libpaged_engine_kernels_{digest.hexdigest()[:16]}.so"


def cache_folder() -> Path:
    """Where a library is kept that was not built at install: $CACHE_DIR, or paged_engine in the user's cache folder."""
    if given := os.environ.get("CACHE_DIR"):
        return Path(given) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paged_engine" / "kernels"


def find_or_build() -> Path:
    """The library that belongs to these sources: the installed one, else the cached one, else a new one in the cache.

    Raises:
        BuildError: there is none and none can be compiled here.
    """
    name = library_name()
    installed = INSTALLED / name
    if installed.exists():
        return installed
    cached = cache_folder() / name
    if not cached.exists():
        build(cached)
    return cached


def build(target: Path, variants: Mapping[str, Sequence[str]] | None = None) -> None:
    """Compile the library into `target`, which appears only when it is complete.

    A variant that this compiler cannot make is left out; the generic one must succeed.

    Args:
        variants: flags by variant instead of `variant_flags()`.

    Raises:
        BuildError: no compiler, no place to write to, or an error in the generic variant.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise BuildError("no C++ compiler: install g++ (apt-get install g++) or name one in CXX")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            library = Path(folder) / target.name
            _compile(compiler, library, dict(variants or variant_flags()))
            library.replace(target)
    except OSError as error:
        raise BuildError(f"cannot compile into {target.parent}: {error}") from error


def _extra_flags() -> list[str]:
    return shlex.split(os.environ.get(FLAGS_VARIABLE, ""))


def _compile(compiler: str, library: Path, variants: Mapping[str, Sequence[str]]) -> None:
    """Compile all objects at once, one process each, and link those that came out."""
    base = [*shlex.split(compiler), *_FLAGS, *_extra_flags()]
    objects: dict[str, Path] = {}
    processes: dict[str, subprocess.Popen[str]] = {}
    for name, flags in {**variants, "machine": ()}.items():
        objects[name] = library.with_name(f"{name}.o")
        source = SOURCES / ("machine.cpp" if name == "machine" else "variant.cpp")
        command = [*base, *flags, f"-DVARIANT={name}", "-c", str(source), "-o", str(objects[name])]
        processes[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace"
        )
    for name, process in processes.items():
        output, _ = process.communicate()
        if process.returncode == 0:
            continue
        if name in ("generic", "machine"):
            raise BuildError(f"{compiler} could not compile the {name} kernels:\n{output}")
        del objects[name]
    command = [*base, "-shared", *map(str, objects.values()), "-o", str(library)]
    linked = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if linked.returncode != 0:
        raise BuildError(f"{compiler} could not link the kernels:\n{linked.stderr}")


if __name__ == "__main__":
    print(find_or_build())
