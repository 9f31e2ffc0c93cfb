"""The double's sampling: what the real kernels draw from, and what they demand.

One operator, like the kernels of flashinfer_kernels.py: it reads its tensors when it runs.
"""

from __future__ import annotations

import torch
from flashinfer_kernels import demand


@torch.library.custom_op("flashinfer_double::draw", mutates_args=())
def draw(
    probs: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor, seed: int, offset: int
) -> torch.Tensor:
    """int32 [rows]: a token of each row, by random numbers of its own."""
    demand(probs.dtype == torch.float32 and probs.dim() == 2, "probabilities are float32 rows")
    demand(probs.is_contiguous(), "rows lie one behind the other")
    # The first draw of a row is among probabilities up to 1, and a row without any is looked at before its beginning.
    demand(bool(((probs.sum(dim=-1) - 1).abs() < 1e-3).all() and (probs >= 0).all()), "a row's sum is 1")
    demand(top_p.dtype == torch.float32 and top_p.shape == probs.shape[:1], "one top_p for each row")
    # Compiled with fast math they take what is less for zero, and draw for ever.
    least = torch.finfo(torch.float32).tiny
    demand(bool((top_p >= least).all() and (top_p <= 1).all()), f"{least} <= top_p <= 1")
    demand(0 <= seed < 2**63 and 0 <= offset < 2**63, "seed and offset are 64-bit numbers")
    weights = probs.double()
    if top_k is not None:
        demand(top_k.dtype == torch.int32 and top_k.shape == probs.shape[:1], "one top_k for each row")
        demand(bool((top_k > 0).all()), "top_k is at least 1; the vocabulary and more is off")
        index = top_k.long().clamp(max=probs.shape[1])[:, None] - 1
        weights[weights < weights.sort(dim=-1, descending=True).values.gather(1, index)] = 0
        weights /= weights.sum(dim=-1, keepdim=True)
    values = weights.sort(dim=-1, descending=True).values
    cumulative = values.cumsum(dim=-1)
    # The sum of what is heavier, ties aside: the sum before the first of equals.
    first_of_equals = torch.searchsorted(-values, -weights)
    heavier = torch.nn.functional.pad(cumulative, (1, 0)).gather(1, first_of_equals)
    weights[heavier >= top_p[:, None]] = 0
    uniforms = torch.rand(
        len(probs), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + offset)
    )
    cumulative = weights.cumsum(dim=-1)
    return (cumulative > uniforms * cumulative[:, -1:]).int().argmax(dim=-1).int()


@draw.register_fake
def _(
    probs: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor, seed: int, offset: int
) -> torch.Tensor:
    return probs.new_empty(len(probs), dtype=torch.int32)


def top_p_sampling_from_probs(
    probs: torch.Tensor, top_p: torch.Tensor, *, seed: int | None = None, offset: int | None = None
) -> torch.Tensor:
    """Draw from the tokens of which the heavier ones weigh less than top_p."""
    return draw(probs, None, top_p, *_given(seed, offset))


def top_k_top_p_sampling_from_probs(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    seed: int | None = None,
    offset: int | None = None,
) -> torch.Tensor:
    """The same among the top_k heaviest tokens and their equals, whose probabilities are made to sum to 1 before."""
    return draw(probs, top_k, top_p, *_given(seed, offset))


def _given(seed: int | None, offset: int | None) -> tuple[int, int]:
    if seed is None or offset is None:
        raise ValueError("without both, the real ones move torch's own generator")
    return seed, offset
