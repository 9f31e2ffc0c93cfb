"""The native library by variant, with the AMX variant on emulated tiles where the machine has none."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import pytest

from paged_engine.kernels import build
from paged_engine.kernels.library import Library
from paged_engine.kernels.native import NativeKernels

EMULATION = Path(__file__).with_name("amx_emulation.h")


@lru_cache
def library() -> Library:
    return Library(build.find_or_build())


@lru_cache
def emulated_library() -> Library:
    """The library with its AMX kernels on tiles in plain C++; kept beside the ordinary one until a source changes."""
    digest = hashlib.sha256(build.library_name().encode() + EMULATION.read_bytes()).hexdigest()[:16]
    path = build.cache_folder() / f"libpaged_engine_emulated_amx_{digest}.so"
    if not path.exists():
        avx512 = build.variant_flags()["avx512"]
        build.build(path, {"amx": (*avx512, "-include", str(EMULATION)), "generic": ()})
    return Library(path)


def make_kernels(variant: str) -> NativeKernels:
    """A variant on one thread; "tiles" is the AMX variant, on tiles in software where the machine has none."""
    if variant == "tiles":
        if "amx" in library().variants():
            return NativeKernels(library(), "amx", 1)
        if "avx512" not in library().variants():
            pytest.skip("tiles can be emulated, but the rest of the AMX variant needs AVX-512")
        return NativeKernels(emulated_library(), "amx", 1)
    if variant not in library().variants():
        pytest.skip(f"this machine does not run the variant {variant}")
    return NativeKernels(library(), variant, 1)
