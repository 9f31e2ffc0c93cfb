"""Drives a model runner by plans written by hand, so that a test decides which tokens each step computes."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from paged_engine.attention.interface import AttentionSetup
from paged_engine.attention.select import select_backend
from paged_engine.config import EngineConfig
from paged_engine.execution.batch import build_batch
from paged_engine.execution.runner import ModelRunner
from paged_engine.models.load import LoadedModel, load_model
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

CPU = torch.device("cpu")


class HandBuilt:
    """A runner over a cache full of NaN, whose pages are handed out in random order.

    A model has one runner at a time: making the next one takes the model away from the last.
    """

    def __init__(
        self, model: LoadedModel, page_size: int, backend_name: str, *, num_pages: int = 300, seed: int = 0
    ) -> None:
        setup = AttentionSetup(
            tuple(layer.spec for layer in model.layers), page_size, CPU, model.dtype, cache_dtype=model.dtype
        )
        backend = select_backend(backend_name, setup)
        assert backend_name in (backend.name, "auto")
        for layer in range(len(model.layers)):
            backend.bind(
                layer, torch.full((num_pages, *backend.page_shape(layer)), torch.nan, dtype=model.dtype)
            )
        self.page_size = page_size
        self.runner = ModelRunner(model, backend)
        self._free_pages = list(range(num_pages))
        random.Random(seed).shuffle(self._free_pages)

    def sequence(self, token_ids: list[int]) -> Sequence:
        return Sequence("s", token_ids, SamplingParams(), max_num_tokens=10_000)

    def step(self, *work: tuple[Sequence, int]) -> torch.Tensor:
        """Compute the next n tokens of each (sequence, n); logits of those that reach their last token."""
        ranges = []
        for sequence, num_tokens in work:
            end = sequence.num_computed + num_tokens
            while len(sequence.page_table) * self.page_size < end:
                sequence.page_table.append(self._free_pages.pop())
            ranges.append(ScheduledRange(sequence, sequence.num_computed, end))
        logits = self.runner.execute(build_batch(StepPlan(tuple(ranges)), self.page_size, CPU))
        for item in ranges:
            item.sequence.num_computed = item.end
        return logits

    def chunk_logits(self, token_ids: list[int], chunk: int) -> torch.Tensor:
        """Compute a prompt in chunks, each of them as if it were the whole; logits after every chunk's last token."""
        sequence = self.sequence([])
        logits = []
        for start in range(0, len(token_ids), chunk):
            sequence.token_ids.extend(token_ids[start : start + chunk])
            logits.append(self.step((sequence, sequence.num_uncomputed)))
        return torch.cat(logits)


def load_tiny(folder: Path, **parameters: object) -> LoadedModel:
    """Load a checkpoint folder the way the engine does."""
    return load_model(EngineConfig(model=str(folder), **parameters), CPU)  # type: ignore[arg-type]
