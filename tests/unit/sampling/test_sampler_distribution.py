"""What the sampler draws has the distribution that transformers' processors and warpers give: chi-square tests.

Each case draws 10,000 tokens with the seeds 0, 1, 2, … at one position, or at the positions of one seed, and compares the counts
with transformers' probabilities at the level 0.001. The seeds are fixed, so a case passes always or never.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_helpers import distribution_of_transformers, make_sequence, sample_tokens, with_seeds

VOCAB_SIZE = 64
NUM_DRAWS = 10_000
LEVEL = 0.001
PROMPT, OUTPUT = [1, 5, 9, 9], [30, 9, 30, 31]
BAD_WORDS = [[17], [30, 31, 8], [5, 5]]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature low": {"temperature": 0.5},
    "temperature high": {"temperature": 4.0},
    "top-k": {"top_k": 10},
    "top-p": {"top_p": 0.85},
    "top-p small": {"top_p": 0.2, "temperature": 2.0},
    "min-p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {3: 4.0, 4: -2.0}},
    "bad words": {"bad_word_ids": BAD_WORDS},
    "min tokens": {"min_tokens": 6, "stop_token_ids": [9]},
    "top-k and top-p": {"top_k": 20, "top_p": 0.8},
    "min-p and top-p": {"min_p": 0.02, "top_p": 0.9, "temperature": 1.5},
    "everything": {
        "temperature": 1.3,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 4.0, 40: 1.0},
        "bad_word_ids": BAD_WORDS,
        "min_tokens": 6,
    },
}
ROW = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(4)) * 2


def assert_fits(tokens: list[int], expected: torch.Tensor) -> None:
    """Pearson's chi-square test; cells that expect fewer than 5 are taken together."""
    counts = torch.tensor(tokens).bincount(minlength=VOCAB_SIZE).double()
    assert not counts[expected == 0].any()
    expected = expected * len(tokens)
    small = expected < 5
    pooled_counts = torch.cat((counts[~small], counts[small].sum()[None]))
    pooled = torch.cat((expected[~small], expected[small].sum()[None]))
    used = pooled > 0
    statistic = ((pooled_counts - pooled) ** 2 / pooled)[used].sum()
    degrees = torch.tensor(float(max(int(used.sum()) - 1, 1)))
    probability = torch.special.gammaincc(degrees / 2, statistic.float() / 2)
    assert probability > LEVEL, f"chi-square {statistic:.1f} of {degrees:.0f} degrees of freedom"


@pytest.mark.parametrize("name", CASES)
def test_one_control_or_mixture_over_many_seeds(name: str) -> None:
    controls = CASES[name]
    sequences = [
        make_sequence(VOCAB_SIZE, PROMPT, OUTPUT, seed=seed, **controls) for seed in range(NUM_DRAWS)
    ]
    expected = distribution_of_transformers(ROW, sequences[0], controls.get("bad_word_ids", ()))
    assert_fits(sample_tokens(ROW.repeat(NUM_DRAWS, 1), sequences), expected)


def test_all_cases_mixed_in_each_batch() -> None:
    num_draws, per_batch = 4_000, 50
    requests = {
        name: make_sequence(VOCAB_SIZE, PROMPT, OUTPUT, **controls) for name, controls in CASES.items()
    }
    tokens: dict[str, list[int]] = {name: [] for name in CASES}
    for start in range(0, num_draws, per_batch):
        drawn = {
            name: with_seeds(request, range(start, start + per_batch)) for name, request in requests.items()
        }
        batch = [sequence for together in zip(*drawn.values(), strict=True) for sequence in together]
        chosen = sample_tokens(ROW.repeat(len(batch), 1), batch)
        for place, name in enumerate(CASES):
            tokens[name] += chosen[place :: len(CASES)]
    for name, request in requests.items():
        assert_fits(
            tokens[name], distribution_of_transformers(ROW, request, CASES[name].get("bad_word_ids", ()))
        )


@pytest.mark.parametrize("name", ["plain", "top-p", "top-k"])
def test_the_positions_of_one_seed(name: str) -> None:
    """The stream of a single long generation is as good as that of many seeds."""
    sequence = make_sequence(VOCAB_SIZE, PROMPT, seed=42, **CASES[name])
    tokens = []
    for _ in range(1_000):
        tokens += sample_tokens(ROW[None], [sequence])
        sequence.token_ids.append(0)
    assert_fits(tokens, distribution_of_transformers(ROW, make_sequence(VOCAB_SIZE, PROMPT, **CASES[name])))
