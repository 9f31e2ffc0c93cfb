"""The common attention suite: what every backend must get right, checked against attention by its definition.

A backend takes part by an entry in BACKENDS. The oracle knows neither pages nor batches: it computes one sequence at a
time, densely, in float64. Whatever a backend was not told to read (slots not yet written, pages of others) is NaN; over
pages in int8, whose codes cannot be, all their bits are set, so that the scales are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from paged_engine.attention.interface import (
    AttentionBackend,
    AttentionSetup,
    AttentionSpec,
)
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.kernels.reference import dequantize_heads, quantize_heads
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    "torch": TorchAttention,
}

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""By the model's dtype, absolute and relative, for inputs of unit variance; 16-bit types round the output."""
CACHE_TOLERANCE = {torch.float16: 4e-4, torch.bfloat16: 2e-3, torch.int8: 6e-2}
"""By the cache's dtype, the least that is allowed. What is rounded to it is so for the oracle as well; but a backend may
quantize the queries that meet keys in int8. Their error is 0.6 % of their size (rounding in steps of 1/127 of 2.7 standard
deviations); so that of a score is 0.008 here, that of an output as much where few keys share it, and of the hundred thousands
of outputs the farthest off are so by 0.043."""

MIXED = ((17, 1), (0, 1), (40, 1), (16, 5), (0, 9), (3, 30), (0, 64))
"""(tokens already in the cache, tokens of this step): decodes, fresh prompts and chunks that continue."""


@dataclass(frozen=True)
class Case:
    """One shape of attention in one kind of batch."""

    num_kv_heads: int = 2
    group_size: int = 1
    head_dim: int = 16
    page_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    ranges: tuple[tuple[int, int], ...] = MIXED

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_query_heads=self.num_kv_heads * self.group_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=1.3 * self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            has_sinks=self.has_sinks,
        )

    @property
    def setup(self) -> AttentionSetup:
        """Two layers: this case's, and one with nothing special, so that layers are told apart."""
        plain = replace(self.spec, sliding_window=None, soft_cap=None, has_sinks=False)
        return AttentionSetup(
            (self.spec, plain),
            self.page_size,
            torch.device("cpu"),
            self.dtype,
            self.cache_dtype or self.dtype,
        )


class PagedRun:
    """A backend over NaN-filled pages, and the same tokens kept densely for the oracle."""

    def __init__(
        self, make_backend: Callable[[AttentionSetup], AttentionBackend], case: Case, seed: int = 0
    ) -> None:
        self.case = case
        self.setup = case.setup
        self.random = torch.Generator().manual_seed(seed)
        self.backend = make_backend(self.setup)
        pages_of = [-(-(computed + new) // case.page_size) for computed, new in case.ranges]
        self.num_pages = sum(pages_of) + 3
        self.caches = [
            torch.full(
                (self.num_pages, *self.backend.page_shape(layer)),
                -1 if self.setup.cache_dtype == torch.int8 else torch.nan,
                dtype=self.setup.cache_dtype,
            )
            for layer in range(len(self.setup.specs))
        ]
        for layer, cache in enumerate(self.caches):
            self.backend.bind(layer, cache)
        shuffled = torch.randperm(self.num_pages, generator=self.random).tolist()
        self.sequences: list[Sequence] = []
        for (computed, new), num_pages in zip(case.ranges, pages_of, strict=True):
            sequence = Sequence("s", range(computed + new), SamplingParams(), max_num_tokens=1000)
            sequence.page_table.extend(shuffled.pop() for _ in range(num_pages))
            self.sequences.append(sequence)
        self.unused_pages = shuffled
        spec = case.spec
        self.sinks = self._normal(spec.num_query_heads) if case.has_sinks else None
        self.dense = [
            [
                (
                    self._normal(computed + new, spec.num_query_heads, spec.head_dim),
                    self._normal(computed + new, spec.num_kv_heads, spec.head_dim),
                    self._normal(computed + new, spec.num_kv_heads, spec.head_dim),
                )
                for computed, new in case.ranges
            ]
            for _ in self.setup.specs
        ]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.case.dtype)

    def batch(self, ranges: list[tuple[int, int, int]]) -> Batch:
        """The batch that computes positions [start, end) of sequence i for each (i, start, end)."""
        plan = StepPlan(tuple(ScheduledRange(self.sequences[i], start, end) for i, start, end in ranges))
        return build_batch(plan, self.case.page_size, torch.device("cpu"))

    def step(self, ranges: list[tuple[int, int, int]]) -> list[list[torch.Tensor]]:
        """Run one step; by layer and range the outputs [end - start, num_query_heads, head_dim]."""
        self.backend.plan(self.batch(ranges))
        outputs = []
        for layer, spec in enumerate(self.setup.specs):
            query, key, value = (
                torch.cat([self.dense[layer][i][part][start:end] for i, start, end in ranges])
                for part in range(3)
            )
            sinks = self.sinks if spec.has_sinks else None
            output = self.backend.attend(layer, query, key, value, sinks)
            assert output.shape == query.shape
            assert output.dtype == query.dtype
            outputs.append(list(output.split([end - start for _, start, end in ranges])))
        return outputs

    def expected(self, layer: int, i: int, start: int, end: int) -> torch.Tensor:
        """What the rows [start, end) of sequence i must yield, float64."""
        query, key, value = self.dense[layer][i]
        key, value = (_as_cached(part, self.setup.cache_dtype) for part in (key, value))
        spec = self.setup.specs[layer]
        return attention_by_definition(query[:end], key[:end], value[:end], spec, self.sinks)[start:]

    def check(self, ranges: list[tuple[int, int, int]]) -> None:
        """Run a step and compare every row of every layer with the oracle."""
        tolerance = max(TOLERANCE[self.case.dtype], CACHE_TOLERANCE.get(self.setup.cache_dtype, 0))
        for layer, outputs in enumerate(self.step(ranges)):
            for (i, start, end), output in zip(ranges, outputs, strict=True):
                expected = self.expected(layer, i, start, end)
                torch.testing.assert_close(
                    output.double(),
                    expected,
                    atol=tolerance,
                    rtol=tolerance,
                    msg=lambda text, where=(layer, i, start, end): (
                        f"layer, sequence, start, end = {where}: {text}"
                    ),
                )


def _as_cached(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as a cache of `dtype` gives them back."""
    return dequantize_heads(*quantize_heads(heads)) if dtype == torch.int8 else heads.to(dtype)


def attention_by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of one whole sequence, head by head, in float64; [num_tokens, num_query_heads, head_dim]."""
    visible = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    if spec.sliding_window is not None:
        visible = visible.triu(1 - spec.sliding_window)
    heads = []
    for head in range(spec.num_query_heads):
        kv_head = head // (spec.num_query_heads // spec.num_kv_heads)
        scores = query[:, head].double() @ key[:, kv_head].double().T * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        weights = scores.exp() * visible
        total = weights.sum(dim=1, keepdim=True)
        if spec.has_sinks and sinks is not None:
            total = total + sinks[head].double().exp()
        heads.append(weights / total @ value[:, kv_head].double())
    return torch.stack(heads, dim=1)


def history_then_step(case: Case, run: PagedRun) -> None:
    """Put what each sequence already has into the cache by a first step, then check that step and the case's own."""
    if history := [(i, 0, computed) for i, (computed, _) in enumerate(case.ranges) if computed]:
        run.check(history)
    run.check([(i, computed, computed + new) for i, (computed, new) in enumerate(case.ranges)])


def random_steps(lengths: list[int], random: torch.Generator) -> Iterator[list[tuple[int, int, int]]]:
    """Ranges for steps in which sequences advance by random amounts, in random company and order, until all are done."""
    done = [0] * len(lengths)
    while done != lengths:
        ranges = []
        for i in torch.randperm(len(lengths), generator=random).tolist():
            n = min(int(torch.randint(0, 12, (), generator=random)), lengths[i] - done[i])
            if n:
                ranges.append((i, done[i], done[i] + n))
                done[i] += n
        if ranges:
            yield ranges
