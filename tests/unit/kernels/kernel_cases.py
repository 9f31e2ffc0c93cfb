"""Random steps for the kernel tests, and the caches behind them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import torch

from paged_engine.attention.interface import AttentionSpec
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.kernels import reference
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_PAIRS = [*((dtype, dtype) for dtype in DTYPES), *((dtype, torch.int8) for dtype in DTYPES)]
"""Of queries, keys and values as they come, and of pages."""
HEAD_DIMS = (8, 16, 24, 33, 64, 80, 128, 256)
INT8_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 256)
"""Pages in int8 take multiples of 16."""


def unwritten_cache(
    num_pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Pages full of NaN; in int8 all bits are set, which makes NaN of the scales."""
    if dtype == torch.int8:
        shape = (num_pages, num_kv_heads, 2, page_size, head_dim + reference.SCALE_BYTES)
        return torch.full(shape, -1, dtype=dtype)
    return torch.full((num_pages, num_kv_heads, 2, page_size, head_dim), torch.nan, dtype=dtype)


class Context:
    """Sequences with keys and values for every position, in pages that hold NaN everywhere else."""

    def __init__(
        self,
        spec: AttentionSpec,
        lengths: Items[int],
        page_size: int,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.page_size = page_size
        needed = [-(-length // page_size) for length in lengths]
        pages = list(range(sum(needed) + 2))
        random.Random(seed).shuffle(pages)
        self.cache = unwritten_cache(
            len(pages), spec.num_kv_heads, page_size, spec.head_dim, cache_dtype or dtype
        )
        self.sequences: list[Sequence] = []
        self.queries: list[torch.Tensor] = []
        for length, count in zip(lengths, needed, strict=True):
            sequence = Sequence("s", range(length), SamplingParams(), max_num_tokens=length)
            sequence.page_table.extend(pages.pop() for _ in range(count))
            self.sequences.append(sequence)
            keys, values = (
                torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=generator) for _ in range(2)
            )
            position = torch.arange(length)
            table = torch.tensor(sequence.page_table)
            slots = table[position // page_size] * page_size + position % page_size
            reference.write_pages(self.cache, keys, values, slots)
            query = torch.randn(length, spec.num_query_heads, spec.head_dim, generator=generator)
            self.queries.append(query.to(dtype))
        self.sinks = torch.randn(spec.num_query_heads, generator=generator) if spec.has_sinks else None

    def step(self, ranges: Items[tuple[int, int, int]]) -> tuple[Batch, torch.Tensor]:
        """The batch that computes positions [start, end) of sequence i for each (i, start, end), and its queries."""
        plan = StepPlan(tuple(ScheduledRange(self.sequences[i], start, end) for i, start, end in ranges))
        query = torch.cat([self.queries[i][start:end] for i, start, end in ranges])
        return build_batch(plan, self.page_size, torch.device("cpu")), query


def random_spec(choose: random.Random, head_dims: Items[int] = HEAD_DIMS) -> AttentionSpec:
    """Any kind of attention layer."""
    num_kv_heads, group = choose.choice([1, 2, 3]), choose.choice([1, 2, 3, 7, 16, 21])
    head_dim = choose.choice(head_dims)
    return AttentionSpec(
        num_kv_heads * group,
        num_kv_heads,
        head_dim,
        scale=1.2 * head_dim**-0.5,
        sliding_window=choose.choice([None, None, 1, 7, 100, 300]),
        soft_cap=choose.choice([None, None, 2.0]),
        has_sinks=choose.random() < 0.3,
    )


def random_ranges(choose: random.Random, lengths: Items[int]) -> list[tuple[int, int, int]]:
    """A range of each sequence that ends somewhere in it: single tokens and chunks."""
    ranges = []
    for i, length in enumerate(lengths):
        end = choose.randint(1, length)
        ranges.append((i, choose.choice([end - 1, choose.randint(0, end - 1)]), end))
    return ranges
