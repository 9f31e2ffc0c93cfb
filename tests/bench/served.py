"""The five loads through Triton with gRPC streams, beside the engine alone in the same run.

A real server serves the default model; a client in a process of its own sends token ids and takes streams. The engine alone
is a third process; it and the server take turns, and neither computes while the other does. Printed: output tokens per
second (prefill: all tokens per second), their share of the engine's alone (85 % at least is the aim), time to first token
and between tokens; then what streaming costs at 16 ways (within 15 %), and the processor time of an idle server (under 2 %
of a core).

    ./build.sh bench served
    ./build.sh bench served --set weight_dtype=int8
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from contenders import Contender, ContenderError, Rounds, run_rounds, start_all, unwind_on_terminate
from loads import Load, choose_loads
from report import CACHE_DIR, markdown_table, save, say

from paged_engine.tools.default_model import default_model
from paged_engine.tools.ports import Ports, ServerError
from paged_engine.tools.triton import TritonProcess

REPOSITORY = Path(__file__).parents[2] / "model_repository"
SERVED, ALONE = "through Triton", "engine alone"
STREAMING_LOAD = Load(16, 128, 128)
IDLE_S = 10.0
READY_TIMEOUT_S = 600.0


def percentiles(values: Sequence[float]) -> str:
    """p50 and p99 by nearest rank, in milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return "–"
    return " / ".join(f"{ordered[len(ordered) * percent // 100] * 1000:,.1f}" for percent in (50, 99))


def speed_table(loads: Sequence[Load], rounds: Rounds) -> str:
    """A row for each load."""
    rows = []
    for load in loads:
        served, alone = rounds.speeds(SERVED, load), rounds.speeds(ALONE, load)
        answers = rounds.answers.get((SERVED, load), [])
        rows.append(
            [
                load.name,
                f"{statistics.median(served):,.0f}" if served else "failed",
                f"{statistics.median(alone):,.0f}" if alone else "failed",
                f"{statistics.median(served) / statistics.median(alone):.0%}" if served and alone else "–",
                percentiles([seconds for answer in answers for seconds in answer["first_token_seconds"]]),
                percentiles(
                    [seconds for answer in answers for each in answer["between_seconds"] for seconds in each]
                ),
            ]
        )
    columns = ["load", "tokens/s served", "engine alone", "share", "TTFT ms p50 / p99", "ITL ms p50 / p99"]
    return markdown_table(columns, rows)


def measure_streaming(client: Contender, load: Load, num_rounds: int) -> dict[str, list[float]]:
    """Tokens per second streamed and not, in turns, after one round to warm up."""
    speeds: dict[str, list[float]] = {"streamed": [], "whole": []}
    for number in range(num_rounds + 1):
        for way, measured in speeds.items():
            prompts = load.prompts(seed=2 * number + (way == "streamed"))
            answer = client.generate(prompts, load.num_output_tokens, stream=way == "streamed")
            say(f"{load.name} {way}: {load.num_counted_tokens / answer['seconds']:.0f} tokens/s")
            if number:
                measured.append(load.num_counted_tokens / answer["seconds"])
    return speeds


def idle_share(server: TritonProcess, seconds: float) -> float:
    """Processor time of the server and its stub while nobody asks anything, as a share of one core."""
    processes = [psutil.Process(pid) for pid in server.group_pids()]
    time.sleep(2)  # threads that wait for more work give up
    before = [process.cpu_times() for process in processes]
    say(f"watching the idle server for {seconds:.0f} s")
    time.sleep(seconds)
    after = [process.cpu_times() for process in processes]
    spent = sum(sum(b[:2]) - sum(a[:2]) for a, b in zip(before, after, strict=True))  # user and system time
    return max(0.0, spent / seconds)


def main() -> int:
    """Start all three, measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine parameters")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of short loads, to try it out")
    options = parser.parse_args()
    unwind_on_terminate()
    loads, num_rounds = choose_loads(options.quick), 1 if options.quick else options.rounds
    model = options.model or str(default_model(CACHE_DIR / "models"))
    parameters = {"model": model, **dict(item.split("=") for item in options.set)}
    logs = CACHE_DIR / "logs"
    rounds = Rounds()
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        say("starting Triton")
        server = TritonProcess(REPOSITORY, Ports.free(), logs / "bench-triton.log", parameters=parameters)
        stack.callback(server.close)
        server.wait_ready(READY_TIMEOUT_S)
        url = f"{server.host}:{server.ports.grpc}"
        starters = {
            SERVED: lambda: Contender(SERVED, "served", {"url": url}, logs / "bench-client.log"),
            ALONE: lambda: Contender(ALONE, "ours", parameters, logs / "bench-alone.log"),
        }
        contenders = start_all(starters, rounds, stack)
        run_rounds(contenders, loads, num_rounds, rounds)
        client = next((each for each in contenders if each.name == SERVED), None)
        if client is not None:
            load = STREAMING_LOAD.shortened() if options.quick else STREAMING_LOAD
            try:
                results["streaming"] = measure_streaming(client, load, num_rounds)
                results["idle_share"] = idle_share(server, 2.0 if options.quick else IDLE_S)
            except (ContenderError, psutil.Error) as error:
                rounds.failures[SERVED] = str(error)
    return publish(loads, rounds, results, parameters)


def publish(
    loads: Sequence[Load], rounds: Rounds, results: dict[str, Any], parameters: dict[str, str]
) -> int:
    """Print the figures and keep them; the exit code is 1 where something failed."""
    print(f"\n{speed_table(loads, rounds)}\n")
    if "streaming" in results:
        streamed, whole = (statistics.median(results["streaming"][way]) for way in ("streamed", "whole"))
        print(f"streamed {streamed:,.0f} tokens/s, not streamed {whole:,.0f}: {streamed / whole:.1%}")
    if "idle_share" in results:
        print(f"idle server: {results['idle_share']:.2%} of a core")
    results["parameters"] = parameters
    results["rounds"] = [
        {"way": way, "load": asdict(load), "tokens_per_second": rounds.speeds(way, load)}
        for way in (SERVED, ALONE)
        for load in loads
    ]
    results["failures"] = rounds.failures
    print(f"kept in {save('served', results)}")
    for reason in rounds.failures.values():
        print(f"FAILED: {reason}", file=sys.stderr)
    return 1 if rounds.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as problem:
        sys.exit(f"error: {problem}")
