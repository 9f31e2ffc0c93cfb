"""Draws tokens with FlashInfer's sampling kernels, on a GPU, for sequences whose request gave no seed.

They neither sort a vocabulary nor select from it: a kernel draws from a whole row, rejects what the filters remove, and draws
again, all within one launch (the package's `sampling` functions, the same in flashinfer-python 0.6 and 0.7). The filters are
those of token_choice.py in the same order, with two differences: where several tokens equal the last one that top-p keeps, all
of them are kept, not the lower ids alone; and a row's random numbers depend on its place in the batch as well. Hence sequences
that were given a seed are drawn by token_choice.py, whatever else there is in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from paged_engine.execution.random_stream import RandomStreams
from paged_engine.execution.token_choice import RandomControls, relative_weights
from paged_engine.execution.transfer import to_device

_log = logging.getLogger(__name__)

_LEAST_TOP_P = float(np.finfo(np.float32).tiny)
"""What is less is zero to the kernels. No token satisfies that, and they never end."""
_TRIAL = np.array([0.5, 0.25, 0.15, 0.1])
"""Probabilities of the only tokens that the trial may draw."""
_TRIALS: tuple[tuple[Mapping[str, float], tuple[float, ...]], ...] = (
    ({}, (0.5, 0.25, 0.15, 0.1)),
    ({"top_p": 0.7}, (2 / 3, 1 / 3, 0, 0)),
    ({"min_p": 0.25}, (5 / 9, 2.5 / 9, 1.5 / 9, 0)),
    ({"top_k": 3}, (5 / 9, 2.5 / 9, 1.5 / 9, 0)),
    ({"top_k": 3, "top_p": 0.8}, (2 / 3, 1 / 3, 0, 0)),
)
"""Filters, and what they make of those probabilities."""
_TRIAL_ROWS, _TRIAL_STEPS = 32, 16
_TOLERANCE = 0.12
"""Of a frequency among so many draws; five times its standard deviation."""


class FlashInferDraw:
    """Does what token_choice.draw does, by other random numbers."""

    def __init__(self, library: Any, device: torch.device) -> None:
        """`library` is the module flashinfer, or what behaves like it."""
        self._library = library
        # Kernels that are not torch's go to the thread's current device, whatever their tensors' is.
        self._current_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def __call__(self, logits: torch.Tensor, controls: RandomControls) -> torch.Tensor:
        """Draw a token for each row.

        Args:
            logits: float32 [rows, vocab_size]; -inf is never drawn. A row whose largest logit is not finite gets any token.
            controls: of the same rows.

        Returns:
            int64 [rows].
        """
        vocab_size = logits.shape[1]
        inverse_temperature, min_p, top_k, top_p = to_device(
            logits.device,
            (1 / controls.temperature).astype(np.float32),
            controls.min_p,
            controls.top_k.astype(np.int32),
            np.maximum(controls.top_p, _LEAST_TOP_P).astype(np.float32),
        )
        probabilities = relative_weights(logits, inverse_temperature)
        if (controls.min_p > 0).any():
            probabilities.masked_fill_(probabilities < min_p[:, None], 0)
        probabilities.div_(probabilities.sum(dim=-1, keepdim=True))
        # The kernels of some versions look before the row where it holds no probability at all.
        probabilities.nan_to_num_(nan=1 / vocab_size)
        # A number that no other step has: those of its first row, of which no other step draws the same position.
        seed = int(controls.streams.select(np.array([0])).uniforms()[0] * 2.0**53)
        with self._current_device:
            if (controls.top_k < vocab_size).any():
                drawn = self._library.top_k_top_p_sampling_from_probs(
                    probabilities, top_k, top_p, seed=seed, offset=0
                )
            else:
                drawn = self._library.top_p_sampling_from_probs(probabilities, top_p, seed=seed, offset=0)
        token_ids: torch.Tensor = drawn.long()
        return token_ids


def load_flashinfer_draw(library: Any, vocab_size: int, device: torch.device) -> FlashInferDraw | None:
    """Make one, where a trial shows that it draws what it should; otherwise None, and a line in the log says why.

    The kernels are compiled now where they are not yet, which takes a minute.
    """
    draw = FlashInferDraw(library, device)
    try:
        fault = _fault(draw, vocab_size, device)
    except Exception as error:  # no compiler, an unsupported GPU, …
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return draw
    _log.warning(
        "FlashInfer's sampling is not used, torch's operations draw tokens in its place, more slowly: %s",
        fault,
    )
    return None


def _fault(draw: FlashInferDraw, vocab_size: int, device: torch.device) -> str | None:
    """What is wrong with what it draws from rows of few possible tokens, if anything."""
    if vocab_size < len(_TRIAL):
        return f"a vocabulary of {vocab_size} tokens is too small to try it out"
    token_ids = np.linspace(0, vocab_size - 1, len(_TRIAL)).astype(np.int64)
    row = torch.full((vocab_size,), -torch.inf)
    row[torch.from_numpy(token_ids)] = torch.from_numpy(np.log(_TRIAL)).float() * 2
    rows = row.to(device).repeat(_TRIAL_ROWS, 1)
    for filters, expected in _TRIALS:
        counts = np.zeros(vocab_size, np.int64)
        for step in range(_TRIAL_STEPS):
            drawn = draw(rows, _trial_controls(vocab_size, step, **filters)).cpu().numpy()
            counts += np.bincount(drawn, minlength=vocab_size)
        frequencies = counts[token_ids] / counts.sum()
        if not np.allclose(frequencies, expected, rtol=0, atol=_TOLERANCE) or frequencies.sum() < 1:
            return f"with {dict(filters)} it draws {frequencies.round(2)} instead of {np.round(expected, 2)}"
        if frequencies[np.array(expected) == 0].any():
            return f"with {dict(filters)} it draws tokens that the filters remove"
    rows[0], rows[1, 0], rows[2, 0] = -torch.inf, torch.nan, torch.inf
    drawn = draw(rows, _trial_controls(vocab_size, 0, top_k=3, top_p=0.9)).cpu().numpy()
    if drawn.min() < 0 or drawn.max() >= vocab_size:
        return "from rows that are not finite it draws what is no token"
    return None


def _trial_controls(
    vocab_size: int, step: int, *, top_k: float = 0, top_p: float = 1, min_p: float = 0
) -> RandomControls:
    """The same for all rows."""
    zeros = np.zeros(_TRIAL_ROWS, np.uint64)
    return RandomControls(
        temperature=np.full(_TRIAL_ROWS, 2.0),
        min_p=np.full(_TRIAL_ROWS, min_p, np.float32),
        top_k=np.full(_TRIAL_ROWS, min(top_k or vocab_size, vocab_size), np.int64),
        top_p=np.full(_TRIAL_ROWS, top_p),
        streams=RandomStreams(seeds=zeros, indices=zeros, positions=zeros + np.uint64(step)),
    )
