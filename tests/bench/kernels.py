"""Times the native kernels beside torch's own, with what the machine could do at most, measured in the same run.

    python tests/bench/kernels.py [--threads N] [--quick]

Contenders take turns, so that whatever else the machine does meets all of them; medians are printed. "limit" is the time
that reading the operands at the measured bandwidth or multiplying at the measured rate would take, whichever is longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.attention.interface import AttentionBackend, AttentionSetup, AttentionSpec
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.kernels.library import Activation
from paged_engine.kernels.load import load_kernels
from paged_engine.kernels.native import NativeKernels, PackedLinear
from paged_engine.kernels.self_check import trial_batch

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
"""SmolLM2-135M's linear layers, [out_features, in_features]."""
NUM_ROWS = (1, 8, 32, 64, 128, 1024)
CONTEXTS = {
    "1 token, context 1000": ((1000,), (1,)),
    "8 tokens, context 100": ((100,) * 8, (1,) * 8),
    "64 tokens, context 128": ((128,) * 64, (1,) * 64),
    "64 tokens, context 1000": ((1000,) * 64, (1,) * 64),
    "prompt of 1024": ((1024,), (1024,)),
    "chunk of 256 at 2048": ((2048,), (256,)),
}
"""(tokens in the cache, of which computed in this step) by sequence."""
CPU = torch.device("cpu")
WORKING_SET = 96 << 20
"""Bytes of weights that are read in turn, more than caches hold."""


def compare(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taking turns after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


class Roofline:
    """What this machine does at most, as torch's own copy, sum and matrix product reach it."""

    def __init__(self, repeats: int) -> None:
        block = torch.ones(32 << 20)
        other = torch.empty_like(block)
        square = torch.randn(2048, 2048).bfloat16()
        times = compare(
            {
                "copy": lambda: other.copy_(block),
                "read": lambda: block.sum(),
                "multiply": lambda: square @ square,
            },
            repeats,
        )
        self.copy_rate = 2 * block.nbytes / times["copy"]
        self.read_rate = max(self.copy_rate, block.nbytes / times["read"])
        self.multiply_rate = 2 * 2048**3 / times["multiply"]

    def limit(self, num_bytes: float, num_operations: float) -> float:
        """Seconds at least."""
        return max(num_bytes / self.read_rate, num_operations / self.multiply_rate)


def show(title: str, limit: float, times: dict[str, float], ours: str = "native") -> None:
    """One line: microseconds of each contender, ours against each, and the fraction of the limit that ours reaches."""
    columns = [f"{name} {seconds * 1e6:8.0f}" for name, seconds in times.items()]
    ratios = [f"{seconds / times[ours]:.2f}" for name, seconds in times.items() if not name.startswith(ours)]
    print(
        f"{title:34s} {'  '.join(columns)}   x {' '.join(ratios)}   {limit / times[ours]:4.0%} of limit",
        flush=True,
    )


def bench_linear(
    kernels: NativeKernels, roofline: Roofline, shape: tuple[int, int], num_rows: int, repeats: int
) -> None:
    """bf16 rows times weights: torch, torch on oneDNN's packed weights, ours in bf16 and in int8."""
    copies = max(1, min(40, WORKING_SET // (2 * shape[0] * shape[1])))
    weights = [torch.randn(shape).bfloat16() for _ in range(copies)]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights]
    wide = [kernels.pack_linear(weight) for weight in weights]
    int8 = [kernels.pack_linear(weight, int8=True) for weight in weights]
    x = torch.randn(num_rows, shape[1]).bfloat16()
    out = torch.empty(num_rows, shape[0], dtype=torch.bfloat16)

    def run_all(layers: list[PackedLinear]) -> None:
        for layer in layers:
            kernels.linear(x, layer, out)

    multiply_onednn = torch.ops.mkldnn._linear_pointwise
    times = compare(
        {
            "torch": lambda: [F.linear(x, weight) for weight in weights],
            "oneDNN": lambda: [multiply_onednn(x, weight, None, "none", [], "") for weight in onednn],
            "native": lambda: run_all(wide),
            "native int8": lambda: run_all(int8),
        },
        repeats,
    )
    limit = roofline.limit(2 * shape[0] * shape[1], 2 * num_rows * shape[0] * shape[1])
    show(f"{list(shape)} M {num_rows}", limit, {name: each / copies for name, each in times.items()})


def bench_attention(
    kernels: NativeKernels, roofline: Roofline, page_size: int, title: str, repeats: int
) -> None:
    """SmolLM2-135M's attention: 9 query heads, 3 KV heads of 64, bf16 over pages in bf16 or int8, which are written, too."""
    contexts, queries = CONTEXTS[title]
    batch = trial_batch(contexts, queries, page_size)
    query, key, value = (torch.randn(batch.num_tokens, heads, 64).bfloat16() for heads in (9, 3, 3))
    setup = AttentionSetup((AttentionSpec(9, 3, 64, 0.125),), page_size, CPU, torch.bfloat16, torch.bfloat16)
    in_int8 = replace(setup, cache_dtype=torch.int8)
    backends: dict[str, AttentionBackend] = {
        "torch": TorchAttention(setup),
        "native": CpuAttention(setup, kernels),
        "native int8": CpuAttention(in_int8, kernels),
    }
    num_pages = int(batch.page_indices.max()) + 1
    filling = trial_batch((page_size,) * num_pages, (page_size,) * num_pages, page_size)
    for name, backend in backends.items():
        dtype = torch.int8 if "int8" in name else torch.bfloat16
        backend.bind(0, torch.zeros(num_pages, *backend.page_shape(0), dtype=dtype))
        backend.plan(filling)
        backend.attend(0, *(torch.randn(filling.num_tokens, heads, 64).bfloat16() for heads in (9, 3, 3)))
        backend.plan(batch)
    times = compare(
        {
            name: lambda backend=backend: backend.attend(0, query, key, value)  # type: ignore[misc]
            for name, backend in backends.items()
        },
        repeats,
    )
    pairs = sum(
        (2 * context - count + 1) * count / 2 for context, count in zip(contexts, queries, strict=True)
    )
    show(title, roofline.limit(sum(contexts) * 3 * 64 * 4, pairs * 9 * 64 * 4), times)


def bench_rows(kernels: NativeKernels, roofline: Roofline, num_rows: int, repeats: int) -> None:
    """What lies between the products."""
    x, residual, out = (torch.randn(num_rows, 576).bfloat16() for _ in range(3))
    weight, narrow = torch.ones(576), torch.ones(576).bfloat16()
    times = compare(
        {
            "torch": lambda: F.rms_norm(residual.add_(x), (576,), narrow, 1e-5),
            "native": lambda: kernels.rms_norm(x, residual, weight, 1e-5, out),
        },
        repeats,
    )
    show(f"add + RMS norm [{num_rows}, 576]", roofline.limit(8 * x.numel(), 0), times)
    both, half = torch.randn(num_rows, 3072).bfloat16(), torch.empty(num_rows, 1536, dtype=torch.bfloat16)
    times = compare(
        {
            "torch": lambda: F.silu(both[:, :1536]) * both[:, 1536:],
            "native": lambda: kernels.gate(both, Activation.SILU, half),
        },
        repeats,
    )
    show(f"gate [{num_rows}, 2 x 1536]", roofline.limit(6 * half.numel(), 0), times)


def bench_reductions(kernels: NativeKernels, roofline: Roofline, repeats: int) -> None:
    """What choosing tokens needs of the logits."""
    logits = torch.randn(64, 49152)
    limit = roofline.limit(logits.nbytes, 0)
    times = compare({"torch": lambda: logits.argmax(-1), "native": lambda: kernels.argmax(logits)}, repeats)
    show("argmax [64, 49152] float32", limit, times)
    times = compare(
        {"torch": lambda: logits.logsumexp(-1), "native": lambda: kernels.log_sum_exp(logits)}, repeats
    )
    show("log-sum-exp [64, 49152] float32", limit, times)


def main() -> None:
    """Measure the machine, then the kernels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    repeats = 5 if options.quick else 15
    torch.set_num_threads(options.threads)
    kernels = load_kernels(options.threads)
    roofline = Roofline(repeats)
    print(
        f"variant {kernels.variant}, {options.threads} threads; copy {roofline.copy_rate / 1e9:.1f} GB/s, "
        f"read {roofline.read_rate / 1e9:.1f} GB/s, bf16 product {roofline.multiply_rate / 1e9:.0f} GFLOP/s"
    )
    with torch.inference_mode():
        print("\nlinear layers, bf16 [microseconds]")
        for shape in SHAPES:
            for num_rows in NUM_ROWS:
                if num_rows * shape[0] <= 1 << 23:
                    bench_linear(kernels, roofline, shape, num_rows, repeats)
        for page_size in (16, 64):
            print(f"\nattention, bf16, pages of {page_size} [microseconds]")
            for title in CONTEXTS:
                bench_attention(kernels, roofline, page_size, title, repeats)
        print("\nrows [microseconds]")
        for num_rows in (1, 64, 1024):
            bench_rows(kernels, roofline, num_rows, repeats)
        bench_reductions(kernels, roofline, repeats)


if __name__ == "__main__":
    main()
