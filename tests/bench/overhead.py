"""Where a decode step goes: scheduler, batch preparation, model, sampling, text; by default 64 running, 1,000 waiting.

The scheduler should take less than 3 % of a step, and everything outside model and sampling less than 5 %. "Step" is the
time of `Engine.step` without the clock's own calls; medians over the steps would not add up, so these are means.

    ./build.sh bench overhead
"""

from __future__ import annotations

import argparse
import time

from loads import Load
from report import CACHE_DIR, markdown_table, save, say
from stopwatch import Stopwatch

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.config import EngineConfig
from paged_engine.execution.runner import ModelRunner
from paged_engine.execution.sampling import PendingTokens, Sampler
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.tools.default_model import default_model

METHODS = {
    "scheduler: plan, advance, finish": [(Scheduler, name) for name in ("plan", "advance", "finish")],
    "model": [(ModelRunner, "execute")],
    "attention plan": [(CpuAttention, "plan"), (TorchAttention, "plan")],
    "sampling": [(Sampler, "launch"), (PendingTokens, "result")],
}
NUM_PROMPT_TOKENS = 128


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--running", type=int, default=64, help="sequences that decode (%(default)s)")
    parser.add_argument("--waiting", type=int, default=1000, help="sequences in the queue (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="measured (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine parameters")
    parser.add_argument("--quick", action="store_true", help="few sequences and steps, to try it out")
    options = parser.parse_args()
    if options.quick:
        options.running, options.waiting, options.steps = 4, 10, 5
    parameters = {
        "model": options.model or str(default_model(CACHE_DIR / "models")),
        "dtype": "bfloat16",
        "max_seq_len": "2048",
        "num_pages": "2048",
        "max_batch_size": str(options.running),
        **dict(item.split("=") for item in options.set),
    }
    say("loading the model")
    engine = load_engine(EngineConfig.from_parameters(parameters))
    prompts = Load(options.running + options.waiting, NUM_PROMPT_TOKENS, 1).prompts(seed=0)
    sampling = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(engine.prepare(GenerateRequest(str(index), prompt, sampling)))
    say(f"computing {options.running} prompts")
    while len(engine.step()) < options.running:
        pass
    for _ in range(3):
        engine.step()
    say(f"timing {options.steps} steps")
    with Stopwatch(METHODS) as watch:
        began = time.perf_counter()
        for _ in range(options.steps):
            engine.step()
        step = (time.perf_counter() - began) / options.steps
    statistics = engine.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (options.running, options.waiting)

    parts = {name: seconds / options.steps for name, seconds in watch.seconds.items()}
    parts["model"] -= parts["attention plan"]
    parts["batch preparation, text, the rest"] = step - sum(parts.values())
    outside = step - parts["model"] - parts["sampling"]
    rows = [[name, f"{seconds * 1e3:.2f}", f"{seconds / step:.1%}"] for name, seconds in parts.items()]
    rows += [
        ["outside model and sampling", f"{outside * 1e3:.2f}", f"{outside / step:.1%}"],
        ["step", f"{step * 1e3:.2f}", "100.0%"],
    ]
    title = f"{options.running} running, {options.waiting:,} waiting"
    print(f"\n{markdown_table([title, 'ms/step', 'share'], rows)}\n")
    results = {"parameters": parameters, "running": options.running, "waiting": options.waiting}
    print(f"kept in {save('overhead', {**results, 'step_seconds': step, 'parts_seconds': parts})}")


if __name__ == "__main__":
    main()
