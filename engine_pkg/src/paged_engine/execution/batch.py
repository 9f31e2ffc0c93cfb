"""Batch: a step plan as the flat tensors that models and attention work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from paged_engine.execution.transfer import to_device
from paged_engine.scheduling.sequence import StepPlan

if TYPE_CHECKING:
    from paged_engine.execution.sampling import PendingTokens


@dataclass(frozen=True)
class Batch:
    """One step's tokens laid end to end, and where each sequence's keys and values lie.

    Rows are the tokens of the ranges in plan order. Everything an attention kernel needs to index with is int32 and, for
    `plan` calls that want host memory, stays on the CPU; only the three per-token tensors live on the model's device.
    """

    token_ids: torch.Tensor
    """int64 [num_tokens], on the device."""
    positions: torch.Tensor
    """int64 [num_tokens], position of each token in its sequence, on the device."""
    slots: torch.Tensor
    """int64 [num_tokens], page * page_size + offset where the token's keys and values go, on the device."""
    query_starts: torch.Tensor
    """int32 [num_sequences + 1] on the CPU: rows query_starts[i] to query_starts[i + 1] are sequence i's."""
    context_lens: torch.Tensor
    """int32 [num_sequences] on the CPU: tokens in the cache after this step, num_computed + n."""
    page_indptr: torch.Tensor
    """int32 [num_sequences + 1] on the CPU, CSR: sequence i's pages are page_indices[page_indptr[i]:page_indptr[i + 1]]."""
    page_indices: torch.Tensor
    """int32 on the CPU: exactly ceil(context_len / page_size) pages per sequence, never pages reserved beyond."""
    last_page_len: torch.Tensor
    """int32 [num_sequences] on the CPU: tokens in the last page, 1 to page_size."""
    logit_rows: torch.Tensor
    """int64 on the device: the rows whose logits are wanted: the last row of each range that samples, in plan order, and then
    those of the ranges' scored positions, in plan order."""
    num_samples: int
    """How many of logit_rows sample."""
    max_query_len: int
    """Tokens of the longest range; 1 means that every sequence computes a single token."""
    page_size: int

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        """Ranges of the step."""
        return int(self.context_lens.shape[0])


def build_batch(
    plan: StepPlan, page_size: int, device: torch.device, pending: PendingTokens | None = None
) -> Batch:
    """Flatten a plan. Work in Python grows with the number of ranges, not with their tokens.

    Args:
        plan: what to flatten.
        page_size: tokens of a page.
        device: of the model.
        pending: where the pending tokens of the plan's sequences are; they are copied on the device, without waiting for them.
    """
    num_ranges = len(plan.ranges)
    starts = np.fromiter((item.start for item in plan.ranges), np.int64, num_ranges)
    ends = np.fromiter((item.end for item in plan.ranges), np.int64, num_ranges)
    lengths = ends - starts
    query_starts = np.zeros(num_ranges + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    num_pages = (ends + page_size - 1) // page_size
    page_indptr = np.zeros(num_ranges + 1, np.int32)
    np.cumsum(num_pages, out=page_indptr[1:])

    token_ids = np.zeros(query_starts[-1], np.int64)
    page_indices = np.empty(page_indptr[-1], np.int32)
    for i, item in enumerate(plan.ranges):
        known = item.sequence.token_ids[item.start : item.end]
        token_ids[query_starts[i] : query_starts[i] + len(known)] = known
        page_indices[page_indptr[i] : page_indptr[i + 1]] = item.sequence.page_table[: num_pages[i]]

    row_of_range = np.repeat(np.arange(num_ranges), lengths)
    positions = np.arange(len(token_ids)) - query_starts[row_of_range] + starts[row_of_range]
    pages = page_indices[page_indptr[row_of_range] + positions // page_size].astype(np.int64)
    slots = pages * page_size + positions % page_size
    samples = np.fromiter((item.samples for item in plan.ranges), bool, num_ranges)
    scored = [
        np.arange(item.scored.start, item.scored.stop) - item.start + query_starts[i]
        for i, item in enumerate(plan.ranges)
        if item.scored
    ]

    logit_rows = np.concatenate([query_starts[1:][samples] - 1, *scored]).astype(np.int64)
    fed_rows, fed_from = _fed(plan, query_starts, pending)
    *on_device, rows, tokens = to_device(device, token_ids, positions, slots, logit_rows, fed_rows, fed_from)
    if pending is not None and len(fed_rows):
        on_device[0][rows] = pending.tokens[tokens]

    return Batch(
        token_ids=on_device[0],
        positions=on_device[1],
        slots=on_device[2],
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy(ends.astype(np.int32)),
        page_indptr=torch.from_numpy(page_indptr),
        page_indices=torch.from_numpy(page_indices),
        last_page_len=torch.from_numpy(((ends - 1) % page_size + 1).astype(np.int32)),
        logit_rows=on_device[3],
        num_samples=int(samples.sum()),
        max_query_len=int(lengths.max()),
        page_size=page_size,
    )


def _fed(
    plan: StepPlan, query_starts: NDArray[np.int32], pending: PendingTokens | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows whose token is pending, and the rows of `pending` where it will be. It is the last of its range."""
    fed = [
        (query_starts[i + 1] - 1, pending.row_of[item.sequence])
        for i, item in enumerate(plan.ranges)
        if pending is not None and item.end > len(item.sequence.token_ids)
    ]
    rows, tokens = np.array(fed, np.int64).reshape(-1, 2).T
    return rows, tokens
