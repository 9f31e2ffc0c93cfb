"""Sends thousands of short mixed requests to a real server, and watches whether anything grows or is lost.

    python tests/bench/soak.py --requests 5000 --concurrency 32

One in ten is cancelled at a random moment, one in twenty is invalid; they come over gRPC streams, `generate_stream` and
`generate`, each on a connection of its own. Printed are samples of the memory of server and stub and of /dev/shm, and what
they grow by per request once warm. The exit code is 1 where a request was not answered exactly once, where the server's
own count differs, where memory keeps growing, or where the pool is not clean in the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from served_checkpoint import write_tiny_checkpoint
from triton_server import TritonServer
from wire import GrpcStream, HttpRequest, grpc_answer

from paged_engine.tools.default_model import default_model

CACHE_DIR = Path(os.environ.get("CACHE_DIR") or Path(__file__).parents[2] / ".cache")
PARAMETERS = {
    "dtype": "float32",
    "max_num_tokens": 256,
    "max_batch_size": 16,
    "num_pages": 512,
}
WARM_UP = 0.4
"""Share of the requests after which nothing may grow any more."""
NUM_SAMPLES = 25
MAX_GROWTH_BYTES = 10 << 20
"""Once warm, by the line of least squares through the samples; allocators take some now and then without a leak."""
WORDS = ["the", "sea", "was", "calm", "that", "morning", "and", "nobody", "on", "island", "saw", "a", "boat"]


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes."""

    num_requests: int
    server: int
    stub: int
    shared: int


class Soak:
    """The requests, and the book about what became of them."""

    def __init__(self, server: TritonServer, num_requests: int, concurrency: int, seed: int) -> None:
        self.server = server
        self.num_requests = num_requests
        self.concurrency = concurrency
        self.outcomes: Counter[str] = Counter()
        self.violations: list[str] = []
        self.samples: list[Sample] = []
        self._seed = seed
        self._lock = threading.Lock()
        self._num_sent = 0

    def run(self) -> None:
        """Send everything, `concurrency` at a time."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            for future in [pool.submit(self._work) for _ in range(self.concurrency)]:
                future.result()

    def _work(self) -> None:
        while True:
            with self._lock:
                number = self._num_sent
                if number == self.num_requests:
                    return
                self._num_sent += 1
                if number % max(1, self.num_requests // NUM_SAMPLES) == 0:
                    self._take_sample(number)
            outcome, violation = self._send(random.Random(self._seed * 1_000_003 + number))
            with self._lock:
                self.outcomes[outcome] += 1
                if violation:
                    self.violations.append(f"request {number}, {outcome}: {violation}")

    def _take_sample(self, num_requests: int) -> None:
        sizes = {pid: psutil.Process(pid).memory_info().rss for pid in self.server.process.group_pids()}
        server = sizes.pop(self.server.pid)
        self.samples.append(
            Sample(num_requests, server, sum(sizes.values()), self.server.shared_memory_bytes())
        )
        print(_line(self.samples[-1]), flush=True)

    def _send(self, chance: random.Random) -> tuple[str, str | None]:
        """Send one request; returns what it was meant to be, and what was wrong with its answer."""
        fields: dict[str, Any] = {
            "text_input": " ".join(chance.choices(WORDS, k=chance.randint(1, 60))),
            "max_tokens": chance.randint(1, 12),
            "ignore_eos": True,
            "seed": chance.getrandbits(32),
            "return_finish_reason": True,
        }
        way = chance.choice(["gRPC", "generate_stream", "generate"])
        kind = chance.random()
        if kind < 0.05:
            fields["sampling_parameters"] = chance.choice(
                ['{"bad', "[1]", '{"top_p": 2}', '{"max_token": 1}']
            )
            return "invalid", _invalid(self._answer(way, fields))
        if kind < 0.15:
            self._cancel(fields, chance)
            return "cancelled", None
        return "served", _served(self._answer(way, fields))

    def _answer(self, way: str, fields: dict[str, Any]) -> Any:
        if way == "gRPC":
            with GrpcStream(self.server) as stream:
                return grpc_answer(stream.send({**fields, "stream": True}).finish())
        with HttpRequest(self.server, way) as request:
            return request.send({**fields, "stream": way == "generate_stream"}).answer()

    def _cancel(self, fields: dict[str, Any], chance: random.Random) -> None:
        fields = {**fields, "stream": True, "max_tokens": 500}
        patience = chance.choice([0.0, 0.0, chance.uniform(0.0, 0.2)])
        if chance.random() < 0.5:
            with GrpcStream(self.server) as stream:
                stream.send(fields)
                time.sleep(patience)
        else:
            request = HttpRequest(self.server).send(fields)
            time.sleep(patience)
            request.close(reset=chance.random() < 0.5)


def _served(answer: Any) -> str | None:
    reasons = [response["finish_reason"][0] for response in answer.responses]
    if answer.error is not None:
        return f"it failed: {answer.error}"
    if reasons != ["None"] * (len(reasons) - 1) + ["length"]:
        return f"its responses end {reasons}"
    if answer.final_flags and answer.final_flags != [False] * (len(reasons) - 1) + [True]:
        return f"its responses are marked final {answer.final_flags}"
    return None


def _invalid(answer: Any) -> str | None:
    if answer.responses or answer.error is None or not answer.error.startswith("INVALID_ARG: "):
        return f"it was answered with {answer}"
    return None


def _line(sample: Sample) -> str:
    sizes = (f"{size / 2**20:8.1f}" for size in (sample.server, sample.stub, sample.shared))
    return f"{sample.num_requests:8d}  " + "  ".join(sizes)


def growth(samples: list[Sample], name: str) -> tuple[float, float]:
    """Bytes that a quantity grows by once warm, in all and per request, by the line of least squares."""
    warm = samples[int(len(samples) * WARM_UP) :]
    numbers = [sample.num_requests for sample in warm]
    slope = statistics.linear_regression(numbers, [getattr(sample, name) for sample in warm]).slope
    return slope * (numbers[-1] - numbers[0]), slope


def judge(soak: Soak) -> list[str]:
    """What went wrong, in words."""
    wrong = soak.violations[:20]
    if len(soak.violations) > 20:
        wrong.append(f"… and {len(soak.violations) - 20} more")
    try:
        soak.server.wait_pool_clean()
    except AssertionError as error:
        wrong.append(str(error))
    counted = soak.server.metric("llm_requests_total")
    # One that is cancelled at once may never have been read.
    if not soak.num_requests - soak.outcomes["cancelled"] <= counted <= soak.num_requests:
        wrong.append(f"the server counts {counted:.0f} requests, {soak.num_requests} were sent")
    invalid = soak.server.metric("llm_requests_total", outcome="invalid")
    if invalid != soak.outcomes["invalid"]:
        wrong.append(f"the server counts {invalid:.0f} invalid ones, {soak.outcomes['invalid']} were sent")
    for name in ("unavailable", "error", "timeout"):
        if number := soak.server.metric("llm_requests_total", outcome=name):
            wrong.append(f"the server counts {number:.0f} requests as {name}")
    for name in ("server", "stub", "shared"):
        total, per_request = growth(soak.samples, name)
        print(f"{name} grows by {per_request:.0f} bytes per request once warm")
        if total > MAX_GROWTH_BYTES:
            wrong.append(f"memory of {name} grows by {total / 2**20:.1f} MiB once warm")
    return wrong


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000, help="how many (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="how many at a time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, logs = Path(folder) / "checkpoint", Path(folder) / "logs"
        checkpoint.mkdir()
        write_tiny_checkpoint(checkpoint, tokenizer_of=default_model(CACHE_DIR / "models"))
        with TritonServer(logs, checkpoint, PARAMETERS) as server:
            server.wait_ready()
            soak = Soak(server, options.requests, options.concurrency, options.seed)
            print("requests    server      stub  /dev/shm  (MiB)")
            began = time.monotonic()
            soak.run()
            seconds = time.monotonic() - began
            print(f"{options.requests} requests in {seconds:.0f} s: {json.dumps(dict(soak.outcomes))}")
            wrong = judge(soak)
    for line in wrong:
        print("WRONG:", line)
    print(
        "FAILED"
        if wrong
        else "passed: every request was answered exactly once, nothing grows, the pool is clean"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
