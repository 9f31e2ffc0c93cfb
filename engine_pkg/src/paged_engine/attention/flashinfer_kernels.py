"""Compiles the FlashInfer kernels that a model can need ahead of time, for images that carry no compiler.

    CUDA_HOME=/usr/local/cuda FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" \\
        python -m paged_engine.attention.flashinfer_kernels --dtypes bfloat16 --head-dims 64 128

It takes nvcc, ninja and a C++ compiler, but no GPU. The libraries go to where FlashInfer looks for kernels before it
compiles any: a folder in its own package. What is compiled is found out by calling the very functions that FlashInfer
calls when a wrapper is planned, so that the names are right by construction. These functions are not part of its public
interface; they were the same from 0.6.0 to 0.7.4. Norms are compiled from CUDA C++ like the rest; that they are used, and
not those which newer versions make with another compiler at the first call, takes FLASHINFER_USE_CUDA_NORM=1.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paged_engine.attention.flashinfer_wrappers import HEAD_DIMS

DTYPES = ("bfloat16", "float16")


class _NotLoaded:
    """Stands for the library of a module that is still to be compiled; nothing of it is called."""

    def __getattr__(self, name: str) -> None:
        return None


def needed_modules(dtypes: Sequence[str], head_dims: Sequence[int], float8_cache: bool) -> list[Any]:
    """The FlashInfer modules that models of these dtypes and head sizes need, with and without windows and soft caps; and
    those of the fused operations and of sampling, which hold all sizes.

    Args:
        dtypes: of models, names of torch dtypes.
        head_dims: of HEAD_DIMS.
        float8_cache: whether the pages may be in float8_e4m3fn, besides in the model's dtype.

    Returns:
        FlashInfer's JitSpec objects, none of them built.
    """
    from flashinfer.activation import get_act_and_mul_module
    from flashinfer.decode import get_batch_decode_module
    from flashinfer.norm import get_norm_module
    from flashinfer.page import get_page_module
    from flashinfer.prefill import get_batch_prefill_module
    from flashinfer.rope import get_rope_module
    from flashinfer.sampling import get_sampling_module

    with _collecting() as modules:
        get_page_module()
        get_norm_module()
        get_rope_module()
        get_sampling_module()
        for activation in ("silu", "gelu_tanh", "gelu"):
            get_act_and_mul_module(activation)
        for name, head_dim, window, soft_cap in itertools.product(
            dtypes, head_dims, (False, True), (False, True)
        ):
            dtype = getattr(torch, name)
            for cache_dtype in (dtype, torch.float8_e4m3fn) if float8_cache else (dtype,):
                # query, cache and output dtype, index dtype, head sizes, no position encoding, window, soft cap
                variant = (dtype, cache_dtype, dtype, torch.int32, head_dim, head_dim, 0, window, soft_cap)
                if not window:  # windows are for the tensor cores, whose kernels are the prefill's
                    get_batch_decode_module(*variant)
                get_batch_prefill_module("fa2", *variant, False)
    return modules


def compile_ahead(modules: Sequence[Any]) -> None:
    """Compile modules, as many files at a time as there are cores, and put them into FlashInfer's package."""
    from flashinfer.jit.core import build_jit_specs

    build_jit_specs(list(modules), verbose=True, skip_prebuilt=False)
    for module in modules:
        target = module.aot_path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(module.jit_library_path, target)


@contextmanager
def _collecting() -> Iterator[list[Any]]:
    """Let FlashInfer ask for modules without compiling or loading them."""
    from flashinfer.jit.core import JitSpec

    modules: list[Any] = []

    def collect(module: Any) -> _NotLoaded:
        modules.append(module)
        return _NotLoaded()

    original = JitSpec.build_and_load
    JitSpec.build_and_load = collect
    try:
        yield modules
    finally:
        JitSpec.build_and_load = original


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile what the command line asks for."""
    parser = argparse.ArgumentParser(description="Compile FlashInfer's kernels ahead of time.")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtypes of models")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--float8-cache", action="store_true", help="also for pages in float8_e4m3fn")
    parser.add_argument("--list", action="store_true", help="only print the names of the modules")
    options = parser.parse_args(arguments)
    modules = needed_modules(options.dtypes, options.head_dims, options.float8_cache)
    for module in modules:
        print(module.name)
    if not options.list:
        compile_ahead(modules)


if __name__ == "__main__":
    main()
