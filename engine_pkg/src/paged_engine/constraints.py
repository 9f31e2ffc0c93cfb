"""TokenConstraints: the controls of one request that name particular tokens, resolved to ids once, before it is queued.

request.py holds what the user wrote, where ids are not yet checked against the checkpoint's vocabulary and bad words are still
words. The sampler reads this form at every step, so nothing here is computed twice, and what is wrong is refused before it
could hurt a batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_engine.errors import RequestError
from paged_engine.request import SamplingParams

TokenIds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """Which tokens a request may never, may only, or should rather generate."""

    allowed: TokenIds | None
    """The only tokens that may be generated; None allows all."""
    banned: TokenIds
    """Tokens that may never be generated: the bad words of a single token."""
    banned_after: Mapping[int, tuple[tuple[array[int], int], ...]]
    """Longer bad words by their last but one token: (all tokens but the last, the last token)."""
    bias_ids: TokenIds
    bias_values: NDArray[np.float32]
    """What is added to the logits of `bias_ids`, in the same order."""
    min_tokens: int
    end_ids: TokenIds
    """EOS and stop tokens: banned until `min_tokens` have been generated, as in vLLM also where ignore_eos is set."""

    @classmethod
    def resolve(
        cls,
        sampling: SamplingParams,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        bad_word_ids: Iterable[Iterable[int]] = (),
    ) -> TokenConstraints | None:
        """Check and index what `sampling` says about particular tokens; None when it says nothing.

        Args:
            sampling: the request's controls.
            vocab_size: the width of the model's logits; ids are 0 to vocab_size - 1.
            eos_token_ids: the checkpoint's end-of-sequence tokens.
            bad_word_ids: `sampling.bad_words` as token ids, each at least one token long. A word has several writings (at the
                beginning of a text, after a space), so there may be more of these than words.

        Raises:
            RequestError: INVALID_ARG for an id outside the vocabulary, and when no token at all is left to generate.
        """
        sequences = sorted({tuple(sequence) for sequence in bad_word_ids})
        _check_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
        _check_ids("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size)
        _check_ids("logit_bias", sampling.logit_bias, vocab_size)
        _check_ids("bad_words", (token for sequence in sequences for token in sequence), vocab_size)
        if not (sequences or sampling.allowed_token_ids or sampling.logit_bias or sampling.min_tokens):
            return None

        banned_after: dict[int, list[tuple[array[int], int]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                banned_after.setdefault(sequence[-2], []).append((array("i", sequence[:-1]), sequence[-1]))
        constraints = cls(
            allowed=None
            if sampling.allowed_token_ids is None
            else np.unique(_ids(sampling.allowed_token_ids)),
            banned=_ids(sequence[0] for sequence in sequences if len(sequence) == 1),
            banned_after={token: tuple(entries) for token, entries in banned_after.items()},
            bias_ids=_ids(sampling.logit_bias),
            bias_values=np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias)),
            min_tokens=sampling.min_tokens,
            end_ids=_ids(
                sorted({*sampling.stop_token_ids, *(token for token in eos_token_ids if token < vocab_size)})
            ),
        )
        constraints._check_something_is_left(vocab_size)
        return constraints

    def banned_next(self, token_ids: array[int], num_output_tokens: int) -> TokenIds:
        """Tokens that may not come next after `token_ids` (prompt + output, the last `num_output_tokens` of them generated).

        The beginning of a bad word counts wherever it stands, in the prompt too: transformers' NoBadWordsLogitsProcessor and
        TensorRT-LLM do the same (vLLM looks at the output only).
        """
        banned = [self.banned]
        if num_output_tokens < self.min_tokens:
            banned.append(self.end_ids)
        entries = self.banned_after.get(token_ids[-1], ()) if token_ids else ()
        completed = [last for prefix, last in entries if token_ids[-len(prefix) :] == prefix]
        if completed:
            banned.append(_ids(completed))
        return np.concatenate(banned)

    def _check_something_is_left(self, vocab_size: int) -> None:
        left = np.ones(vocab_size, bool)
        if self.allowed is not None:
            left[:] = False
            left[self.allowed] = True
        left[self.banned] = False
        if self.min_tokens > 0:
            left[self.end_ids] = False
        if not left.any():
            raise RequestError.invalid(
                "allowed_token_ids, bad_words and min_tokens must leave at least one token to generate, "
                "together they exclude every one; allow more tokens"
            )


def _ids(token_ids: Iterable[int]) -> TokenIds:
    return np.array(list(token_ids), np.int64)


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError.invalid(
                f"{field} must hold token ids from 0 to {vocab_size - 1}, got {token_id}"
            )
