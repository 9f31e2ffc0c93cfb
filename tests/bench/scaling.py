"""How a decode step grows: with the number of sequences at one context, and with the context at one number of sequences.

Steps are timed in which every sequence decodes one token, greedy, everything included. Contexts are prompts of random tokens;
a longer one continues the shorter one before it, so that the prefix cache saves most of the prefill, which is not timed.

    ./build.sh bench scaling
    ./build.sh bench scaling --batches 1,8,64 --contexts 100,1000 --set weight_dtype=int8
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from loads import VOCABULARY
from report import CACHE_DIR, markdown_table, save, say

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.scheduling.sequence import FinishReason
from paged_engine.tools.default_model import default_model

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (100, 500, 1000, 2000, 4000, 8000)
BASE_CONTEXT = 100
"""At which the number of sequences grows."""
CONTEXT_BATCHES = (1, 8)
"""Numbers of sequences at which the context grows."""
NUM_WARM_UP_STEPS = 3
MAX_SEQ_LEN = 8192


def decode_step_seconds(engine: Engine, num_sequences: int, context: int, num_steps: int) -> float:
    """Median time of a step of `num_sequences` decoding sequences whose contexts begin at `context` tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=MAX_SEQ_LEN - context, ignore_eos=True)
    request_ids = [str(index) for index in range(num_sequences)]
    for request_id in request_ids:
        prompt = random.Random(int(request_id)).choices(VOCABULARY, k=context)
        engine.add(engine.prepare(GenerateRequest(request_id, prompt, sampling)))
    while len(engine.step()) < num_sequences:
        pass  # prompts are computed in chunks: until all sequences decode
    times = []
    for _ in range(NUM_WARM_UP_STEPS + num_steps):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    for request_id in request_ids:
        engine.abort(request_id, FinishReason.TIMEOUT)
    return statistics.median(times[NUM_WARM_UP_STEPS:])


def numbers(text: str) -> tuple[int, ...]:
    """Read "1,2,4"."""
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--batches", type=numbers, default=BATCHES, help=f"at context {BASE_CONTEXT}")
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, help=f"at batch {CONTEXT_BATCHES}")
    parser.add_argument("--steps", type=int, default=20, help="timed for each figure (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine parameters")
    parser.add_argument("--quick", action="store_true", help="few and small ones, to try it out")
    options = parser.parse_args()
    if options.quick:
        options.batches, options.contexts, options.steps = (1, 4), (100, 300), 3
    most_tokens = max(
        max(CONTEXT_BATCHES) * (max(options.contexts) + 200), max(options.batches) * (BASE_CONTEXT + 100)
    )
    parameters: dict[str, str] = {
        "model": options.model or str(default_model(CACHE_DIR / "models")),
        "dtype": "bfloat16",
        "max_seq_len": str(MAX_SEQ_LEN),
        "max_batch_size": str(max(*options.batches, *CONTEXT_BATCHES)),
        "num_pages": str(max(MAX_SEQ_LEN, most_tokens) // 16 + 64),
        **dict(item.split("=") for item in options.set),
    }
    say("loading the model")
    engine = load_engine(EngineConfig.from_parameters(parameters))
    pairs = [(batch, BASE_CONTEXT) for batch in options.batches]
    pairs += [(batch, context) for batch in CONTEXT_BATCHES for context in options.contexts]
    figures: dict[tuple[int, int], float] = {}
    for batch, context in dict.fromkeys(pairs):
        say(f"{batch} sequences, context {context}")
        figures[batch, context] = decode_step_seconds(engine, batch, context, options.steps)

    def row(label: str, seconds: float, batch: int) -> list[str]:
        return [label, f"{seconds * 1000:.1f}", f"{batch / seconds:,.0f}"]

    rows = [row(str(batch), figures[batch, BASE_CONTEXT], batch) for batch in options.batches]
    print(f"\n{markdown_table([f'sequences, context {BASE_CONTEXT}', 'ms/step', 'tokens/s'], rows)}\n")
    for batch in CONTEXT_BATCHES:
        rows = [row(f"{context:,}", figures[batch, context], batch) for context in options.contexts]
        print(f"{markdown_table([f'context, {batch} sequence(s)', 'ms/step', 'tokens/s'], rows)}\n")
    steps: list[dict[str, Any]] = [
        {"batch": batch, "context": context, "seconds": seconds}
        for (batch, context), seconds in figures.items()
    ]
    print(f"kept in {save('scaling', {'parameters': parameters, 'steps': steps})}")


if __name__ == "__main__":
    main()
