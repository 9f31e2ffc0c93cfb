"""How near a GPU's limits the engine's steps come: decoding against copy bandwidth, prefill against the matmul rate.

    python tests/bench/gpu_roofline.py [--models llama-3.1-8b qwen2.5-0.5b] [--json FILE] [--seconds 450]

Models of the given shapes are made on the device with random weights, so that no file is needed. The whole takes less
than 8 minutes, of which FlashInfer's compilation takes several the first time; what the time does not suffice for is left
out and named. For each decode batch: milliseconds of a whole step of the engine, but for detokenizing (scheduling, flattening,
planning, replay, sampling), looking ahead and, in the next column, not; of the replay alone on the GPU; the part of the step
in which the GPU waits; and the bytes that a step must read (weights once, keys and values of all sequences) per second of
replay, over the measured copy bandwidth. For each prefill: the arithmetic of the model per second, over the measured rate of a
large matmul.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "engine_pkg/src"))

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from paged_engine.admission import PreparedRequest
from paged_engine.attention.flashinfer import FlashInferAttention
from paged_engine.attention.interface import AttentionSetup
from paged_engine.attention.select import select_backend
from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.execution.batch import Batch, build_batch
from paged_engine.execution.cuda_graphs import DecodeGraphs, make_decode_graphs
from paged_engine.execution.runner import ModelRunner
from paged_engine.execution.sampling import Sampler
from paged_engine.models.fuse import fuse_modules
from paged_engine.models.hook import PROBE_NAME, register
from paged_engine.models.load import LoadedModel
from paged_engine.models.probe import find_attention_layers
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.scheduling.sequence import ScheduledRange, Sequence, SequenceStatus, StepPlan

PAGE_SIZE = 16
BATCH_SIZES = (1, 8, 64, 256)
PROMPTS = (1024, 8192)
CONTEXT = 1024
"""Tokens of each decoding sequence, if the memory suffices."""
STEPS, WARM_UP_STEPS = 60, 10
MAX_SEQ_LEN = 16384

SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-3.1-8b": lambda: LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=MAX_SEQ_LEN,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "qwen2.5-0.5b": lambda: Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=MAX_SEQ_LEN,
        tie_word_embeddings=True,
    ),
}


@dataclass(frozen=True)
class Ceilings:
    """What the GPU does at best here."""

    copy_gbps: float
    """Bytes read and written per second by a copy of 2 GiB, in 10^9."""
    matmul_tflops: float
    """bfloat16, [8192, 8192] x [8192, 8192]."""


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    model: str
    what: str
    step_ms: float
    waiting_step_ms: float
    """The same where each step's tokens are waited for before the next is launched."""
    gpu_ms: float
    gap: float
    """Part of a step in which the GPU does not compute."""
    achieved: float
    """10^9 bytes or 10^12 operations per second, of the GPU's own time."""
    unit: str
    of_ceiling: float

    def __str__(self) -> str:
        return (
            f"{self.model:14} {self.what:16} {self.step_ms:9.3f} {self.waiting_step_ms:9.3f} {self.gpu_ms:9.3f} {self.gap:7.1%} "
            f"{self.achieved:9.1f} {self.unit:8} {self.of_ceiling:7.1%}"
        )


def gpu_seconds(function: Callable[[], object], repeats: int) -> float:
    """Seconds that the GPU takes for one call, the least of `repeats` after one to warm up."""
    function()
    best = float("inf")
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1000)
    return best


def wall_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call, up to the end of what it launched."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[repeats // 2]


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy bandwidth and matmul rate."""
    source = torch.zeros(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = gpu_seconds(lambda: target.copy_(source), 20)
    matrix = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return Ceilings(
        copy_gbps=2 * source.numel() / seconds / 1e9,
        matmul_tflops=2 * 8192**3 / gpu_seconds(lambda: matrix @ matrix, 20) / 1e12,
    )


def make_model(config: PretrainedConfig, device: torch.device) -> LoadedModel:
    """A bfloat16 model with random weights, set up as `load_model` does it."""
    register()
    with device:
        module = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=PROBE_NAME
        )
    module = module.eval().requires_grad_(False)
    return LoadedModel(
        module=module,
        hf_config=config,
        generation_config=GenerationConfig(),
        layers=find_attention_layers(module, MAX_SEQ_LEN),
        dtype=torch.bfloat16,
        device=device,
        vocab_size=config.vocab_size,
        max_seq_len=MAX_SEQ_LEN,
        eos_token_ids=frozenset(),
    )


class SilentTokenizer:
    """Opens detokenizers that have nothing to say."""

    def open_detokenizer(self, *, skip_special_tokens: bool) -> SilentTokenizer:
        """One for a sequence."""
        return self

    def push(self, token_id: int) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""


class Bench:
    """One model, ready to run."""

    def __init__(self, name: str, ceilings: Ceilings, device: torch.device) -> None:
        self.name = name
        self.ceilings = ceilings
        self.device = device
        self.model = make_model(SHAPES[name](), device)
        specs = tuple(layer.spec for layer in self.model.layers)
        setup = AttentionSetup(specs, PAGE_SIZE, device, self.model.dtype, self.model.dtype)
        self.backend = select_backend("flashinfer", setup)
        if not isinstance(self.backend, FlashInferAttention):
            sys.exit("error: FlashInfer cannot be used here; the warning above says why")
        fuse_modules(self.model, self.backend.library)
        self.token_bytes = (
            sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * self.model.dtype.itemsize
        )
        free, _ = torch.cuda.mem_get_info(device)
        self.context = min(CONTEXT, int(0.7 * free) // self.token_bytes // BATCH_SIZES[-1])
        self.num_pages = max(BATCH_SIZES[-1] * -(-self.context // PAGE_SIZE), PROMPTS[-1] // PAGE_SIZE)
        for layer in range(len(specs)):
            shape = (self.num_pages + 1, *self.backend.page_shape(layer))
            self.backend.bind(layer, torch.zeros(shape, dtype=self.model.dtype, device=device))
        self.graphs = self._capture()
        self.runner = ModelRunner(self.model, self.backend, self.graphs)
        self.runner.capture_graphs(self.num_pages)

    def _capture(self) -> DecodeGraphs:
        graphs = make_decode_graphs(
            self.model, self.backend, page_size=PAGE_SIZE, max_batch_size=BATCH_SIZES[-1]
        )
        assert graphs is not None
        graphs.sizes = list(BATCH_SIZES)
        return graphs

    @property
    def matmul_weights(self) -> list[torch.Tensor]:
        """What a step multiplies by: all weights but the embedding's rows, of which it reads a few."""
        embedding = self.model.module.get_input_embeddings().weight
        weights = [weight for weight in self.model.module.parameters() if weight is not embedding]
        return [*weights, embedding] if self.model.hf_config.tie_word_embeddings else weights

    def plan(self, num_sequences: int, start: int, end: int) -> StepPlan:
        """Positions [start, end) of so many sequences, each with pages of its own."""
        pages = -(-end // PAGE_SIZE)
        ranges = []
        for i in range(num_sequences):
            sequence = Sequence("bench", [i % 1000] * end, SamplingParams(), max_num_tokens=end)
            sequence.page_table.extend(range(i * pages, (i + 1) * pages))
            ranges.append(ScheduledRange(sequence, start, end))
        return StepPlan(tuple(ranges))

    def flat(self, plan: StepPlan) -> Batch:
        """The plan's batch."""
        return build_batch(plan, PAGE_SIZE, self.device)

    def engine(self, batch_size: int, look_ahead: bool) -> Engine:
        """An engine in the midst of decoding `batch_size` greedy sequences, which reach `context` tokens in STEPS steps."""
        config = EngineConfig(
            model="random weights", page_size=PAGE_SIZE, max_batch_size=BATCH_SIZES[-1], look_ahead=look_ahead
        ).fitted_to("cuda")
        scheduler = Scheduler(config, PagePool(self.num_pages, PAGE_SIZE, enable_prefix_caching=False))
        silent: Any = SilentTokenizer()
        engine = Engine(
            config,
            admission=silent,
            tokenizer=silent,
            eos_token_ids=frozenset(),
            scheduler=scheduler,
            runner=self.runner,
            sampler=Sampler(self.model.vocab_size),
        )
        num_tokens = self.context - STEPS
        sampling = SamplingParams(temperature=0)
        for i in range(batch_size):
            prompt = [i % 1000] * num_tokens
            sequence = Sequence(f"{i}", prompt, sampling, max_num_tokens=self.context + 1)
            engine.add(PreparedRequest(GenerateRequest(f"{i}", prompt, sampling), (sequence,)))
            # As if all but its last token had been computed; what the pages hold does not matter here.
            scheduler.waiting.discard(sequence)
            sequence.page_table.extend(scheduler.pages.allocate(scheduler.pages.pages_for(num_tokens)))
            sequence.num_computed = num_tokens - 1
            sequence.status = SequenceStatus.RUNNING
            scheduler.running.append(sequence)
        return engine

    def step_seconds(self, batch_size: int, look_ahead: bool) -> float:
        """Mean seconds of a step, after some to warm up."""
        engine = self.engine(batch_size, look_ahead)
        for _ in range(WARM_UP_STEPS):
            engine.step()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(STEPS - WARM_UP_STEPS):
            engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / (STEPS - WARM_UP_STEPS)

    def decode(self, batch_size: int) -> Result:
        """A step of `batch_size` sequences of about `context` tokens."""
        step_s, waiting_step_s = (self.step_seconds(batch_size, look_ahead) for look_ahead in (True, False))
        batch = self.flat(self.plan(batch_size, self.context - 1, self.context))
        assert self.graphs.covers(batch)
        self.runner.execute(batch)
        gpu_s = gpu_seconds(self.graphs._replays[batch_size], 20)
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in self.matmul_weights)
        achieved = (weight_bytes + batch_size * self.context * self.token_bytes) / gpu_s / 1e9
        return self._result(
            f"decode {batch_size}", step_s, waiting_step_s, gpu_s, achieved, "GB/s", self.ceilings.copy_gbps
        )

    def prefill(self, length: int) -> Result:
        """One prompt of `length` tokens in one step."""
        batch = self.flat(self.plan(1, 0, length))
        step_s = wall_seconds(lambda: self.runner.execute(batch), 5)
        gpu_s = gpu_seconds(lambda: self.runner.execute(batch), 5)
        head = self.model.module.get_output_embeddings().weight
        weights = sum(weight.numel() for weight in self.matmul_weights if weight.dim() == 2) - head.numel()
        # Causal attention multiplies each query with half of the keys and values, twice 2 operations each.
        attention = sum(
            2 * length**2 * layer.spec.num_query_heads * layer.spec.head_dim for layer in self.model.layers
        )
        achieved = (2 * weights * length + attention) / gpu_s / 1e12
        return self._result(
            f"prefill {length}", step_s, step_s, gpu_s, achieved, "TFLOP/s", self.ceilings.matmul_tflops
        )

    def _result(
        self,
        what: str,
        step_s: float,
        waiting_step_s: float,
        gpu_s: float,
        achieved: float,
        unit: str,
        ceiling: float,
    ) -> Result:
        return Result(
            self.name,
            what,
            step_ms=step_s * 1e3,
            waiting_step_ms=waiting_step_s * 1e3,
            gpu_ms=gpu_s * 1e3,
            gap=max(0.0, 1 - gpu_s / step_s),
            achieved=achieved,
            unit=unit,
            of_ceiling=achieved / ceiling,
        )


def results_of(bench: Bench, deadline: float) -> Iterator[Result]:
    """All lines of one model, as far as the time goes."""
    cases = [(bench.decode, size) for size in BATCH_SIZES] + [(bench.prefill, length) for length in PROMPTS]
    for measure, size in cases:
        if time.monotonic() > deadline:
            print(f"{bench.name}: no time left for {measure.__name__} {size}", file=sys.stderr)
            continue
        yield measure(size)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--seconds", type=float, default=450, help="no case is begun after so many seconds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: this needs a CUDA device")
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = measure_ceilings(device)
    print(torch.cuda.get_device_name(device), end=": ")
    print(f"copy {ceilings.copy_gbps:.0f} GB/s, bfloat16 matmul {ceilings.matmul_tflops:.0f} TFLOP/s")
    results: list[Result] = []
    for name in options.models:
        if time.monotonic() - started > options.seconds:
            print(f"no time left for {name}", file=sys.stderr)
            continue
        bench = Bench(name, ceilings, device)
        print(f"\n{name}: ready after {time.monotonic() - started:.0f} s; decoding at {bench.context} tokens")
        print(
            f"{'model':14} {'step':16} {'step ms':>9} {'waiting':>9} {'GPU ms':>9} {'gap':>7} {'achieved':>18} {'of limit':>8}"
        )
        for result in results_of(bench, started + options.seconds):
            results.append(result)
            print(result, flush=True)
        del bench
        torch.cuda.empty_cache()
    if options.json:
        figures = {
            "gpu": torch.cuda.get_device_name(device),
            **asdict(ceilings),
            "results": [asdict(r) for r in results],
        }
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"\n{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
