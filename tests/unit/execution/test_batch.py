"""The flat tensors of a step, number by number."""

from __future__ import annotations

import torch

from paged_engine.execution.batch import Batch, build_batch
from paged_engine.execution.sampling import Sampler
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan


def batch_of(page_size: int, *ranges: tuple[list[int], list[int], int, int]) -> Batch:
    """A batch of (token ids, page table, start, end)."""
    scheduled = []
    for token_ids, page_table, start, end in ranges:
        sequence = Sequence("s", token_ids, SamplingParams(), max_num_tokens=100)
        sequence.page_table.extend(page_table)
        scheduled.append(ScheduledRange(sequence, start, end))
    return build_batch(StepPlan(tuple(scheduled)), page_size, torch.device("cpu"))


def test_decode_chunk_and_end_of_prompt() -> None:
    batch = batch_of(
        4,
        ([10, 11, 12, 13, 14], [7, 2, 9], 4, 5),  # a decode, with a page reserved beyond
        (
            [20, 21, 22, 23, 24, 25, 26, 27, 28, 29],
            [5, 0, 8],
            2,
            8,
        ),  # a chunk in the middle, ending with its page
        ([30, 31, 32], [3], 0, 3),  # a whole prompt
    )
    assert batch.token_ids.tolist() == [14, 22, 23, 24, 25, 26, 27, 30, 31, 32]
    assert batch.positions.tolist() == [4, 2, 3, 4, 5, 6, 7, 0, 1, 2]
    assert batch.slots.tolist() == [8, 22, 23, 0, 1, 2, 3, 12, 13, 14]
    assert batch.query_starts.tolist() == [0, 1, 7, 10]
    assert batch.context_lens.tolist() == [5, 8, 3]
    assert batch.page_indptr.tolist() == [0, 2, 4, 5]
    assert batch.page_indices.tolist() == [7, 2, 5, 0, 3]
    assert batch.last_page_len.tolist() == [1, 4, 3]
    assert (batch.logit_rows.tolist(), batch.num_samples) == ([0, 9], 2)
    assert (batch.num_tokens, batch.num_sequences, batch.max_query_len, batch.page_size) == (10, 3, 6, 4)


def test_dtypes_are_those_that_kernels_index_with() -> None:
    batch = batch_of(2, ([1, 2, 3], [1, 0], 0, 3))
    for name in ("token_ids", "positions", "slots", "logit_rows"):
        assert getattr(batch, name).dtype == torch.int64
    for name in ("query_starts", "context_lens", "page_indptr", "page_indices", "last_page_len"):
        assert getattr(batch, name).dtype == torch.int32


def test_pages_of_one_token() -> None:
    batch = batch_of(1, ([1, 2, 3], [6, 4, 5], 1, 3))
    assert batch.slots.tolist() == [4, 5]
    assert batch.page_indices.tolist() == [6, 4, 5]
    assert batch.last_page_len.tolist() == [1]


def test_slots_beyond_what_int32_holds() -> None:
    batch = batch_of(1024, ([1], [2**31 - 1], 0, 1))
    assert batch.slots.tolist() == [(2**31 - 1) * 1024]


def test_chunk_that_does_not_reach_the_end_yields_no_sample() -> None:
    assert batch_of(4, ([1, 2, 3, 4, 5], [0, 1], 0, 4)).logit_rows.tolist() == []


def test_rows_that_score_a_prompt_come_behind_those_that_sample() -> None:
    def range_of(start: int, end: int, prompt_logprobs: int | None = 3) -> ScheduledRange:
        sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
        sequence = Sequence("s", [1, 2, 3, 4, 5], sampling, max_num_tokens=100)
        sequence.page_table.extend([0, 1])
        return ScheduledRange(sequence, start, end)

    ranges = (range_of(1, 2), range_of(4, 5), range_of(0, 5), range_of(0, 3, None), range_of(2, 5, None))
    batch = build_batch(StepPlan(ranges), 4, torch.device("cpu"))
    assert batch.query_starts.tolist() == [0, 1, 2, 7, 10, 13]
    assert batch.logit_rows.tolist() == [1, 6, 12, 0, 2, 3, 4, 5]
    assert batch.num_samples == 3


def test_pending_tokens_come_from_where_they_are_chosen() -> None:
    """Of three sequences in flight two go on, in another order, beside a chunk whose tokens are known."""
    sequences = [Sequence("s", [10 + i] * (3 + i), SamplingParams(), max_num_tokens=100) for i in range(3)]
    logits = torch.zeros(3, 50)
    logits[[0, 1, 2], [47, 48, 49]] = 1
    greedy = SamplingParams(temperature=0)
    for sequence in sequences:
        sequence.sampling = greedy
        sequence.page_table.extend([0, 1])
    pending = Sampler(50).launch(logits, sequences)
    for sequence in sequences:
        sequence.num_pending = 1
    known = Sequence("s", [20, 21, 22], SamplingParams(), max_num_tokens=100)
    known.page_table.append(2)
    ranges = (
        ScheduledRange(sequences[2], 5, 6),
        ScheduledRange(sequences[0], 3, 4),
        ScheduledRange(known, 0, 2),
    )
    batch = build_batch(StepPlan(ranges), 4, torch.device("cpu"), pending)
    assert batch.token_ids.tolist() == [49, 47, 20, 21]
    assert batch.positions.tolist() == [5, 3, 0, 1]
    assert batch.logit_rows.tolist() == [0, 1]
    assert [len(sequence.token_ids) for sequence in sequences] == [3, 4, 5]
