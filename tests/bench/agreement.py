"""How far the greedy outputs of two engines go together."""

from __future__ import annotations

from collections.abc import Sequence


def leading_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two outputs have in common before they part."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def agreement(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> str:
    """How far two engines' answers go together: the share of tokens before they part, and how many never do."""
    pairs = list(zip(one, other, strict=True))
    num_common = sum(leading_tokens(*pair) for pair in pairs)
    num_equal = sum(a == b for a, b in pairs)
    return f"{num_common / sum(map(len, one)):.0%}, {num_equal} of {len(pairs)}"
