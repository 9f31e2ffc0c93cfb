"""Throughput of the engine alone, without Triton: five loads, beside the machine's own limits measured in the same run.

For each load the figures are output tokens per second (prefill: all tokens per second), the share of the time spent outside
the model (planning, batch preparation, sampling, text), and the share of what memory and arithmetic allow: a step cannot be
quicker than reading the weights once, nor than their multiplications at the measured matmul rate.

    ./build.sh bench offline
    ./build.sh bench offline --set weight_dtype=int8 --set kv_cache_dtype=int8 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import torch
from limits import Limits
from loads import Load, choose_loads
from report import CACHE_DIR, markdown_table, save, say
from stopwatch import Stopwatch

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.execution.runner import ModelRunner
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.tools.default_model import default_model


def run(engine: Engine, load: Load, seed: int) -> tuple[float, float]:
    """Run one load; returns tokens per second, and the share of the time outside the model."""
    sampling = SamplingParams(temperature=0, max_tokens=load.num_output_tokens, ignore_eos=True)
    prepared = [
        engine.prepare(GenerateRequest(f"{seed}-{i}", prompt, sampling))
        for i, prompt in enumerate(load.prompts(seed))
    ]
    with Stopwatch({"model": [(ModelRunner, "execute")]}) as watch:
        began = time.perf_counter()
        for item in prepared:
            engine.add(item)
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - began
    return load.num_counted_tokens / seconds, 1 - watch.seconds["model"] / seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="after one to warm up (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine parameters")
    parser.add_argument("--quick", action="store_true", help="short loads, to try it out")
    options = parser.parse_args()
    model = options.model or str(default_model(CACHE_DIR / "models"))
    parameters = {"num_pages": "1024", "max_seq_len": "2048", **dict(item.split("=") for item in options.set)}
    say("loading the model")
    engine = load_engine(EngineConfig.from_parameters({"model": model, "dtype": options.dtype, **parameters}))
    int8 = engine.config.weight_dtype == "int8"
    limits = Limits.measure(Path(model), torch.int8 if int8 else getattr(torch, options.dtype))
    rows, results = [], []
    for load in choose_loads(options.quick):
        say(load.name)
        rounds = [run(engine, load, seed) for seed in range(options.repeats + 1)][1:]
        speeds = sorted(speed for speed, _ in rounds)
        outside = statistics.median(share for _, share in rounds)
        best = load.num_counted_tokens / limits.seconds(load)
        rows.append(
            [
                load.name,
                f"{statistics.median(speeds):,.0f}",
                f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}",
                f"{outside:.1%}",
                f"{statistics.median(speeds) / best:.0%}",
            ]
        )
        results.append({"load": asdict(load), "tokens_per_second": speeds, "outside": outside, "limit": best})
    print(f"\n{limits}, {engine.config.num_threads} threads, {parameters}\n")
    print(
        markdown_table(["load", "tokens/s, median", "min to max", "outside the model", "of the limit"], rows)
    )
    save("offline", {"limits": asdict(limits), "parameters": parameters, "loads": results})


if __name__ == "__main__":
    main()
