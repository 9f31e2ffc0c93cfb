"""Finds the native library and the best of its variants that this machine runs, and runs rightly."""

from __future__ import annotations

import logging
import os
from functools import lru_cache

from paged_engine.kernels.build import BuildError, find_or_build
from paged_engine.kernels.library import VARIANTS, Library, LibraryUnavailable
from paged_engine.kernels.native import NativeKernels
from paged_engine.kernels.self_check import find_fault

_log = logging.getLogger(__name__)

VARIANT_VARIABLE = "PAGED_ENGINE_CPU_VARIANT"
"""Environment variable that names the variant to use instead of the best one."""


def load_kernels(num_threads: int) -> NativeKernels:
    """The native kernels, built now where they were not at install, checked against plain torch.

    A variant whose results are wrong on this machine is passed over with a warning.

    Raises:
        LibraryUnavailable: there is no library and no compiler, or no variant (or not the one that is asked for) works.
    """
    library, variant = _choose(os.environ.get(VARIANT_VARIABLE, ""))
    return NativeKernels(library, variant, num_threads)


@lru_cache
def _choose(forced: str) -> tuple[Library, str]:
    """The library and a variant that passes its check; the same for the life of the process."""
    try:
        library = Library(find_or_build())
    except BuildError as error:
        raise LibraryUnavailable(str(error)) from error
    candidates = library.variants()
    if forced:
        if forced not in candidates:
            raise LibraryUnavailable(
                f"{VARIANT_VARIABLE} must be one of {', '.join(candidates)} on this machine "
                f"(of {', '.join(VARIANTS)}), got {forced}"
            )
        candidates = [forced]
    for variant in candidates:
        fault = find_fault(NativeKernels(library, variant, num_threads=2))
        if fault is None:
            return library, variant
        _log.warning("the native kernels' variant %s is wrong on this machine (%s); not used", variant, fault)
    raise LibraryUnavailable(f"every variant fails its check: {', '.join(candidates)}")
