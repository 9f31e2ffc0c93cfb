"""Sampler: turns the logits of a step into one token per sequence, without waiting for the device.

The steps, in vLLM's order (vllm/v1/sample/sampler.py): log-probabilities of the raw logits; grammars; allowed tokens, bad words,
min_tokens and logit_bias; repetition, frequency and presence penalties; then the most likely token for greedy rows, and
temperature, min-p, top-k and top-p for the others.

A row's token depends on its logits and its sequence alone. The sampler keeps no state between steps: random numbers are a
function of the sequence's seed and of how many tokens it has generated, penalties of its tokens. So a sequence's result is the
same in any batch, in any slot, and after any preemption. Only where its request gave no seed, so that nobody can tell, kernels
may draw whose random numbers depend on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from paged_engine.errors import RequestError
from paged_engine.execution.logits_processors import (
    apply_constraints,
    apply_grammars,
    apply_penalties,
)
from paged_engine.execution.logprobs import PendingScores, SampledToken, TokenLogprob
from paged_engine.execution.random_stream import RandomStreams
from paged_engine.execution.token_choice import RandomControls, draw, most_likely
from paged_engine.execution.transfer import HostCopies, to_device
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import Sequence

__all__ = ["SampledToken", "Sampler", "TokenLogprob"]

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this choose the most likely token, as in vLLM."""
_MAX_TEMPERATURE = 1e30
"""Above this all tokens are equally likely in float32 anyway; it keeps 1 / temperature from becoming zero."""


Draw = Callable[[torch.Tensor, RandomControls], torch.Tensor]
"""(logits, controls of the same rows) -> tokens, as token_choice.draw."""


class Sampler:
    """Chooses tokens for the sequences of a step."""

    def __init__(self, vocab_size: int, draw_unseeded: Draw = draw) -> None:
        """
        Args:
            vocab_size: the width of the logits.
            draw_unseeded: draws for requests that gave no seed.
        """
        self.vocab_size = vocab_size
        self._draw_unseeded = draw_unseeded

    @torch.inference_mode()
    def launch(
        self, logits: torch.Tensor, sequences: list[Sequence], pending: PendingTokens | None = None
    ) -> PendingTokens:
        """Have the device choose the next token of each sequence.

        Args:
            logits: float32 [len(sequences), vocab_size], contiguous; overwritten.
            sequences: one per row, before the new token counts.
            pending: where the pending tokens of the sequences are.
        """
        scored = [row for row, item in enumerate(sequences) if item.sampling.logprobs is not None]
        logprobs = scored_rows = None
        if scored:
            (scored_rows,) = to_device(logits.device, np.array(scored))
            raw = logits if len(scored) == len(sequences) else logits[scored_rows]
            logprobs = raw.log_softmax(dim=-1)
        errors = apply_grammars(logits, sequences)
        apply_constraints(logits, sequences)
        apply_penalties(logits, sequences, pending)
        tokens, best = self._choose(logits, sequences)
        scores = None
        if logprobs is not None:
            num_top = [sequences[row].sampling.logprobs or 0 for row in scored]
            scores = PendingScores(logprobs, tokens[scored_rows], num_top)
        return PendingTokens(sequences, tokens, best, scored, scores, errors)

    def needs_history(self, sequence: Sequence) -> bool:
        """Whether what a sequence has generated decides on the host what may come next: then no token of it may be pending."""
        constraints = sequence.constraints
        return sequence.grammar is not None or (constraints is not None and len(constraints.banned_after) > 0)

    def sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken | RequestError]:
        """Choose the next token of each sequence and wait for it; see `launch` and `PendingTokens.result`."""
        return self.launch(logits, sequences).result()

    def _choose(self, logits: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows], and float32 [rows], each row's largest logit: where that is not finite the token means nothing."""
        rows_of: dict[Draw | None, list[int]] = {}
        for row, item in enumerate(sequences):
            rows_of.setdefault(self._draw_of(item.sampling), []).append(row)
        if not any(rows_of):
            tokens = most_likely(logits)
            return tokens, logits.gather(1, tokens[:, None])[:, 0]
        best = logits.amax(dim=-1)
        if len(rows_of) == 1:
            (chooser,) = rows_of
            return self._choose_by(chooser, logits, sequences), best
        tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
        on_device = to_device(logits.device, *map(np.array, rows_of.values()))
        for (chooser, rows), index in zip(rows_of.items(), on_device, strict=True):
            tokens[index] = self._choose_by(chooser, logits[index], [sequences[row] for row in rows])
        return tokens, best

    def _choose_by(
        self, chooser: Draw | None, logits: torch.Tensor, sequences: list[Sequence]
    ) -> torch.Tensor:
        if chooser is None:
            return most_likely(logits)
        return chooser(logits, _random_controls(sequences, self.vocab_size))

    def _draw_of(self, sampling: SamplingParams) -> Draw | None:
        """What draws for such a request; None where the most likely token is chosen."""
        if sampling.temperature < GREEDY_TEMPERATURE or sampling.top_k == 1:
            return None
        return self._draw_unseeded if sampling.seed is None else draw


class PendingTokens:
    """The tokens that a launched step chooses: on the device, where what is launched next may read them, and for the host."""

    def __init__(
        self,
        sequences: list[Sequence],
        tokens: torch.Tensor,
        best: torch.Tensor,
        scored: list[int],
        scores: PendingScores | None,
        errors: dict[int, RequestError],
    ) -> None:
        """
        Args:
            sequences: one per row.
            tokens: int64 [rows], on the device.
            best: float32 [rows], each row's largest logit.
            scored: the rows whose sequences asked for logprobs.
            scores: those of the scored rows.
            errors: by row, what is known already to have gone wrong.
        """
        self.tokens = tokens
        self.row_of = {sequence: row for row, sequence in enumerate(sequences)}
        self._sequences = sequences
        self._positions = [item.num_output_tokens for item in sequences]
        self._scored = scored
        self._scores = scores
        self._errors = errors
        self._copies = HostCopies(tokens, best)

    def result(self) -> list[SampledToken | RequestError]:
        """Wait for the device.

        Returns:
            One per row: the token, or the error that this sequence, and no other, ends with: INTERNAL when its logits are not
            finite, INVALID_ARG when its controls leave no token to choose.
        """
        tokens, best = self._copies.wait()
        results: list[SampledToken | RequestError] = [SampledToken(token_id) for token_id in tokens.tolist()]
        if self._scores is not None:
            for row, token in zip(self._scored, self._scores.result(), strict=True):
                results[row] = token
        for row, value in enumerate(best.tolist()):
            if not math.isfinite(value) or _has_nan(results[row]):
                results[row] = _error(self._sequences[row], self._positions[row], value)
        for row, error in self._errors.items():
            results[row] = error
        return results


def _random_controls(sequences: list[Sequence], vocab_size: int) -> RandomControls:
    """Gather the rows' controls."""
    sampling = [item.sampling for item in sequences]
    top_k = [params.top_k if 0 < params.top_k < vocab_size else vocab_size for params in sampling]
    return RandomControls(
        temperature=np.array([min(params.temperature, _MAX_TEMPERATURE) for params in sampling]),
        min_p=np.array([params.min_p for params in sampling], np.float32),
        top_k=np.array(top_k, np.int64),
        top_p=np.array([params.top_p for params in sampling]),
        streams=RandomStreams(
            seeds=np.array([item.seed for item in sequences], np.uint64),
            indices=np.array([item.index for item in sequences], np.uint64),
            positions=np.array([item.num_output_tokens for item in sequences], np.uint64),
        ),
    )


def _has_nan(result: SampledToken | RequestError) -> bool:
    return isinstance(result, SampledToken) and result.logprob is not None and math.isnan(result.logprob)


def _error(sequence: Sequence, position: int, best: float) -> RequestError:
    """Why no token could be chosen for an output position, told by the row's largest logit."""
    if best == -math.inf and (sequence.constraints is not None or sequence.grammar is not None):
        return RequestError.invalid(
            "allowed_token_ids, bad_words, min_tokens and structured_outputs must leave a token to generate, "
            f"together they exclude every one at output token {position}; allow more tokens"
        )
    return not_finite(f"output token {position}")


def not_finite(token: str) -> RequestError:
    """INTERNAL: there is no telling how likely `token` is."""
    return RequestError.internal(
        f"the model's logits for {token} are not finite; "
        "the checkpoint may be damaged, or its numbers too large for the dtype it is served in"
    )
