"""Holds an attention backend against plain torch before it is used: a few random tokens through each kind of layer.

Kernels that come from elsewhere can fail to compile, to load or to launch on a machine, or be wrong on it. That has to
come out when the model is loaded, where there is another backend to take, and not at the first request.
"""

from __future__ import annotations

import torch

from paged_engine.attention.interface import AttentionBackend, AttentionSetup, BackendUnsupported
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

_TOLERANCE = 0.05
"""For values of unit variance in 16 bits; what is looked for is far off."""
_FLOAT8_TOLERANCE = 0.3


def try_out(backend: AttentionBackend, setup: AttentionSetup) -> None:
    """Run a mixed step and a decode step through `backend`; it has small pages of its own until it is bound again.

    Raises:
        BackendUnsupported: the results differ from plain torch's.
    """
    layers = list({spec: layer for layer, spec in enumerate(setup.specs)}.values())
    reference = TorchAttention(setup)
    lengths = (2 * setup.page_size + 3, 5)
    num_pages = sum(-(-(length + 1) // setup.page_size) for length in lengths)
    for candidate in (backend, reference):
        for layer in layers:
            shape = (num_pages, *candidate.page_shape(layer))
            candidate.bind(layer, torch.zeros(shape, dtype=setup.cache_dtype, device=setup.device))
    random = torch.Generator().manual_seed(0)
    tolerance = _FLOAT8_TOLERANCE if setup.cache_dtype.itemsize == 1 else _TOLERANCE
    for batch in _steps(lengths, setup):
        backend.plan(batch)
        reference.plan(batch)
        for layer in layers:
            spec = setup.specs[layer]
            query, key, value, sinks = (
                torch.randn(*shape, generator=random).to(setup.device, setup.dtype)
                for shape in (
                    (batch.num_tokens, spec.num_query_heads, spec.head_dim),
                    (batch.num_tokens, spec.num_kv_heads, spec.head_dim),
                    (batch.num_tokens, spec.num_kv_heads, spec.head_dim),
                    (spec.num_query_heads,),
                )
            )
            got, expected = (
                candidate.attend(layer, query, key, value, sinks if spec.has_sinks else None).float()
                for candidate in (backend, reference)
            )
            # not "error > tolerance", which NaN would pass
            if not (error := (got - expected).abs().max().item()) <= tolerance:
                raise BackendUnsupported(
                    f"its results differ from plain torch's by {error:.3g} in layer {layer}: {spec}"
                )


def _steps(lengths: tuple[int, ...], setup: AttentionSetup) -> list[Batch]:
    """A step of whole prompts of these lengths, and one of a token more each."""
    sequences = []
    num_pages = 0
    for length in lengths:
        sequence = Sequence("trial", [0] * (length + 1), SamplingParams(), max_num_tokens=length + 1)
        needed = -(-(length + 1) // setup.page_size)
        sequence.page_table.extend(range(num_pages, num_pages + needed))
        num_pages += needed
        sequences.append(sequence)
    prompts = [ScheduledRange(item, 0, item.num_tokens - 1) for item in sequences]
    tokens = [ScheduledRange(item, item.num_tokens - 1, item.num_tokens) for item in sequences]
    return [
        build_batch(StepPlan(tuple(ranges)), setup.page_size, setup.device) for ranges in (prompts, tokens)
    ]
