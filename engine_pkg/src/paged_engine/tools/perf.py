"""Loads a served model with perf_analyzer and prints what its users would see.

``python -m paged_engine.tools.perf --url HOST:PORT --cache-dir DIR [--concurrency 1:8] …``

perf_analyzer keeps a number of gRPC streams busy and records when each response arrived; throughput, time to first
token and inter-token latency are computed from those records, so that every version of the tool gives the same table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paged_engine.tools.perf_analyzer import PerfAnalyzerError, find_perf_analyzer
from paged_engine.tools.triton import die_with_parent

_PROMPT = "Write a short story about a lighthouse keeper who finds a letter in a bottle."
_PERCENTILES = (50, 90, 99)
_MAX_TRIES = 3
_NS_PER_MS = 1e6
_NS_PER_S = 1e9


@dataclass(frozen=True)
class Load:
    """What was measured at one concurrency; times in nanoseconds."""

    concurrency: int
    num_requests: int
    duration_ns: float
    first_token_ns: list[float]
    inter_token_ns: list[float]


def main(arguments: Sequence[str]) -> int:
    """Measure each concurrency in turn, print the table, and return the exit code for the shell."""
    options = _parse(arguments)
    try:
        binary, environment = find_perf_analyzer(options.cache_dir)
        loads = []
        for concurrency in options.concurrency:
            num_requests = options.requests_per_stream * concurrency
            _say(
                f"  … {concurrency} at a time: {num_requests} requests of {options.output_tokens} tokens each"
            )
            loads.append(_measure(binary, environment, options, concurrency, num_requests))
    except PerfAnalyzerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_table(loads, options.output_tokens))
    return 0


def _measure(
    binary: Path,
    environment: dict[str, str],
    options: argparse.Namespace,
    concurrency: int,
    num_requests: int,
) -> Load:
    """Run perf_analyzer and read its records; again where it ends well but has written only the beginning of them."""
    with tempfile.TemporaryDirectory() as scratch:
        input_file, export_file = Path(scratch) / "input.json", Path(scratch) / "export.json"
        request = {
            "text_input": [options.prompt],
            "stream": [True],
            "max_tokens": [options.output_tokens],
            "ignore_eos": [True],
        }
        input_file.write_text(json.dumps({"data": [request]}))
        command = [str(binary), "-m", options.model, "-u", options.url, "-i", "grpc", "--service-kind=triton"]
        command += [
            "--async",
            "--streaming",
            f"--input-data={input_file}",
            f"--profile-export-file={export_file}",
        ]
        command += [f"--concurrency-range={concurrency}", f"--request-count={num_requests}"]
        for _ in range(_MAX_TRIES):
            run = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                preexec_fn=die_with_parent(),
            )
            if run.returncode != 0 or not export_file.is_file():
                raise PerfAnalyzerError(
                    f"perf_analyzer failed (exit code {run.returncode})\n{run.stdout}{run.stderr}"
                )
            try:
                return _read_records(json.loads(export_file.read_text()), concurrency)
            except json.JSONDecodeError:
                _say("  … perf_analyzer has not written all its records: once more")
        raise PerfAnalyzerError(f"perf_analyzer left its records unfinished {_MAX_TRIES} times")


def _read_records(export: dict[str, Any], concurrency: int) -> Load:
    """Compute the figures from perf_analyzer's export: when each request was sent and each response came."""
    requests = [r for r in export["experiments"][0]["requests"] if r["response_timestamps"]]
    if not requests:
        raise PerfAnalyzerError("perf_analyzer recorded no answered request")
    begin = min(r["timestamp"] for r in requests)
    end = max(r["response_timestamps"][-1] for r in requests)
    return Load(
        concurrency=concurrency,
        num_requests=len(requests),
        duration_ns=end - begin,
        first_token_ns=[r["response_timestamps"][0] - r["timestamp"] for r in requests],
        inter_token_ns=[b - a for r in requests for a, b in pairwise(r["response_timestamps"])],
    )


def _table(loads: Sequence[Load], output_tokens: int) -> str:
    """One line per concurrency."""
    percentiles = " ".join(f"{f'p{p}':>7}" for p in _PERCENTILES)
    width = len(percentiles)
    lines = [
        f"{'':>11} {'':>10} {'':>10}   {'first token, ms':^{width}}   {'inter-token, ms':^{width}}",
        f"{'concurrency':>11} {'requests/s':>10} {'tokens/s':>10}   {percentiles}   {percentiles}",
    ]
    for load in loads:
        per_second = load.num_requests / load.duration_ns * _NS_PER_S
        first, between = (
            " ".join(f"{value / _NS_PER_MS:7.1f}" for value in np.percentile(times or [np.nan], _PERCENTILES))
            for times in (load.first_token_ns, load.inter_token_ns)
        )
        figures = f"{load.concurrency:>11} {per_second:10.2f} {per_second * output_tokens:10.1f}"
        lines.append(f"{figures}   {first}   {between}")
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="./build.sh perf", description="Load the server with perf_analyzer."
    )
    parser.add_argument("--url", required=True, help="host:port of the server's gRPC endpoint")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where perf_analyzer is kept")
    parser.add_argument("--model", default="llm", help="the model's name on the server (%(default)s)")
    parser.add_argument(
        "--concurrency", type=_range, default="1:8", help="START:END[:STEP], or one number (%(default)s)"
    )
    parser.add_argument(
        "--requests-per-stream", type=int, default=4, help="requests at each concurrency (%(default)s)"
    )
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens of each answer (%(default)s)")
    parser.add_argument("--prompt", default=_PROMPT, help="the prompt of every request")
    return parser.parse_args(arguments)


def _range(text: str) -> range:
    """Read perf_analyzer's way of writing a range, both ends included."""
    start, end, step = [*(int(part) for part in text.split(":")), 0, 0][:3]
    return range(start, max(start, end) + 1, max(step, 1))


def _say(line: str) -> None:
    """A progress line; standard output is for the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
