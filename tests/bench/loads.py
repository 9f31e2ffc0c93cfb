"""The loads that benchmarks share: how many requests at once, with prompts and outputs of which length."""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = range(10, 49_000)
"""Token ids that prompts are drawn from: SmolLM2's, without those that have a special meaning."""


@dataclass(frozen=True)
class Load:
    """So many requests at once, each with a prompt and an output of so many tokens."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def name(self) -> str:
        """As in tables: requests x prompt + output."""
        return f"{self.num_requests} x {self.num_prompt_tokens}+{self.num_output_tokens}"

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that its throughput counts: those of the outputs, or all where each output is a single token."""
        if self.num_output_tokens == 1:
            return self.num_requests * (self.num_prompt_tokens + 1)
        return self.num_requests * self.num_output_tokens

    def prompts(self, seed: int) -> list[list[int]]:
        """Random token ids, the same for the same load and seed; no two share a prefix, so no prefix cache helps."""
        chance = random.Random(f"{self.name}, {seed}")
        return [chance.choices(VOCABULARY, k=self.num_prompt_tokens) for _ in range(self.num_requests)]

    def shortened(self) -> Load:
        """A small load of the same kind, to try a benchmark out."""
        return Load(
            min(self.num_requests, 4), min(self.num_prompt_tokens, 64), min(self.num_output_tokens, 8)
        )


LOADS = (Load(1, 32, 128), Load(8, 32, 128), Load(32, 128, 128), Load(64, 128, 64), Load(8, 1024, 1))
"""From one stream to many; the last is nothing but prefill."""


def choose_loads(quick: bool) -> tuple[Load, ...]:
    """The loads of a benchmark, shortened ones for a quick trial."""
    return tuple(dict.fromkeys(load.shortened() for load in LOADS)) if quick else LOADS
