"""A step that finds no memory: who hears of it, and what is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_checkpoint import save_tiny_checkpoint

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.errors import ErrorCode
from paged_engine.generation import Output
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    checkpoint = save_tiny_checkpoint(tmp_path_factory.mktemp("llama"))
    return load_engine(
        EngineConfig(
            model=str(checkpoint),
            page_size=4,
            num_pages=64,
            max_batch_size=2,
            max_num_tokens=32,
            num_threads=1,
        )
    )


def add(engine: Engine, name: str, prompt: list[int]) -> None:
    sampling = SamplingParams.parse({"max_tokens": 4, "temperature": 0, "ignore_eos": True})
    engine.add(engine.prepare(GenerateRequest(name, prompt, sampling)))


def run(engine: Engine) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


def exhausted(*_: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("num_steps_before", [0, 1, 2])
def test_those_of_the_step_fail_and_the_rest_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_steps_before: int
) -> None:
    """In a first chunk, in a second one, while decoding: two are in the step, and a third still waits for its turn."""
    prompts = {"a": list(range(3, 27)), "b": list(range(3, 40)), "c": [5, 6, 7]}
    add(engine, "c", prompts["c"])
    expected = [output.token_ids for output in run(engine)["c"]]
    for name, prompt in prompts.items():
        add(engine, name, prompt)
    for _ in range(num_steps_before):
        assert not any(output.error for output in engine.step())
    with monkeypatch.context() as short:
        short.setattr(engine._runner, "_forward", exhausted)
        failed = engine.step()
    assert {output.error.code for output in failed if output.error} == {ErrorCode.INTERNAL}
    assert all(
        output.error and "OutOfMemoryError: CUDA out of memory" in str(output.error) for output in failed
    )
    engine.check_integrity()
    rest = run(engine)
    assert {output.request_id for output in failed} | set(rest) == set(prompts)
    if "c" in rest:
        assert [output.token_ids for output in rest["c"]] == expected
    assert engine.statistics().num_pages_used == 0


class OnGpu:
    """A runner's model, as far as recovery asks: it says that it lies on a GPU."""

    device = torch.device("cuda:0")


@pytest.fixture
def calls(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What recovery asks of CUDA, in order."""
    made: list[str] = []
    monkeypatch.setattr(engine._runner, "_model", OnGpu())
    monkeypatch.setattr(type(engine._runner), "device", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: made.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty_cache"))
    return made


def test_what_a_failed_step_held_is_given_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    add(engine, "a", [3, 4, 5])
    with monkeypatch.context() as short:
        short.setattr(engine._runner, "_forward", exhausted)
        assert [output.error is None for output in engine.step()] == [False]
    assert calls == ["synchronize", "empty_cache"]
    add(engine, "a", [3, 4, 5])
    while engine.has_work:
        assert not any(output.error for output in engine.step())
    assert calls == ["synchronize", "empty_cache"], "a good step waits for nothing"


def test_a_gpu_that_can_do_nothing_any_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """The service ends what is in flight, finds that the engine is unsound, and says that it is not ready."""

    def dead(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    add(engine, "a", [3, 4, 5])
    with monkeypatch.context() as short:
        short.setattr(engine._runner, "_forward", exhausted)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.step()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.check_integrity()
    assert not engine.has_work
