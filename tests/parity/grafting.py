"""Tiny models made native, and steps of their tokens written by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from hand_built import CPU, load_tiny
from tiny_models import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from paged_engine.attention.cpu_native import CpuAttention, load_cpu_attention
from paged_engine.attention.interface import AttentionSetup
from paged_engine.execution.batch import build_batch
from paged_engine.models.graft import graft_model
from paged_engine.models.hook import attach
from paged_engine.models.load import LoadedModel
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

BF16_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
"""Multiples of 32, as the kernels want them in 16 bits."""


class Grafted:
    """A tiny model made native as a whole or in parts, and pages full of NaN (in int8, by their scales)."""

    def __init__(
        self,
        folder: Path,
        page_size: int = 16,
        num_pages: int = 200,
        *,
        dtype: str = "float32",
        int8: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = load_tiny(folder, dtype=dtype)
        self.backend = make_backend(self.model, page_size, cache_dtype)
        forward = graft_model(self.model, self.backend, max_num_tokens=100, int8=int8)
        assert forward is not None
        self.forward = forward
        attach(self.model.layers, self.backend)
        self.page_size = page_size
        self.num_pages_used = 0
        bind(self.model, self.backend, num_pages)

    def sequence(self, token_ids: list[int]) -> Sequence:
        sequence = Sequence("s", token_ids, SamplingParams(), max_num_tokens=1000)
        needed = -(-len(token_ids) // self.page_size)
        sequence.page_table.extend(range(self.num_pages_used, self.num_pages_used + needed))
        self.num_pages_used += needed
        return sequence

    def step(self, *ranges: tuple[Sequence, int, int]) -> torch.Tensor:
        """Logits of every token of the ranges (sequence, start, end)."""
        plan = StepPlan(tuple(ScheduledRange(*each) for each in ranges))
        batch = build_batch(plan, self.page_size, CPU)
        self.backend.plan(batch)
        with torch.inference_mode():
            return (
                self.forward(batch.token_ids, batch.positions, torch.arange(batch.num_tokens)).float().clone()
            )


def make_backend(model: LoadedModel, page_size: int, cache_dtype: torch.dtype | None = None) -> CpuAttention:
    """With pages in the model's dtype, if not in another."""
    specs = tuple(layer.spec for layer in model.layers)
    return load_cpu_attention(AttentionSetup(specs, page_size, CPU, model.dtype, cache_dtype or model.dtype))


def bind(model: LoadedModel, backend: CpuAttention, num_pages: int) -> None:
    for layer in range(len(model.layers)):
        shape = (num_pages, *backend.page_shape(layer))
        dtype = backend.setup.cache_dtype
        backend.bind(layer, torch.full(shape, -1 if dtype == torch.int8 else torch.nan, dtype=dtype))


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()


def reference_logits(folder: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits
