"""Replays an hour of traffic through the real scheduler and page pool, without a model, and says how each policy does.

A step takes `--step-seconds` + tokens * `--token-seconds`; the defaults are a small model on a CPU. Traces:

    poisson   independent arrivals; lengths as in the conversation trace published with Splitwise (Azure, 2023): log-normal,
              median prompt 1,020 tokens, median answer 129
    bursts    the same requests, arriving in bursts
    tail      nine short questions to one document of some 6,000 tokens
    chat      conversations over one system prompt; each turn sends everything said so far

It prints one table over traces and policies ("no chunks" refuses prompts longer than a step, so it serves fewer), and one
with what planning a step costs by the number of sequences running and waiting (flat in the waiting). Random, but the same
for the same `--seed`.

    python tests/bench/simulate_scheduler.py --minutes 60
    python tests/bench/simulate_scheduler.py --traces tail --compare overtaking_ratio=1000000000,16,8,4,2
    python tests/bench/simulate_scheduler.py --traces poisson --num-pages 1200 --compare spare_pages=0,1,2,4
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paged_engine.config import EngineConfig
from paged_engine.request import SamplingParams
from paged_engine.scheduling import chunking, scheduler
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.sequence import Sequence

SAMPLING = SamplingParams()
POLICIES: dict[str, dict[str, object]] = {
    "max_utilization": {},
    "guaranteed_no_evict": {"scheduler_policy": "guaranteed_no_evict"},
    "equal_progress": {"chunking_policy": "equal_progress"},
    "threshold 256": {"long_prefill_token_threshold": 256},
    "no chunks": {"enable_chunked_prefill": False},
    "no prefix cache": {"enable_prefix_caching": False},
}
CONSTANTS = {
    "overtaking_ratio": (chunking, "OVERTAKING_RATIO"),
    "spare_pages": (scheduler, "SPARE_PAGES_PER_RUNNING"),
}


@dataclass(order=True)
class Arrival:
    """One request: what is asked, and what the conversation it belongs to asks after it."""

    time: float
    prompt: array[int] = field(compare=False)
    num_output: int = field(compare=False)
    max_tokens: int = field(compare=False)
    follow_ups: list[tuple[float, int, int]] = field(default_factory=list, compare=False)
    """Seconds of thought after the answer, tokens of the next question, tokens of its answer."""


@dataclass
class Observed:
    """What a replay measured; times in seconds and in steps."""

    first_seconds: list[float] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    short_first_seconds: list[float] = field(default_factory=list)
    between_seconds: list[float] = field(default_factory=list)
    between_steps: list[int] = field(default_factory=list)
    pages_held: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_computed: int = 0
    num_needed: int = 0
    num_prompt: int = 0
    num_output: int = 0
    num_preemptions: int = 0
    num_cached: int = 0
    seconds: float = 0.0


class Traffic:
    """Makes traces; lengths are cut to what a sequence may have."""

    def __init__(self, seed: int, seconds: float, rate: float, max_seq_len: int) -> None:
        self.random = random.Random(seed)
        self.seconds = seconds
        self.rate = rate
        self.max_seq_len = max_seq_len
        self.next_token = itertools.count(1)

    def tokens(self, count: int) -> array[int]:
        """Tokens that occur nowhere else."""
        return array("i", itertools.islice(self.next_token, count))

    def length(self, median: float, sigma: float) -> int:
        """A log-normal number of tokens."""
        return max(
            1, min(self.max_seq_len // 2 - 1, round(self.random.lognormvariate(math.log(median), sigma)))
        )

    def arrival_times(self, rate: float) -> Iterator[float]:
        """A Poisson process."""
        now = self.random.expovariate(rate)
        while now < self.seconds:
            yield now
            now += self.random.expovariate(rate)

    def request(self, now: float, prompt: float = 1020, prompt_sigma: float = 0.5) -> Arrival:
        """One request of its own; its client asks for up to four times of what will come."""
        num_prompt, num_output = self.length(prompt, prompt_sigma), self.length(129, 0.99)
        limit = self.max_seq_len - num_prompt
        max_tokens = min(limit, max(num_output, self.random.choice([256, 512, 4 * num_output])))
        return Arrival(now, self.tokens(num_prompt), min(num_output, max_tokens), max_tokens)

    def poisson(self) -> list[Arrival]:
        """Independent arrivals."""
        return [self.request(now) for now in self.arrival_times(self.rate)]

    def bursts(self) -> list[Arrival]:
        """The same mean rate, 40 at a time."""
        return [
            self.request(now + self.random.random())
            for now in self.arrival_times(self.rate / 40)
            for _ in range(40)
        ]

    def tail(self) -> list[Arrival]:
        """Short questions and, one in ten, a long document."""
        return [
            self.request(now, 6000, 0.3) if self.random.random() < 0.1 else self.request(now, 60, 0.8)
            for now in self.arrival_times(self.rate)
        ]

    def chat(self) -> list[Arrival]:
        """Conversations of about five turns; the rate counts turns."""
        system = self.tokens(400)
        arrivals = []
        for now in self.arrival_times(self.rate / 5):
            turns = [
                (self.random.expovariate(1 / 20), self.length(60, 0.8), self.length(129, 0.6))
                for _ in range(self.random.randint(2, 8))
            ]
            _, question, answer = turns.pop(0)
            arrivals.append(Arrival(now, system + self.tokens(question), answer, max(answer, 512), turns))
        return arrivals


class Replay:
    """One run of a trace: an event loop whose time is the sum of the steps' modelled times."""

    def __init__(
        self, config: EngineConfig, num_pages: int, step_seconds: float, token_seconds: float
    ) -> None:
        self.pool = PagePool(num_pages, config.page_size, config.enable_prefix_caching)
        self.scheduler = scheduler.Scheduler(config, self.pool)
        self.max_num_tokens = config.max_num_tokens
        self.can_chunk = config.enable_chunked_prefill
        self.step_seconds = step_seconds
        self.token_seconds = token_seconds
        self.now = 0.0
        self.observed = Observed()
        self.asked: dict[Sequence, Arrival] = {}
        self.last_token: dict[Sequence, tuple[float, int]] = {}
        self.next_output = itertools.count(-1, -1)

    def run(self, arrivals: list[Arrival]) -> Observed:
        """Serve all arrivals to their ends."""
        self.events = list(arrivals)
        heapq.heapify(self.events)
        while self.events or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now = max(self.now, self.events[0].time)
            while self.events and self.events[0].time <= self.now:
                self.submit(heapq.heappop(self.events))
            if self.scheduler.has_work:
                self.step()
        self.observed.seconds = self.now
        self.observed.num_preemptions = self.scheduler.num_preemptions
        self.observed.num_cached = self.scheduler.num_prefix_cached_tokens
        return self.observed

    def submit(self, arrival: Arrival) -> None:
        """Queue a request, unless it would be refused: a prompt that needs chunks where there are none."""
        if not self.can_chunk and len(arrival.prompt) > self.max_num_tokens:
            return
        sequence = Sequence(
            "",
            arrival.prompt,
            SAMPLING,
            max_num_tokens=len(arrival.prompt) + arrival.max_tokens,
            arrival_time=arrival.time,
        )
        self.asked[sequence] = arrival
        self.last_token[sequence] = (arrival.time, self.observed.num_steps)
        self.scheduler.add(sequence)

    def step(self) -> None:
        """Plan, let the modelled time pass, take in the new tokens."""
        plan = self.scheduler.plan()
        self.now += self.step_seconds + plan.num_tokens * self.token_seconds
        self.observed.num_steps += 1
        self.observed.num_computed += plan.num_tokens
        self.observed.pages_held.append(self.pool.num_held / self.pool.num_total)
        sampling = [item.sequence for item in plan.ranges if item.samples]
        self.scheduler.advance(plan)
        for sequence in sampling:
            self.take_token(sequence)

    def take_token(self, sequence: Sequence) -> None:
        """Note how long a token took, and end the sequence with its last."""
        seen, asked = self.observed, self.asked[sequence]
        before, step_before = self.last_token[sequence]
        if sequence.num_output_tokens == 0:
            seen.first_seconds.append(self.now - before)
            seen.first_steps.append(seen.num_steps - step_before)
            if sequence.num_prompt_tokens <= 200:
                seen.short_first_seconds.append(self.now - before)
        else:
            seen.between_seconds.append(self.now - before)
            seen.between_steps.append(seen.num_steps - step_before)
        self.last_token[sequence] = (self.now, seen.num_steps)
        self.scheduler.append_token(sequence, next(self.next_output))
        if sequence.num_output_tokens >= asked.num_output:
            self.end(sequence, asked)

    def end(self, sequence: Sequence, asked: Arrival) -> None:
        """Finish a sequence and, in a conversation, let the user think about the next question."""
        self.scheduler.finish(sequence)
        self.observed.num_needed += sequence.num_tokens - 1 - sequence.num_cached
        self.observed.num_prompt += sequence.num_prompt_tokens
        self.observed.num_output += sequence.num_output_tokens
        del self.asked[sequence], self.last_token[sequence]
        if asked.follow_ups:
            thought, question, answer = asked.follow_ups[0]
            new_tokens = array("i", (next(self.next_output) for _ in range(question)))
            prompt = sequence.token_ids + new_tokens
            follow_up = Arrival(self.now + thought, prompt, answer, max(answer, 512), asked.follow_ups[1:])
            heapq.heappush(self.events, follow_up)


def percentile(values: list[float] | list[int], percent: int) -> float:
    """The nearest-rank percentile, NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else math.nan


def row(trace: str, name: str, seen: Observed) -> list[str]:
    """One line of the table."""
    wasted = seen.num_computed / max(1, seen.num_needed) - 1
    return [
        trace,
        name,
        str(len(seen.first_seconds)),
        f"{seen.num_output / seen.seconds:.0f}",
        f"{statistics.fmean(seen.pages_held):.0%}",
        str(seen.num_preemptions),
        f"{wasted:.1%}",
        f"{seen.num_cached / max(1, seen.num_prompt):.0%}",
        " / ".join(f"{percentile(seen.first_seconds, p):.2f}" for p in (50, 90, 99)),
        " / ".join(f"{percentile(seen.short_first_seconds, p):.2f}" for p in (50, 99)),
        " / ".join(f"{percentile(seen.first_steps, p):.0f}" for p in (50, 99)),
        " / ".join(f"{percentile(seen.between_seconds, p):.3f}" for p in (50, 99)),
        " / ".join(f"{percentile(seen.between_steps, p):.0f}" for p in (50, 99, 100)),
    ]


def new_table(title: str) -> Table:
    """The table of replays."""
    table = Table(title=title)
    for column in (
        "trace", "policy", "requests", "output tok/s", "pages held", "preempted", "recomputed", "cached",
        "TTFT s 50/90/99", "short ones' 50/99", "TTFT steps 50/99", "between s 50/99", "steps 50/99/max",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column in ("trace", "policy") else "right")
    return table


def cost_of_planning(num_running: int, num_waiting: int, can_start: bool) -> float:
    """Median microseconds that plan + advance take while sequences decode and others wait.

    Args:
        can_start: whether slots are free and only pages are short, so that the queue's head is looked at in each step.
    """
    config = EngineConfig.model_validate(
        {"model": "none", "max_batch_size": num_running + (64 if can_start else 0), "max_num_tokens": 2048}
    )
    pool = PagePool(num_running * 40, 16)
    subject = scheduler.Scheduler(config, pool)
    running = [new_sequence(index, 100, 500) for index in range(num_running)]
    for sequence in running:
        subject.add(sequence)
    while not all(sequence.num_output_tokens for sequence in running):
        take_step(subject)
    for index in range(num_waiting):
        subject.add(new_sequence(num_running + index, num_running * 40 * 16 - 600, 1))
    samples = []
    for _ in range(100):
        samples.append(take_step(subject))
    return statistics.median(samples) * 1e6


def take_step(subject: scheduler.Scheduler) -> float:
    """Seconds of plan + advance; then those that have come to their ends get a token each."""
    start = time.perf_counter()
    plan = subject.plan()
    sampling = [item.sequence for item in plan.ranges if item.samples]
    subject.advance(plan)
    seconds = time.perf_counter() - start
    for sequence in sampling:
        subject.append_token(sequence, sequence.num_tokens)
    return seconds


def new_sequence(index: int, num_prompt: int, max_tokens: int) -> Sequence:
    """A sequence that shares no prefix with another."""
    prompt = array("i", [index]) * num_prompt
    return Sequence("", prompt, SAMPLING, max_num_tokens=num_prompt + max_tokens, arrival_time=index)


def print_cost(console: Console) -> None:
    """The table of planning costs."""
    table = Table(
        title="plan + advance, µs per step (in brackets: with free slots and a queue that lacks pages)"
    )
    counts = (10, 100, 1_000, 10_000)
    for column in ("running", *(f"{count:,} waiting" for count in counts)):
        table.add_column(column, justify="right")
    for num_running in (8, 64, 256):
        cells = [
            f"{cost_of_planning(num_running, count, False):.0f} ({cost_of_planning(num_running, count, True):.0f})"
            for count in counts
        ]
        table.add_row(str(num_running), *cells)
    console.print(table)


def variants(
    compare: str | None, policies: list[str]
) -> list[tuple[str, dict[str, object], Callable[[], None]]]:
    """What to run: names, configurations, and what to set before."""
    if compare is None:
        return [(name, POLICIES[name], lambda: None) for name in policies]
    name, values = compare.split("=")
    module, constant = CONSTANTS[name]

    def setter(value: int) -> Callable[[], None]:
        return lambda: setattr(module, constant, value)

    return [(f"{name} = {value}", {}, setter(int(value))) for value in values.split(",")]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="of traffic in each replay (60)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second on average (1)")
    parser.add_argument("--traces", nargs="*", default=["poisson", "bursts", "tail", "chat"])
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument(
        "--compare", help=f"NAME=VALUE,VALUE,… instead of policies; NAME is of {', '.join(CONSTANTS)}"
    )
    parser.add_argument("--num-pages", type=int, default=3000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument("--max-num-tokens", type=int, default=2048)
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="a of a + b * tokens")
    parser.add_argument("--token-seconds", type=float, default=0.0004, help="b of a + b * tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cost", action="store_true", help="leave out the table of planning costs")
    return parser.parse_args()


def main() -> None:
    """Replay and print."""
    arguments = parse_arguments()
    console = Console()
    table = new_table(
        f"{arguments.minutes:g} minutes at {arguments.rate:g}/s, {arguments.num_pages:,} pages of {arguments.page_size}"
    )
    runs = list(itertools.product(arguments.traces, variants(arguments.compare, arguments.policies)))
    for trace, (name, values, prepare) in track(runs, "replaying", console=console, transient=True):
        config = EngineConfig.model_validate(
            {
                "model": "none",
                "page_size": arguments.page_size,
                "max_batch_size": arguments.max_batch_size,
                "max_num_tokens": arguments.max_num_tokens,
                **values,
            }
        )
        prepare()
        traffic = Traffic(arguments.seed, arguments.minutes * 60, arguments.rate, arguments.max_seq_len)
        replay = Replay(config, arguments.num_pages, arguments.step_seconds, arguments.token_seconds)
        table.add_row(*row(trace, name, replay.run(getattr(traffic, trace)())))
    console.print(table)
    if not arguments.no_cost:
        print_cost(console)


if __name__ == "__main__":
    main()
