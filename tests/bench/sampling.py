"""What choosing the tokens of a step costs, by rows, vocabulary and controls, alone and as a share of a decode step.

Logits are random with the spread of a small chat model's; each row has a history of 512 prompt and 64 generated tokens. With
`--model` the checkpoint is loaded, decode steps of its are timed at each number of rows (greedy, contexts of about 128 tokens),
and the share of a step is given for the checkpoint's own vocabulary.

    python tests/bench/sampling.py
    python tests/bench/sampling.py --rows 1,64 --vocabularies 49152 --repeats 100
    python tests/bench/sampling.py --model FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoConfig

from paged_engine.config import EngineConfig
from paged_engine.constraints import TokenConstraints
from paged_engine.engine import Engine
from paged_engine.execution.sampling import Sampler
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.scheduling.sequence import Sequence

CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"11": 2.0, "12": -2.0},
        "min_tokens": 10_000,
        "logprobs": 5,
    },
}
EOS_TOKEN_IDS = frozenset({2})
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 512, 64
NUM_DECODE_STEPS = 15


def median_ms(run: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> float:
    """Median wall time of `run` after one warm-up; `prepare` runs before each and is not counted."""
    times = []
    for _ in range(repeats + 1):
        prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1000


def make_sequences(num_rows: int, vocab_size: int, controls: dict[str, Any]) -> list[Sequence]:
    """Rows with a history, each with its own seed."""
    sampling = SamplingParams.parse(controls)
    constraints = TokenConstraints.resolve(sampling, vocab_size, EOS_TOKEN_IDS)
    generator = torch.Generator().manual_seed(0)
    sequences = []
    for row in range(num_rows):
        tokens = torch.randint(
            vocab_size, (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS,), generator=generator
        ).tolist()
        prompt, output = tokens[:NUM_PROMPT_TOKENS], tokens[NUM_PROMPT_TOKENS:]
        sequence = Sequence(
            str(row), prompt, sampling, max_num_tokens=100_000, seed=row, constraints=constraints
        )
        sequence.token_ids.extend(output)
        sequences.append(sequence)
    return sequences


def time_sampling(num_rows: int, vocab_size: int, controls: dict[str, Any], repeats: int) -> float:
    """Milliseconds to choose one token for each row."""
    sampler = Sampler(vocab_size)
    sequences = make_sequences(num_rows, vocab_size, controls)
    original = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    logits = original.clone()
    return median_ms(lambda: sampler.sample(logits, sequences), repeats, lambda: logits.copy_(original))


def time_decode_step(engine: Engine, num_rows: int) -> float:
    """Milliseconds of one greedy decode step of `num_rows` sequences, sampling and detokenizing included."""
    num_prompt_tokens = 128
    sampling = SamplingParams(temperature=0, max_tokens=NUM_DECODE_STEPS + 20, ignore_eos=True)
    for row in range(num_rows):
        prompt = [(7 * row + 3 * position) % 1000 + 10 for position in range(num_prompt_tokens)]
        engine.add(engine.prepare(GenerateRequest(f"{num_rows}-{row}", prompt, sampling)))
    while len(engine.step()) < num_rows:
        pass  # prompts are computed in chunks: until all sequences decode
    step_ms = median_ms(engine.step, NUM_DECODE_STEPS)
    while engine.has_work:
        engine.step()
    return step_ms


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,64", help="numbers of sequences in a step")
    parser.add_argument("--vocabularies", default="49152,151936", help="sizes of the vocabulary")
    parser.add_argument(
        "--repeats", type=int, default=20, help="runs per figure, of which the median is printed"
    )
    parser.add_argument("--model", help="a checkpoint folder: also print the share of its decode step")
    options = parser.parse_args()
    console = Console()
    all_rows = [int(value) for value in options.rows.split(",")]
    vocabularies = [int(value) for value in options.vocabularies.split(",")]

    step_ms: dict[int, float] = {}
    model_vocab_size = None
    if options.model:
        engine = load_engine(EngineConfig(model=options.model, max_batch_size=max(all_rows), max_seq_len=512))
        model_vocab_size = AutoConfig.from_pretrained(options.model).get_text_config().vocab_size
        for num_rows in track(all_rows, "decode steps", console=console, transient=True):
            step_ms[num_rows] = time_decode_step(engine, num_rows)
        del engine
        if model_vocab_size not in vocabularies:
            vocabularies.append(model_vocab_size)

    table = Table(
        title=f"Sampling, ms per step (median of {options.repeats}, {torch.get_num_threads()} threads)"
    )
    table.add_column("controls")
    for vocab_size in vocabularies:
        for num_rows in all_rows:
            table.add_column(f"{num_rows} x\n{vocab_size:,}", justify="right")
    cells = [(name, size, rows) for name in CONTROLS for size in vocabularies for rows in all_rows]
    figures = {
        cell: time_sampling(cell[2], cell[1], CONTROLS[cell[0]], options.repeats)
        for cell in track(cells, "sampling", console=console, transient=True)
    }
    for name in CONTROLS:
        row = []
        for vocab_size in vocabularies:
            for num_rows in all_rows:
                spent = figures[name, vocab_size, num_rows]
                share = ""
                if vocab_size == model_vocab_size:
                    others = step_ms[num_rows] - figures["greedy", vocab_size, num_rows]
                    share = f"\n{spent / (others + spent):.1%}"
                row.append(f"{spent:.2f}{share}")
        table.add_row(name, *row)
    console.print(table)
    for num_rows, spent in step_ms.items():
        console.print(
            f"A greedy decode step of {num_rows} sequences takes {spent:.1f} ms; shares above are of such a step."
        )


if __name__ == "__main__":
    main()
