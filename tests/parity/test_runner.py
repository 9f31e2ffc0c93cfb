"""What the model runner promises beyond logits that are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hand_built import HandBuilt, load_tiny
from model_pair import Pair
from tiny_models import save_tiny_model

from paged_engine.execution.batch import Batch


def test_rows_come_in_the_order_of_the_plan(tiny_pair: Callable[[str], Pair]) -> None:
    pair = tiny_pair("llama")
    paged = HandBuilt(pair.paged, 4, "torch")
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]
    sequences = [paged.sequence(prompt) for prompt in prompts]
    logits = paged.step(*zip(sequences, [3, 1, 4, 2], strict=True))
    expected = torch.stack(
        [pair.reference_logits(prompt)[-1] for prompt in (prompts[0], prompts[1], prompts[3])]
    )
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_step_without_samples_does_not_compute_the_head(tiny_pair: Callable[[str], Pair]) -> None:
    model = tiny_pair("llama").paged
    paged = HandBuilt(model, 4, "torch")
    rows = []
    handle = model.module.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    try:
        logits = paged.step((paged.sequence([5, 6, 7, 8]), 3))
    finally:
        handle.remove()
    assert rows == [0]
    assert logits.shape == (0, model.vocab_size)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_models_yield_float32_logits_near_the_float32_ones(tmp_path: Path, dtype: str) -> None:
    save_tiny_model("llama", tmp_path)
    token_ids = list(range(3, 23))
    full = HandBuilt(load_tiny(tmp_path), 4, "torch").chunk_logits(token_ids, 5)
    half = HandBuilt(load_tiny(tmp_path, dtype=dtype), 4, "torch").chunk_logits(token_ids, 5)
    assert half.dtype == torch.float32
    assert (half - full).norm() < 0.1 * full.norm()


def test_logits_carry_no_graph(tiny_pair: Callable[[str], Pair]) -> None:
    paged = HandBuilt(tiny_pair("llama").paged, 4, "torch")
    assert not paged.step((paged.sequence([5, 6]), 2)).requires_grad


def test_measuring_the_largest_step_needs_one_page(
    tiny_pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures come from CUDA; the steps themselves run anywhere: 62 tokens of 4 sequences, all of them in page 0, of which
    4 choose a token and all others are scored."""
    rows: list[int] = []
    paged = HandBuilt(tiny_pair("llama").paged, 4, "torch", num_pages=1)
    execute = paged.runner.execute

    def record(batch: Batch) -> torch.Tensor:
        rows.append(batch.num_tokens)
        assert batch.query_starts.diff().tolist() == [16, 16, 15, 15]
        logits = execute(batch)
        assert logits.shape == (62, 128)
        return logits

    monkeypatch.setattr(paged.runner, "execute", record)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1700)
    assert paged.runner.measure_step(62, 4, 4) == 700
    assert rows == [62, 62]
