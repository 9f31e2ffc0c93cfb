"""Throughput of the engine alone, without Triton: five loads, beside the machine's own limits measured in the same run.

For each load the figures are output tokens per second (prefill: all tokens per second), the share of the time spent outside
the model (planning, batch preparation, sampling, text), and the share of what memory and arithmetic allow: a step cannot be
quicker than reading the weights once, nor than their multiplications at the measured matmul rate.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.tools.default_model import default_model

LOADS = {"1 x 32+128": (1, 32, 128), "8 x 32+128": (8, 32, 128), "32 x 128+128": (32, 128, 128)}
LOADS |= {"64 x 128+64": (64, 128, 64), "8 x 1024+1": (8, 1024, 1)}


def copy_bandwidth() -> float:
    """Bytes read per second while summing 256 MiB, which no cache holds; the best of five."""
    block = torch.ones(64 << 20)
    best = min(_seconds(block.sum) for _ in range(5))
    return block.numel() * 4 / best


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a 1024 x 2048 x 2048 matmul; the best of five."""
    left, right = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    best = min(_seconds(lambda: left @ right) for _ in range(5))
    return 2 * 1024 * 2048 * 2048 / best


def _seconds(call: object) -> float:
    began = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - began


def count_weights(checkpoint: Path) -> int:
    """Numbers in a checkpoint folder; the loaded model's own modules are empty once the kernels have packed them."""
    count = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


def run(engine: Engine, load: str, seed: int) -> tuple[float, float]:
    """Run one load; returns seconds, and the share of them outside the model."""
    count, num_prompt_tokens, max_tokens = LOADS[load]
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [[rng.randrange(10, 49_000) for _ in range(num_prompt_tokens)] for _ in range(count)]
    prepared = [
        engine.prepare(GenerateRequest(f"{seed}-{i}", prompt, sampling)) for i, prompt in enumerate(prompts)
    ]
    in_model = 0.0
    execute = engine._runner.execute

    def timed(batch: object) -> torch.Tensor:
        nonlocal in_model
        began = time.perf_counter()
        logits = execute(batch)  # type: ignore[arg-type]
        in_model += time.perf_counter() - began
        return logits

    engine._runner.execute = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    for item in prepared:
        engine.add(item)
    while engine.has_work:
        engine.step()
    took = time.perf_counter() - began
    engine._runner.execute = execute  # type: ignore[method-assign]
    return took, 1 - in_model / took


def limit_seconds(load: str, weight_bytes: int, num_weights: int, bandwidth: float, rate: float) -> float:
    """The least time a load can take: each step reads the weights once, and each token multiplies them once."""
    count, num_prompt_tokens, max_tokens = LOADS[load]
    arithmetic = 2 * num_weights / rate
    return count * num_prompt_tokens * arithmetic + max_tokens * max(
        weight_bytes / bandwidth, count * arithmetic
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine parameters")
    options = parser.parse_args()
    cache = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")
    model = options.model or str(default_model(cache / "models"))
    parameters = {"num_pages": "1024", "max_seq_len": "2048", **dict(item.split("=") for item in options.set)}
    engine = load_engine(EngineConfig.from_parameters({"model": model, "dtype": options.dtype, **parameters}))
    num_weights = count_weights(Path(model))
    weight_bytes = num_weights * getattr(torch, options.dtype).itemsize
    bandwidth, rate = copy_bandwidth(), matmul_rate(getattr(torch, options.dtype))
    table = Table(
        title=f"{num_weights / 1e6:.0f} M weights, {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.2f} TFLOP/s"
    )
    for name in ("load", "tokens/s (median)", "min to max", "outside the model", "of the limit"):
        table.add_column(name, justify="left" if name == "load" else "right")
    for load, (count, num_prompt_tokens, max_tokens) in LOADS.items():
        num_tokens = count * (num_prompt_tokens + 1 if max_tokens == 1 else max_tokens)
        results = [run(engine, load, seed) for seed in range(options.repeats + 1)][1:]
        speeds = sorted(num_tokens / took for took, _ in results)
        best = num_tokens / limit_seconds(load, weight_bytes, num_weights, bandwidth, rate)
        median = statistics.median(speeds)
        table.add_row(
            load,
            f"{median:.0f}",
            f"{speeds[0]:.0f} to {speeds[-1]:.0f}",
            f"{100 * statistics.median(share for _, share in results):.0f} %",
            f"{100 * median / best:.0f} %",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
