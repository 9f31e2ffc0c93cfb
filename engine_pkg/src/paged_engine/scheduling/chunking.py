"""How a step's tokens are divided among the sequences that have more than one to compute: plain arithmetic, no state.

The unit is the page. A chunk that the step's budget truncates ends at a page boundary; a sequence's last chunk, and one cut
by `long_prefill_token_threshold`, end where they end. The first in line, and the first of those that overtake it, take less than
a page's rest rather than nothing, so that everyone moves however small the budget is.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from paged_engine.scheduling.sequence import Sequence

OVERTAKING_RATIO = 4
"""A sequence may overtake the head of the queue when the head has at least this many times its tokens to compute."""
MAX_SCORED_POSITIONS = 256
"""Prompt positions of a step whose logits are wanted: they take the width of the vocabulary each, which for whole prompts would
be more memory than a step has."""


@dataclass(frozen=True)
class ChunkLimits:
    """What the configuration says about chunks."""

    page_size: int
    max_num_tokens: int
    """Tokens of a whole step."""
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one sequence in a step, 0 is no limit."""


@dataclass(frozen=True)
class Chunk:
    """A sequence that wants a share of the step, from position `start` on."""

    sequence: Sequence
    start: int
    hits: tuple[int, ...] = ()
    """Cached pages that hold positions [0, start) of a sequence not yet running."""
    most_tokens: int | None = None
    """Tokens that it may take in this step, None for as many as there are."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens it has to compute, in this step or later ones."""
        return self.sequence.num_tokens - self.start


def limit_scoring(chunks: SequenceOf[Chunk]) -> list[Chunk]:
    """The same chunks, those whose prompt is scored cut so that MAX_SCORED_POSITIONS is kept.

    Each of them may take half of what the ones before it leave, so that a long prompt does not keep a short one waiting.
    """
    left = MAX_SCORED_POSITIONS
    limited = []
    for chunk in chunks:
        num_unscored = chunk.sequence.num_unscored
        if num_unscored > (share := -(-left // 2)):
            num_scored_before = max(0, chunk.sequence.num_scored - chunk.start)
            chunk = replace(chunk, most_tokens=num_scored_before + share)
        left -= min(num_unscored, share)
        limited.append(chunk)
    return limited


def share_in_order(chunks: SequenceOf[Chunk], budget: int, limits: ChunkLimits) -> list[int]:
    """First come, first served: each takes what the ones before it leave. Returns the tokens of each.

    The first gets something in any case, and much shorter ones may overtake it, see below.
    """
    if not limits.enable_chunked_prefill:
        return _share_whole(chunks, budget, limits)
    lengths = _overtaking_lengths(chunks, budget, limits)
    left = budget - sum(lengths)
    for i, chunk in enumerate(chunks):
        length = max(lengths[i], chunk_length(chunk, lengths[i] + left, limits, may_be_partial=i == 0))
        left -= length - lengths[i]
        lengths[i] = length
    return lengths


def share_equally(chunks: SequenceOf[Chunk], budget: int, limits: ChunkLimits) -> list[int]:
    """Equal progress: all get the same number of whole pages, and what some do not need goes to the others.

    Where there are more sequences than pages, those come first that have got least so far; but the first of all gets
    something in any case, and much shorter ones may overtake it, see below. Returns the tokens of each.
    """
    if not limits.enable_chunked_prefill:
        return _share_whole(chunks, budget, limits)
    lengths = _overtaking_lengths(chunks, budget, limits)
    left = budget - sum(lengths)
    growing = sorted(range(len(chunks)), key=lambda i: (i > 0, chunks[i].start))
    while left > 0 and growing:
        share = max(1, left // len(growing) // limits.page_size) * limits.page_size
        still_growing = []
        for i in growing:
            available = lengths[i] + min(share, left)
            length = chunk_length(chunks[i], available, limits, may_be_partial=i == 0 and lengths[i] == 0)
            if length > lengths[i]:
                still_growing.append(i)
                left -= length - lengths[i]
                lengths[i] = length
        growing = still_growing
    return lengths


def chunk_length(chunk: Chunk, available: int, limits: ChunkLimits, may_be_partial: bool) -> int:
    """Tokens that one chunk takes of the `available` ones.

    Args:
        may_be_partial: whether it takes less than a page's rest rather than nothing.
    """
    wanted = chunk.num_uncomputed
    if chunk.most_tokens is not None:
        available = min(available, chunk.most_tokens)
    if limits.long_prefill_token_threshold:
        wanted = min(wanted, limits.long_prefill_token_threshold)
    if wanted <= available:
        return wanted
    rounded = (chunk.start + available) // limits.page_size * limits.page_size - chunk.start
    if rounded > 0:
        return rounded
    return available if may_be_partial else 0


def _overtaking_lengths(chunks: SequenceOf[Chunk], budget: int, limits: ChunkLimits) -> list[int]:
    """The tokens of those that overtake the first, 0 for the others.

    While the first needs more than one step, those with much less to compute take, in their own order, up to half of the
    budget (or a page, if that is more), and leave the first at least one token: a short prompt does not wait for the end of
    a long one, and the long one keeps half of its pace.
    """
    lengths = [0] * len(chunks)
    if not chunks or chunks[0].num_uncomputed <= budget:
        return lengths
    left = min(budget - 1, max(limits.page_size, budget // 2))
    may_be_partial = True
    for i, chunk in enumerate(chunks):
        if chunk.num_uncomputed * OVERTAKING_RATIO <= chunks[0].num_uncomputed:
            lengths[i] = chunk_length(chunk, left, limits, may_be_partial)
            left -= lengths[i]
            may_be_partial = False
    return lengths


def _share_whole(chunks: SequenceOf[Chunk], budget: int, limits: ChunkLimits) -> list[int]:
    """Without chunked prefill a sequence computes all it has to, or it and those behind it wait.

    Only a sequence that can never be computed whole (one that was preempted after it had grown beyond a step's tokens, or whose
    prompt is scored) is cut all the same, or it could not come to its end.
    """
    unlimited = ChunkLimits(limits.page_size, limits.max_num_tokens)
    lengths = [0] * len(chunks)
    for i, chunk in enumerate(chunks):
        if chunk.sequence.num_tokens > limits.max_num_tokens or chunk.most_tokens is not None:
            lengths[i] = chunk_length(chunk, budget, unlimited, may_be_partial=i == 0)
        elif chunk.num_uncomputed <= budget:
            lengths[i] = chunk.num_uncomputed
        else:
            break
        budget -= lengths[i]
    return lengths
