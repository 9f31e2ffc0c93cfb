"""Time to the first token of a second request that shares a long prefix, with the prefix cache and without it.

Two engines over the same checkpoint take turns. Each pair of requests is of random tokens: the first brings the prefix, the
second, which is timed, has the same prefix and an end of its own. With the cache it should be 5 times as quick at least.

    ./build.sh bench prefix
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from loads import VOCABULARY
from report import CACHE_DIR, markdown_table, save, say

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.tools.default_model import default_model

NUM_OWN_TOKENS = 20
"""Tokens that a request has after the prefix."""


def first_token_seconds(engine: Engine, prompt: list[int]) -> float:
    """Time from the request to its first token, which is also its last."""
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    began = time.perf_counter()
    engine.add(engine.prepare(GenerateRequest("prefix", prompt, sampling)))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="checkpoint; the packaged SmolLM2-135M-Instruct by default")
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="that are shared (%(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="of which the median counts (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="engine parameters")
    parser.add_argument("--quick", action="store_true", help="one pair with a short prefix, to try it out")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.prefix_tokens = 1, 200
    parameters = {
        "model": options.model or str(default_model(CACHE_DIR / "models")),
        "dtype": "bfloat16",
        "num_pages": "1024",
        **dict(item.split("=") for item in options.set),
    }
    engines = {}
    for cache in ("true", "false"):
        say(f"loading the model with enable_prefix_caching {cache}")
        config = EngineConfig.from_parameters({**parameters, "enable_prefix_caching": cache})
        engines[cache] = load_engine(config)
    times: dict[str, list[float]] = {cache: [] for cache in engines}
    chance = random.Random(0)
    for number in range(options.pairs + 1):  # the first warms up
        prefix, *ends = (
            chance.choices(VOCABULARY, k=k) for k in (options.prefix_tokens, *[NUM_OWN_TOKENS] * 2)
        )
        for cache, engine in engines.items():
            first, second = (first_token_seconds(engine, prefix + end) for end in ends)
            say(f"prefix cache {cache}: first request {first * 1000:.0f} ms, second {second * 1000:.0f} ms")
            if number:
                times[cache].append(second)
    median = {cache: statistics.median(values) for cache, values in times.items()}
    reused = {
        cache: engine.statistics().num_prefix_cached_tokens // (options.pairs + 1)
        for cache, engine in engines.items()
    }
    rows = [
        [
            f"prefix cache {name}",
            f"{median[cache] * 1e3:.1f}",
            f"{min(times[cache]) * 1e3:.1f}",
            f"{reused[cache]:,}",
        ]
        for name, cache in (("on", "true"), ("off", "false"))
    ]
    title = f"TTFT of a second request, {options.prefix_tokens:,} tokens shared"
    print(f"\n{markdown_table([title, 'ms, median', 'ms, least', 'tokens not computed'], rows)}\n")
    print(
        f"with the cache: {median['false'] / median['true']:.1f} times as quick (medians of {options.pairs})"
    )
    print(f"kept in {save('prefix', {'parameters': parameters, 'second_request_seconds': times})}")


if __name__ == "__main__":
    main()
