"""The engine on a GPU: the same answers as elsewhere, with and without CUDA graphs, on any device, from any thread."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.errors import ConfigurationError, ErrorCode
from paged_engine.generation import Output
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams

MAX_STEPS = 2000
TIE = 0.05
"""Two tokens whose logprobs lie within this may change places by the rounding of 16 bits."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("llama"))


def load(checkpoint: Path, device: object, **parameters: object) -> Engine:
    given = {"page_size": 16, "max_batch_size": 8, "max_num_tokens": 64, "num_pages": 200, **parameters}
    return load_engine(
        EngineConfig.from_parameters(
            {
                "model": str(checkpoint),
                "device": str(device),
                **{key: str(value) for key, value in given.items()},
            }
        )
    )


def requests(count: int = 12, max_tokens: int = 24, **controls: object) -> list[GenerateRequest]:
    """Prompts from one token to several chunks."""
    random = torch.Generator().manual_seed(0)
    sampling = SamplingParams.parse(
        {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2, **controls}
    )
    prompts = [
        torch.randint(3, 259, (int(torch.randint(1, 120, (), generator=random)),), generator=random).tolist()
        for _ in range(count)
    ]
    return [GenerateRequest(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]


def run(engine: Engine, wanted: list[GenerateRequest]) -> dict[str, list[Output]]:
    """All outputs by request; a new one joins at every other step."""
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in wanted}
    waiting = list(wanted)
    for step in range(MAX_STEPS):
        if waiting and step % 2 == 0:
            engine.add(engine.prepare(waiting.pop(0)))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        if not engine.has_work and not waiting:
            break
    assert engine.statistics().num_pages_used == 0
    return outputs


def check_same(first: dict[str, list[Output]], second: dict[str, list[Output]], *, tie: float = TIE) -> None:
    """The same tokens, up to where the two best were as good as each other."""
    for name, outputs in first.items():
        tokens = [output.logprobs[0] for output in outputs]
        others = [output.logprobs[0] for output in second[name]]
        assert len(tokens) == len(others)
        for token, other in zip(tokens, others, strict=True):
            if token.token_id != other.token_id:
                best, next_best = token.top[:2]
                assert best.logprob - next_best.logprob < tie, (name, token, other)
                break
            assert token.logprob == pytest.approx(other.logprob, abs=tie)


def test_float32_equals_the_cpu_to_the_token(checkpoint: Path, device: torch.device) -> None:
    on_gpu = run(load(checkpoint, device, dtype="float32"), requests())
    on_cpu = run(load(checkpoint, "cpu", dtype="float32", attention_backend="torch"), requests())
    for name, outputs in on_gpu.items():
        assert [output.token_ids for output in outputs] == [output.token_ids for output in on_cpu[name]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_flashinfer_equals_plain_torch(checkpoint: Path, device: torch.device, dtype: str) -> None:
    fast = load(checkpoint, device, dtype=dtype, cuda_graphs=False)
    slow = load(checkpoint, device, dtype=dtype, attention_backend="torch")
    check_same(run(fast, requests()), run(slow, requests()))


def test_the_prompts_logits_are_those_of_transformers(checkpoint: Path, device: torch.device) -> None:
    """The first token of each request, against the plain model in float32."""
    outputs = run(load(checkpoint, device, dtype="float16"), requests(max_tokens=1))
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").float()
    for request in requests():
        with torch.inference_mode():
            logprobs = reference(torch.tensor([request.prompt])).logits[0, -1].log_softmax(-1)
        token = outputs[request.request_id][0].logprobs[0]
        assert token.logprob == pytest.approx(logprobs[token.token_id].item(), abs=0.1)
        assert logprobs.max().item() - logprobs[token.token_id].item() < 0.1


def test_a_float8_cache(checkpoint: Path, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Served by FlashInfer, with graphs; plain torch rounds likewise, but what is rounded differs by 16 bits' rounding."""
    caplog.set_level(logging.INFO)
    parameters = {"dtype": "bfloat16", "kv_cache_dtype": "float8_e4m3fn"}
    fast = load(checkpoint, device, **parameters)
    assert "attention by flashinfer" in caplog.text
    slow = load(checkpoint, device, attention_backend="torch", **parameters)
    check_same(run(fast, requests()), run(slow, requests()), tie=0.3)


def test_an_int8_cache(checkpoint: Path, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """FlashInfer does not take it, and says so; plain torch quantizes as it does on a CPU."""
    parameters = {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    on_gpu = load(checkpoint, device, **parameters)
    assert "must be bfloat16 like the model or float8_e4m3fn, not int8" in caplog.text
    on_cpu = load(checkpoint, "cpu", attention_backend="torch", **parameters)
    check_same(run(on_gpu, requests()), run(on_cpu, requests()), tie=0.3)


@pytest.mark.parametrize("parameters", [{}, {"page_size": 1}, {"max_batch_size": 5}], ids=str)
def test_graphs_change_nothing(
    checkpoint: Path, device: torch.device, parameters: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Batches of all sizes, padded and not, between mixed steps."""
    caplog.set_level(logging.INFO)
    with_graphs = load(checkpoint, device, dtype="bfloat16", cuda_graphs=True, **parameters)
    assert "CUDA graphs in" in caplog.text
    without = load(checkpoint, device, dtype="bfloat16", cuda_graphs=False, **parameters)
    check_same(run(with_graphs, requests(20)), run(without, requests(20)))


def test_graphs_are_replayed(checkpoint: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[torch.cuda.CUDAGraph] = []
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        original(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    engine = load(checkpoint, device, dtype="bfloat16", cuda_graphs=True)
    run(engine, requests(3, max_tokens=20))
    assert len(replays) >= 20


def test_the_pool_is_sized_to_what_is_left(checkpoint: Path, device: torch.device) -> None:
    """With a small fraction, so that the test takes little memory; graphs and the largest step still fit behind it."""
    engine = load(checkpoint, device, dtype="bfloat16", num_pages=0, kv_cache_memory_fraction=0.05)
    free, total = torch.cuda.mem_get_info(device)
    assert engine.config.num_pages > 100
    assert free > total * 0.5
    check_same(run(engine, requests(4)), run(load(checkpoint, device, dtype="bfloat16"), requests(4)))


def test_steps_from_another_thread(checkpoint: Path, device: torch.device) -> None:
    """A thread's current device is the first one, whatever the loading thread's is."""
    engine = load(checkpoint, device, dtype="bfloat16")
    results: list[dict[str, list[Output]]] = []
    thread = threading.Thread(target=lambda: results.append(run(engine, requests(4))))
    thread.start()
    thread.join(timeout=120)
    check_same(results[0], run(load(checkpoint, device, dtype="bfloat16"), requests(4)))


def test_everything_lies_on_the_given_device(checkpoint: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    before = torch.cuda.memory_allocated(0)
    run(load(checkpoint, "cuda:1", dtype="bfloat16"), requests(4))
    assert torch.cuda.memory_allocated(0) == before


def test_a_gpu_that_is_not_there(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cuda:99"):
        load(checkpoint, "cuda:99")


def test_a_pool_that_does_not_fit(checkpoint: Path, device: torch.device) -> None:
    with pytest.raises(ConfigurationError, match="does not fit"):
        load(checkpoint, device, dtype="bfloat16", num_pages=2**30)
    torch.cuda.empty_cache()
    assert run(load(checkpoint, device, dtype="bfloat16"), requests(2))


def test_out_of_memory_in_a_step(checkpoint: Path, device: torch.device) -> None:
    """Those of the step get an error each, their pages come back, and the next request is served."""
    engine = load(checkpoint, device, dtype="bfloat16", cuda_graphs=False)
    execute = engine._runner.execute
    engine._runner.execute = functools.partial(_exhaust, device)  # type: ignore[method-assign]
    for request in requests(2):
        engine.add(engine.prepare(request))
    failed = engine.step() + engine.step()  # with look-ahead, the second tells of it
    assert [output.error.code for output in failed if output.error] == [ErrorCode.INTERNAL] * 2
    assert all("OutOfMemory" in str(output.error) for output in failed)
    engine.check_integrity()
    engine._runner.execute = execute  # type: ignore[method-assign]
    run(engine, requests(3))


@pytest.mark.parametrize(
    ("cuda_graphs", "controls"),
    [
        (True, {}),
        (False, {}),
        (False, {"temperature": 1, "seed": 5}),
        (False, {"temperature": 1, "seed": 5, "top_k": 9}),
        (False, {"temperature": 1, "seed": 5, "top_p": 0.8}),
        (False, {"temperature": 1, "seed": 5, "min_p": 0.05}),
        (False, {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2}),
    ],
    ids=str,
)
def test_looking_ahead_changes_nothing(
    checkpoint: Path, device: torch.device, cuda_graphs: bool, controls: dict[str, object]
) -> None:
    """Over a pool that is short of pages; with graphs in bfloat16, up to its rounding, which differs by batch."""
    wanted = requests(10, **controls)
    dtype = "bfloat16" if cuda_graphs else "float32"
    parameters = {"dtype": dtype, "cuda_graphs": cuda_graphs, "num_pages": 40}
    ahead = run(load(checkpoint, device, look_ahead=True, **parameters), wanted)
    plain = run(load(checkpoint, device, look_ahead=False, **parameters), wanted)
    check_same(ahead, plain)


def test_it_looks_ahead_on_a_gpu_unless_told_otherwise(checkpoint: Path, device: torch.device) -> None:
    engine = load(checkpoint, device, dtype="bfloat16")
    engine.add(engine.prepare(requests(1)[0]))
    assert engine.step() == []
    assert len(engine._in_flight) == 1
    assert engine.step()


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"temperature": 1, "seed": 5},
        {"temperature": 1, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1, "seed": 5, "top_p": 0.9},
        {"temperature": 1, "seed": 5, "min_p": 0.05},
        {"temperature": 1},
        {"temperature": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"allowed_token_ids": [40, 50, 60, 70]},
        {"logit_bias": {"40": 2.0}, "min_tokens": 30, "max_tokens": 40, "ignore_eos": False},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1},
        {"temperature": 1, "frequency_penalty": 0.2, "logprobs": None},
    ],
    ids=str,
)
def test_a_launch_waits_for_nothing(
    checkpoint: Path, device: torch.device, controls: dict[str, object]
) -> None:
    """Decode steps and steps with a newcomer's prompt: torch sees no operation that waits, and the launch is over while the
    device is still busy with something else."""
    engine = load(checkpoint, device, dtype="bfloat16", look_ahead=True)
    wanted = requests(6, **controls)
    run(engine, wanted)  # what happens at a first run only
    for request in wanted[:3]:
        engine.add(engine.prepare(request))
    for _ in range(8):
        engine.step()
    engine.add(engine.prepare(wanted[3]))
    for _ in range(3):
        while engine._in_flight and not engine._may_be_followed(engine._in_flight[-1]):
            engine._collect()
        torch.cuda.synchronize(device)
        stream = torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            torch.cuda._sleep(2_000_000_000)  # cycles, about a second
        torch.cuda.set_sync_debug_mode("error")
        try:
            assert engine._launch()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not stream.query()
        while len(engine._in_flight) > 1:
            engine._collect()
    run(engine, [])


def _exhaust(device: torch.device, _: object) -> torch.Tensor:
    return torch.empty(1 << 50, dtype=torch.uint8, device=device)
