"""The text of one sequence as a client may see it: incremental, never half a character, never part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paged_engine.text.stop import StopMatcher

if TYPE_CHECKING:
    from paged_engine.text.tokenizer import Tokenizer


class TextStream:
    """Turns generated tokens into text deltas. Joined, they are the decoding of all tokens up to the first stop string.

    It sees generated tokens only, so a stop string in the prompt does not count. The deltas are the same however the
    tokens are cut into calls.

    Args:
        tokenizer: of the checkpoint.
        skip_special_tokens: special tokens show no text.
        stop: non-empty strings that end the text.
        include_stop: the stop string that ends the text is part of it.
        min_tokens: a stop string that is completed within the text of the first `min_tokens` tokens does not count
            (vLLM's rule).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.open_detokenizer(skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop=include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, after `push` or `finish`."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown now that these tokens have been generated, "" while it is held back.

        Tokens behind a stop string are ignored. Not to be called any more once `stopped_by` is set.
        """
        text = ""
        for token_id in token_ids:
            self._num_tokens += 1
            text += self._show(self._detokenizer.push(token_id))
            if self.stopped_by is not None:
                break
        return text

    def finish(self) -> str:
        """The rest of the text, when generation ends for another reason than a stop string.

        What was held back may complete a stop string after all; then `stopped_by` is set, and the text ends there.
        """
        if self.stopped_by is not None:
            return ""
        return self._show(self._detokenizer.finish()) + self._matcher.finish()

    def _show(self, text: str) -> str:
        return self._matcher.push(text, may_stop=self._num_tokens > self._min_tokens) if text else ""
