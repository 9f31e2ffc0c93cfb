"""A quick check of the native kernels against their torch twins, made once when they are loaded.

It is there for what cannot be known when the code is written: a processor, a hypervisor or a compiler that does not do
what it says. The thorough comparison is the test suite's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from paged_engine.attention.interface import AttentionSpec
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.kernels import reference
from paged_engine.kernels.library import Activation, Rotary
from paged_engine.kernels.native import NativeKernels
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def find_fault(kernels: NativeKernels) -> str | None:
    """Name the first kernel that is wrong, or None."""
    random = torch.Generator().manual_seed(0)
    for check in (_check_attention, _check_rows, _check_linear):
        for name, got, expected in check(kernels, lambda *shape: torch.randn(*shape, generator=random)):
            # not "error > tolerance", which NaN would pass
            if not (got.float() - expected.float()).abs().max().item() <= _TOLERANCE[expected.dtype]:
                return name
    return None


_Comparison = tuple[str, torch.Tensor, torch.Tensor]
_Normal = Callable[..., torch.Tensor]


def _check_attention(kernels: NativeKernels, normal: _Normal) -> Iterator[_Comparison]:
    """Rotary embedding, writing and attention for a prompt of several spans' length beside single tokens."""
    for dtype, cache_dtype in (*((dtype, dtype) for dtype in _DTYPES), (torch.bfloat16, torch.int8)):
        int8 = cache_dtype == torch.int8
        for page_size, head_dim in ((16, 64), (32, 80), (32, 96) if int8 else (5, 24)):
            spec = AttentionSpec(6, 2, head_dim, head_dim**-0.5, sliding_window=290)
            batch = trial_batch((300, 40, 1), (300, 1, 1), page_size)
            row = head_dim + reference.SCALE_BYTES if int8 else head_dim
            shape = (int(batch.page_indices.max()) + 1, spec.num_kv_heads, 2, page_size, row)
            cache = torch.zeros(shape, dtype=cache_dtype)
            expected_cache = cache.clone()
            query = normal(batch.num_tokens, 6, head_dim).to(dtype)
            key, value = (normal(batch.num_tokens, 2, head_dim).to(dtype) for _ in range(2))
            angles = normal(300, head_dim // 2)
            cosines, sines = angles.cos(), angles.sin()
            rotated, rotated_key = (
                reference.rotate(heads, batch.positions, cosines, sines) for heads in (query, key)
            )
            reference.write_pages(expected_cache, rotated_key, value, batch.slots)
            layer = kernels.attention_layer(spec, page_size, dtype, cache_dtype)
            rotary = Rotary(
                head_dim, 0, cosines.data_ptr(), sines.data_ptr(), batch.positions.data_ptr(), None, None, 0.0
            )
            kernels.rotate_and_write(layer, rotary, query, key, value, batch.slots, cache)
            yield "rotate_and_write", query, rotated
            for got, expected in zip(
                reference.read_pages(cache), reference.read_pages(expected_cache), strict=True
            ):
                yield "rotate_and_write", got.to(dtype), expected.to(dtype)
            output = kernels.attention(layer, kernels.attention_step(batch), query, cache)
            yield "attention", output, reference.attention(query, cache, spec, batch)


def _check_rows(kernels: NativeKernels, normal: _Normal) -> Iterator[_Comparison]:
    for dtype in _DTYPES:
        x, residual, weight = normal(3, 40).to(dtype), normal(3, 40), normal(40)
        expected_sums, expected = reference.rms_norm(x, residual, weight, 1e-5, dtype)
        out = torch.empty_like(x)
        kernels.rms_norm(x, residual, weight, 1e-5, out)
        yield "rms_norm", residual, expected_sums
        yield "rms_norm", out, expected
        half = torch.empty(3, 20, dtype=dtype)
        kernels.gate(x, Activation.SILU, half)
        yield "gate", half, reference.gate(x, "silu")
        yield "argmax", kernels.argmax(x).float(), reference.argmax(x).float()
        yield "log_sum_exp", kernels.log_sum_exp(x), reference.log_sum_exp(x)


def _check_linear(kernels: NativeKernels, normal: _Normal) -> Iterator[_Comparison]:
    weight, bias = normal(72, 96) / 10, normal(72)
    for num_rows in (1, 7, 20, 50):
        x = normal(num_rows, 96)
        for dtype, int8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            out = torch.empty(num_rows, 72)
            packed = kernels.pack_linear(weight.to(dtype), bias, int8=int8, output_dtype=torch.float32)
            kernels.linear(x.to(dtype), packed, out)
            arguments = (x.to(dtype), weight.to(dtype), bias, torch.float32)
            if int8:
                quantizes = kernels.quantizes_activations
                yield "linear", out, reference.int8_linear(*arguments, quantizes_activations=quantizes)
            else:
                yield "linear", out, reference.linear(*arguments)


def trial_batch(context_lens: tuple[int, ...], num_queries: tuple[int, ...], page_size: int) -> Batch:
    """A step of sequences with these context lengths, of which the last num_queries tokens are computed; their pages
    follow each other."""
    ranges, num_pages = [], 0
    for context_len, count in zip(context_lens, num_queries, strict=True):
        sequence = Sequence("check", [0] * context_len, SamplingParams(), max_num_tokens=context_len)
        needed = -(-context_len // page_size)
        sequence.page_table.extend(range(num_pages, num_pages + needed))
        num_pages += needed
        ranges.append(ScheduledRange(sequence, context_len - count, context_len))
    return build_batch(StepPlan(tuple(ranges)), page_size, torch.device("cpu"))
