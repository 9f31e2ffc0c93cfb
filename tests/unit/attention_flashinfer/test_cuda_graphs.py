"""Captured decode steps: what they compute, with operators recorded in the place of CUDA graphs, and what they are given."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import flashinfer_double
import pytest
import torch
from attention_suite import Case
from hand_built import load_tiny
from operator_recorder import OperatorRecorder, Recording
from tiny_models import save_tiny_model

from paged_engine.attention.flashinfer import FlashInferAttention
from paged_engine.attention.interface import AttentionSetup
from paged_engine.attention.torch_reference import TorchAttention
from paged_engine.config import EngineConfig
from paged_engine.errors import ConfigurationError
from paged_engine.execution import cuda_graphs
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.execution.cuda_graphs import (
    CapturableAttention,
    DecodeGraphs,
    batch_sizes,
    make_decode_graphs,
)
from paged_engine.execution.kv_cache import create_kv_cache
from paged_engine.execution.runner import ModelRunner
from paged_engine.models.fuse import fuse_modules
from paged_engine.models.hook import forward_flat
from paged_engine.models.load import LoadedModel
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, StepPlan

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_PAGES = 60
MAX_SEQ_LEN = 32
MAX_BATCH_SIZE = 6


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt_oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Plain attention, windows with soft caps, and sinks."""
    overrides = {} if request.param != "gpt_oss" else {"num_local_experts": 1, "num_experts_per_tok": 1}
    return load_tiny(
        save_tiny_model(request.param, tmp_path_factory.mktemp(request.param), overrides=overrides)
    )


class World:
    """A model over a cache that is NaN where nothing was written, with or without graphs."""

    def __init__(
        self, model: LoadedModel, with_graphs: bool, recorder: OperatorRecorder | None = None
    ) -> None:
        setup = AttentionSetup(
            tuple(layer.spec for layer in model.layers), PAGE_SIZE, CPU, model.dtype, model.dtype
        )
        self.backend = FlashInferAttention(setup, flashinfer_double)
        self.caches = [
            torch.full((NUM_PAGES + 1, *self.backend.page_shape(layer)), torch.nan)
            for layer in range(len(setup.specs))
        ]
        for layer, cache in enumerate(self.caches):
            self.backend.bind(layer, cache)
        self.graphs = None
        if with_graphs:
            self.graphs = DecodeGraphs(
                functools.partial(forward_flat, model.module),
                self.backend,
                lambda: recorder or OperatorRecorder(),
                device=CPU,
                vocab_size=model.vocab_size,
                page_size=PAGE_SIZE,
                max_batch_size=MAX_BATCH_SIZE,
                max_seq_len=MAX_SEQ_LEN,
            )
        self.runner = ModelRunner(model, self.backend, self.graphs)
        if with_graphs:
            self.runner.capture_graphs(dummy_page=NUM_PAGES)
        self.free_pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()

    def sequence(self, token_ids: list[int], prompt_logprobs: int | None = None) -> Sequence:
        sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
        return Sequence("s", token_ids, sampling, max_num_tokens=MAX_SEQ_LEN)

    def batch(self, *work: tuple[Sequence, int]) -> Batch:
        """The next n tokens of each (sequence, n)."""
        ranges = []
        for sequence, num_tokens in work:
            end = sequence.num_computed + num_tokens
            while len(sequence.page_table) * PAGE_SIZE < end:
                sequence.page_table.append(self.free_pages.pop(0))
            ranges.append(ScheduledRange(sequence, sequence.num_computed, end))
            sequence.num_computed = end
        batch = build_batch(StepPlan(tuple(ranges)), PAGE_SIZE, CPU)
        for item in ranges:
            item.sequence.num_scored += len(item.scored)
        return batch


def steps_of_a_day(world: World) -> list[tuple[Batch, torch.Tensor]]:
    """Sequences that come, chunk by chunk, grow and leave, so that batches of all sizes alternate with mixed steps.

    Some have their prompts scored, token by token, in steps in which the others decode.
    """
    random = torch.Generator().manual_seed(0)
    done: list[tuple[Batch, torch.Tensor]] = []
    running: list[Sequence] = []
    for step in range(60):
        if len(running) < MAX_BATCH_SIZE and step < 30 and step % 2 == 0:
            length = int(torch.randint(1, 12, (), generator=random))
            token_ids = torch.randint(3, 100, (length,), generator=random).tolist()
            running.append(world.sequence(token_ids, prompt_logprobs=0 if step % 3 == 0 else None))
        if not running:
            break
        work = [(item, min(item.num_uncomputed, 1 if item.scores_prompt else 5)) for item in running]
        batch = world.batch(*work)
        logits = world.runner.execute(batch)
        done.append((batch, logits.clone()))
        for item in running:
            if item.num_uncomputed == 0:
                item.token_ids.append(int(torch.randint(3, 100, (), generator=random)))
        for item in [item for item in running if item.num_tokens >= 20]:
            running.remove(item)
            world.free_pages.extend(item.page_table)
    return done


def test_a_replay_equals_the_step_itself(model: LoadedModel) -> None:
    without = [logits for _, logits in steps_of_a_day(World(model, with_graphs=False))]
    world = World(model, with_graphs=True)
    assert world.graphs is not None
    replayed = set()
    num_scored = 0
    for (batch, logits), expected in zip(steps_of_a_day(world), without, strict=True):
        if world.graphs.covers(batch):
            replayed.add(batch.num_sequences)
            num_scored += len(batch.logit_rows) - batch.num_samples
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert replayed == set(range(1, MAX_BATCH_SIZE + 1))
    assert num_scored > 0


def test_fused_operations_are_replayed_rightly(tmp_path: Path) -> None:
    """They work in place, and keep the packed rotary angles of a step for all of its layers."""
    model = load_tiny(save_tiny_model("qwen3", tmp_path))
    without = [logits for _, logits in steps_of_a_day(World(model, with_graphs=False))]
    assert fuse_modules(model, flashinfer_double)["residual sums"] == 2
    world = World(model, with_graphs=True)
    for (_, logits), expected in zip(steps_of_a_day(world), without, strict=True):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_padding_writes_into_the_dummy_page_only(model: LoadedModel) -> None:
    world = World(model, with_graphs=True)
    sequence = world.sequence([5, 6, 7])
    world.runner.execute(world.batch((sequence, 2)))
    before = [cache.clone() for cache in world.caches]
    world.runner.execute(world.batch((sequence, 1)))
    (page,) = sequence.page_table
    for cache, old in zip(world.caches, before, strict=True):
        old[page, :, 2] = cache[page, :, 2]
        assert torch.equal(cache[:NUM_PAGES].nan_to_num(), old[:NUM_PAGES].nan_to_num())
        assert cache[page, :, :3].isfinite().all()


def test_what_is_covered(model: LoadedModel) -> None:
    world = World(model, with_graphs=True)
    assert world.graphs is not None
    many = [world.sequence([1, 2]) for _ in range(MAX_BATCH_SIZE + 1)]
    assert not world.graphs.covers(world.batch((many[0], 2))), "more than one token for a sequence"
    assert world.graphs.covers(world.batch(*((item, 1) for item in many[1:])))
    many[0].num_computed = 0
    for item in many:
        item.num_computed = 0
    assert not world.graphs.covers(world.batch(*((item, 1) for item in many))), (
        "more sequences than the largest graph"
    )
    assert not World(model, with_graphs=False).runner._graphs


def test_rows_that_do_not_sample_are_left_out(model: LoadedModel) -> None:
    """A prompt that is computed one token at a time looks like a decode step."""
    world, plain = World(model, with_graphs=True), World(model, with_graphs=False)
    results = []
    for each in (world, plain):
        attach = ModelRunner(each.runner._model, each.backend, each.graphs)
        prompt, running = each.sequence([5, 6, 7]), each.sequence([8])
        results.append(attach.execute(each.batch((prompt, 1), (running, 1))))
    assert results[0].shape[0] == 1
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=2e-5)


class FailingRecorder(OperatorRecorder):
    """Cannot record a model, or only some sizes of it."""

    def __init__(self, num_good: int) -> None:
        self._num_good = num_good

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self._num_good -= 1
        if self._num_good < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(function)


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_model_that_cannot_be_captured_runs_without(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, num_good: int
) -> None:
    caplog.set_level(logging.INFO)
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    world = World(model, with_graphs=True, recorder=FailingRecorder(num_good))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "decode steps are run without CUDA graphs: RuntimeError: operation not permitted when stream is capturing"
    ]
    assert world.graphs is not None
    batch = world.batch((world.sequence([5]), 1))
    assert not world.graphs.covers(batch)
    assert world.runner.execute(batch).isfinite().all()
    assert given_back == [True]


def test_progress_is_shown_while_it_is_captured(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of graphs of a large model take minutes; a line every few seconds says how far it is."""
    caplog.set_level(logging.INFO)
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    World(model, with_graphs=True)
    lines = [record.getMessage() for record in caplog.records if "graphs" in record.getMessage()]
    assert lines[0].startswith("captured ") and lines[0].endswith(" of 4 CUDA graphs")
    assert lines[-1].startswith("captured 4 CUDA graphs in ")


def test_no_room_for_the_buffers_ends_the_load(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    setup = AttentionSetup(
        tuple(layer.spec for layer in model.layers), PAGE_SIZE, CPU, model.dtype, model.dtype
    )
    backend = FlashInferAttention(setup, flashinfer_double)
    monkeypatch.setattr(cuda_graphs, "DecodeGraphs", lambda *_, **__: full())
    on_gpu = replace(model, device=torch.device("cuda:0"))
    with pytest.raises(
        ConfigurationError, match=r"max_batch_size = 8 sequences do not fit .*cuda_graphs to false"
    ):
        make_decode_graphs(on_gpu, backend, page_size=PAGE_SIZE, max_batch_size=8)


def test_memory_is_estimated_from_two_graphs(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest brings the memory that all share, each of the other three what the second brought."""
    world = World(model, with_graphs=True)
    assert world.graphs is not None and world.graphs.sizes == [1, 2, 4, 6]
    free = iter([1000, 900, 900, 890])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 2000))
    assert world.graphs.measure() == 100 + 3 * 10
    assert not world.graphs.covers(world.batch((world.sequence([5]), 1))), "the trial's graphs are gone"


def test_what_cannot_be_measured_is_not_captured(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    world = World(model, with_graphs=True, recorder=FailingRecorder(len(batch_sizes(MAX_BATCH_SIZE))))
    assert world.graphs is not None
    assert world.graphs.measure() == 0
    world.runner.capture_graphs(NUM_PAGES)
    assert not world.graphs.covers(world.batch((world.sequence([5]), 1)))


@pytest.mark.parametrize("max_batch_size", [1, 2, 3, 6, 8, 64, 100, 256, 300, 512])
def test_the_ladder_reaches_every_batch_with_little_padding(max_batch_size: int) -> None:
    sizes = batch_sizes(max_batch_size)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_batch_size
    for num_sequences in range(1, max_batch_size + 1):
        size = next(size for size in sizes if size >= num_sequences)
        assert size - num_sequences < max(4, min(32, num_sequences))


def test_no_graphs_without_a_gpu_or_with_a_backend_that_has_none(model: LoadedModel) -> None:
    setup = AttentionSetup(
        tuple(layer.spec for layer in model.layers), PAGE_SIZE, CPU, model.dtype, model.dtype
    )
    assert isinstance(FlashInferAttention(setup, flashinfer_double), CapturableAttention)
    assert not isinstance(TorchAttention(setup), CapturableAttention)
    backend = FlashInferAttention(setup, flashinfer_double)
    assert make_decode_graphs(model, backend, page_size=PAGE_SIZE, max_batch_size=8) is None


WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal.default")
"""Operators whose result Python, or the size of a tensor, depends on: they wait for the GPU, which a capture forbids."""


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-rope-yarn",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3_moe",
        "gemma3_text",
        "gpt_oss",
        "phi3",
    ],
)
def test_what_models_do_can_be_captured(name: str, tmp_path: Path) -> None:
    world = World(load_tiny(save_tiny_model(name, tmp_path)), with_graphs=False)
    batch = world.batch(*((world.sequence([5]), 1) for _ in range(3)))
    world.backend.plan(batch)
    with torch.inference_mode(), Recording() as recording:
        forward_flat(world.runner._model.module, batch.token_ids, batch.positions, batch.logit_rows)
    names = {str(function) for function, *_ in recording.calls}
    assert any("flashinfer_double" in name for name in names)
    assert [name for name in names if any(word in name for word in WAITS)] == []


def test_the_cache_has_a_page_for_padding() -> None:
    setup = Case(head_dim=64, page_size=PAGE_SIZE).setup
    backend = FlashInferAttention(setup, flashinfer_double)
    config = EngineConfig(model="any", num_pages=10, page_size=PAGE_SIZE)
    cache = create_kv_cache(
        config, backend, 2, torch.float32, CPU, max_seq_len=40, measure_step=lambda: 0, num_spare_pages=1
    )
    assert cache.num_pages == 10
    assert [len(backend._caches[layer]) for layer in range(2)] == [11, 11]


def test_the_recorder_finds_what_stays_in_python() -> None:
    """The stand-in has the property that the test above relies on."""
    buffer, kept = torch.zeros(2), [torch.ones(2)]
    output = torch.zeros(2)
    replay = OperatorRecorder().record(lambda: output.copy_(buffer * 2 + kept[0]))  # type: ignore[arg-type,func-returns-value]
    buffer.fill_(3)
    kept[0] = torch.full((2,), 100.0)
    replay()
    assert output.tolist() == [7, 7]
