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
import itertools
import math
import statistics
import time
from array import array
from collections.abc import Callable

from replay import Observed, Replay
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traffic import Traffic

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
