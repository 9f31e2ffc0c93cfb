"""Steps that are launched before the tokens of the one before them are known: same answers, nobody's pages, no waiting.

The engines here compute on a device that is as late as it may be (deferred_device.py), and their books are checked after each
launch and each step that is taken in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deferred_device import DeferredDevice, defer
from engine_runs import Answers, engine, random_requests, request, run

from paged_engine.engine import Engine
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.generation import Output
from paged_engine.request import GenerateRequest
from paged_engine.scheduling.sequence import FinishReason

PROMPT = list(range(30, 60))
EOS = 2

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Late:
    """An engine that looks ahead, its device, and for each of its launches whether a step was in flight."""

    engine: Engine
    device: DeferredDevice
    launches: list[bool]


def late_engine(checkpoint: Path, **parameters: Any) -> Late:
    target = engine(checkpoint, **{"look_ahead": True, **parameters})
    device, launches = defer(target), []
    launch, collect = target._launch, target._collect

    def checked_launch() -> bool:
        in_flight = len(target._in_flight)
        has_launched = launch()
        if has_launched:
            launches.append(in_flight > 0)
        target.check_integrity()
        return has_launched

    def checked_collect() -> list[Output]:
        outputs = collect()
        target.check_integrity()
        return outputs

    target._launch, target._collect = checked_launch, checked_collect  # type: ignore[method-assign]
    return Late(target, device, launches)


def plain_engine(checkpoint: Path, **parameters: Any) -> Engine:
    """One on such a device that does not look ahead."""
    target = engine(checkpoint, look_ahead=False, **parameters)
    defer(target)
    return target


def assert_same(got: Answers, expected: Answers, item: GenerateRequest) -> None:
    name = item.request_id
    for index in range(item.sampling.n):
        assert got.tokens(name, index) == expected.tokens(name, index), item
        assert got.text(name, index) == expected.text(name, index), item
        assert got.ending(name, index) == expected.ending(name, index), item
        mine, others = got.logprobs(name, index), expected.logprobs(name, index)
        assert [token.logprob for token in mine] == pytest.approx(
            [token.logprob for token in others], abs=1e-4
        )


@pytest.mark.parametrize(
    "controls",
    [
        {},
        {"temperature": 1, "seed": 3},
        {"temperature": 1, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1, "seed": 3, "top_k": 200},
        {"temperature": 1, "seed": 3, "top_p": 0.8},
        {"temperature": 1, "seed": 3, "min_p": 0.05},
        {"temperature": 1, "seed": 3, "top_p": 0.8, "min_p": 0.01},
        {"logit_bias": {40: 3.0}, "min_tokens": 20, "ignore_eos": False},
        {"allowed_token_ids": [40, 50, 60, 70]},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5, "temperature": 1, "seed": 5},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.7, "presence_penalty": -0.5, "n": 2},
        {"logprobs": 3, "prompt_logprobs": 2},
        {"stop": ["never said"]},
        {"n": 3, "temperature": 1, "seed": 9},
    ],
    ids=str,
)
def test_the_host_waits_for_nothing(checkpoint: Path, controls: dict[str, Any]) -> None:
    """Each step but the first is launched while another one is in flight, and no launch waits."""
    late = late_engine(checkpoint)
    items = [request(f"r{i}", PROMPT[i:], **controls) for i in range(3)]
    got, expected = run(late.engine, *items, stagger=2), run(plain_engine(checkpoint), *items, stagger=2)
    for item in items:
        assert_same(got, expected, item)
        assert got.prompt_logprobs(item.request_id) == expected.prompt_logprobs(item.request_id)
    assert late.launches[0] is False
    assert all(late.launches[1:])
    assert late.device.waits == []


@pytest.mark.parametrize(
    "controls",
    [
        {"structured_outputs": {"regex": "[ab]{30}"}},
        {"bad_words": ["ab"]},
    ],
    ids=str,
)
def test_controls_that_need_the_tokens_get_them(checkpoint: Path, controls: dict[str, Any]) -> None:
    """Not one step runs ahead of such a request before its last token, and all do then; a launch waits in no case."""
    late = late_engine(checkpoint)
    special = request("special", PROMPT, max_tokens=10, **controls)
    plain = request("plain", PROMPT[5:], max_tokens=30)
    got = run(late.engine, special, plain)
    for item in (special, plain):
        assert_same(got, run(engine(checkpoint), item), item)
    assert late.launches == [False] * 10 + [True] * 20
    assert late.device.waits == []


def test_any_mixture_is_what_each_is_alone(checkpoint: Path) -> None:
    """Greedy, drawn, guided, penalised, n > 1, with stops; over a pool that preempts, with hits of the prefix cache."""
    late = late_engine(checkpoint, num_pages=36)
    guided = [
        request(f"g{i}", [40 + i] * 20, structured_outputs={"regex": "[a-c]{2,9}x"}, ignore_eos=False)
        for i in range(2)
    ]
    items = [*random_requests(seed=21, count=14, longest=90), *guided]
    random.Random(3).shuffle(items)
    got = run(late.engine, *items, stagger=2)
    solo = plain_engine(checkpoint, enable_prefix_caching=False)
    for item in items:
        assert_same(got, run(solo, item), item)
    statistics = late.engine.statistics()
    assert statistics.num_preemptions > 0
    assert statistics.num_prefix_cached_tokens > 0
    num_tokens = sum(len(got.tokens(*key)) for key in got.outputs)
    assert statistics.num_generated_tokens == num_tokens, "what nobody takes in is not counted"
    assert True in late.launches
    assert False in late.launches[1:]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
@pytest.mark.parametrize("by", ["max_tokens", "stop token", "EOS", "stop string"])
def test_it_ends_where_it_should(checkpoint: Path, by: str, num_tokens: int) -> None:
    """At the first token, the second, …: to the token, and the one computed beyond it is neither shown nor counted."""
    solo = engine(checkpoint)
    plain = run(solo, request("a", PROMPT, max_tokens=12))
    tokens = plain.tokens("a")
    end = tokens.index(tokens[num_tokens - 1]) + 1
    ways: dict[str, dict[str, Any]] = {
        "max_tokens": {"max_tokens": num_tokens},
        "stop token": {"stop_token_ids": [tokens[num_tokens - 1]]},
        "EOS": {"ignore_eos": False, "min_tokens": num_tokens - 1, "logit_bias": {EOS: 100.0}},
        "stop string": {"stop": [(solo.tokenizer.decode(tokens[:end]))[-2:]]},
    }
    items = [
        request("a", PROMPT, **{"max_tokens": 12, **ways[by]}),
        request("b", PROMPT[3:], max_tokens=20),
    ]
    late = late_engine(checkpoint)
    got, expected = run(late.engine, *items), run(engine(checkpoint), *items)
    for item in items:
        assert_same(got, expected, item)
    assert got.ending("a") is (FinishReason.LENGTH if by == "max_tokens" else FinishReason.STOP)
    ordinary = engine(checkpoint)
    run(ordinary, *items)
    # The token computed beyond the end may have completed a page.
    counted = [replace(target.statistics(), num_pages_cached=0) for target in (late.engine, ordinary)]
    assert counted[0] == counted[1]


def test_one_ends_in_the_step_that_sends_another_back(checkpoint: Path) -> None:
    """The end comes at every token there is, before, in and after the step that runs out of pages."""
    solo = engine(checkpoint)
    tokens = run(solo, request("a", PROMPT, max_tokens=24)).tokens("a")
    neighbour = request("b", PROMPT[::-1], max_tokens=24)
    expected = run(solo, neighbour)
    late = late_engine(checkpoint, num_pages=20, enable_prefix_caching=False)
    num_preemptions = []
    for end in range(1, 24):
        first = tokens.index(tokens[end]) + 1
        item = request("a", PROMPT, max_tokens=24, stop_token_ids=[tokens[end]])
        got = run(late.engine, item, neighbour)
        assert got.tokens("a") == tokens[:first]
        assert_same(got, expected, neighbour)
        num_preemptions.append(late.engine.statistics().num_preemptions)
    assert num_preemptions[0] == 0
    assert num_preemptions[-1] > 1


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_twice_while_its_token_is_pending(checkpoint: Path, enable_prefix_caching: bool) -> None:
    """At every moment, with a seed: no token more, fewer or other ones. The second time comes two or three steps later."""
    item = request("a", PROMPT, temperature=1.2, seed=42, max_tokens=14, logprobs=1)
    expected = run(engine(checkpoint), item)
    late = late_engine(checkpoint, max_num_tokens=9, enable_prefix_caching=enable_prefix_caching)
    pending = 0
    for moment in range(1, 15, 2):
        for second in (2, 3):
            late.engine.add(late.engine.prepare(item))
            answers, number = Answers(), 0
            while late.engine.has_work:
                answers.take(late.engine.step())
                number += 1
                if number in (moment, moment + second) and late.engine.scheduler.running:
                    pending += late.engine.scheduler.preempt_last().num_pending
                    late.engine.check_integrity()
            assert_same(answers, expected, item)
    assert pending >= 10


def test_a_name_is_used_again_while_the_old_token_is_in_flight(checkpoint: Path) -> None:
    """Cancelled after each number of steps; the next request of that name begins at once, and gets nothing of the old one."""
    late = late_engine(checkpoint, max_num_tokens=12)
    item = request("a", PROMPT[:9], max_tokens=8)
    expected = run(engine(checkpoint), item)
    for moment in range(1, 9):
        late.engine.add(late.engine.prepare(request("a", PROMPT, max_tokens=20)))
        for _ in range(moment):
            late.engine.step()
        ended = late.engine.abort("a", RequestError.cancelled())
        assert [output.finished for output in ended] == [True]
        late.engine.check_integrity()
        assert_same(run(late.engine, item), expected, item)


@pytest.mark.parametrize("n", [1, 4])
def test_pages_of_a_step_in_flight_are_found(checkpoint: Path, n: int) -> None:
    """A newcomer, and the further sequences of one request, share what a step in flight has only begun to compute."""
    found = []
    for target in (late_engine(checkpoint).engine, engine(checkpoint)):
        target.add(target.prepare(request("a", PROMPT, max_tokens=6, n=n, temperature=1, seed=1)))
        target.step()
        run(target, request("b", PROMPT, max_tokens=6))
        found.append(target.statistics().num_prefix_cached_tokens)
    assert found[0] == found[1] == 28 * n


def codes(outputs: list[Output]) -> dict[str, ErrorCode]:
    return {output.request_id: output.error.code for output in outputs if output.error}


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_launch_fails_behind_a_step_in_flight(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """The tokens in flight arrive, then the sequences of the launch that failed end, and one that was not in it goes on."""
    late = late_engine(checkpoint, max_batch_size=2)
    expected = run(engine(checkpoint), *(request(name, PROMPT[i:]) for i, name in enumerate("abc")))
    for i, name in enumerate("abc"):
        late.engine.add(late.engine.prepare(request(name, PROMPT[i:])))
    answers = Answers()
    for _ in range(num_steps):
        answers.take(late.engine.step())

    def exhausted(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as short:
        short.setattr(late.engine._runner, "execute", exhausted)
        answers.take(late.engine.step())
    assert {name: answers.tokens(name) for name in "ab"} == {
        name: expected.tokens(name)[:num_steps] for name in "ab"
    }
    failed = late.engine.step()
    assert codes(failed) == {"a": ErrorCode.INTERNAL, "b": ErrorCode.INTERNAL}
    assert all("OutOfMemoryError" in str(output.error) for output in failed if output.error)
    assert run(late.engine).tokens("c") == expected.tokens("c")


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_the_device_fails_with_two_steps_in_flight(checkpoint: Path, moment: str) -> None:
    """It says so only when waited for: the sequences of both steps end, nothing stays in the cache, and others go on."""
    late = late_engine(checkpoint, max_batch_size=2)
    expected = run(engine(checkpoint), request("c", PROMPT))
    for name in "abc":
        late.engine.add(late.engine.prepare(request(name, PROMPT)))
    late.engine.step()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if moment == "before":
        late.device.noted.appendleft(fail)
        late.device.num_done -= 1
        outputs = late.engine.step()
    else:
        late.device.note(fail)
        outputs = late.engine.step()
        assert not codes(outputs), "the step before it was good"
        outputs = late.engine.step()
    assert codes(outputs) == {"a": ErrorCode.INTERNAL, "b": ErrorCode.INTERNAL}
    assert late.engine.statistics().num_pages_cached == 0
    assert run(late.engine).tokens("c") == expected.tokens("c")


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_step_in_flight_is_work_when_all_have_gone(checkpoint: Path, is_faulty: bool) -> None:
    """One more step takes it in, and its fault ends nobody who comes later."""
    late = late_engine(checkpoint)
    item = request("a", PROMPT, max_tokens=8)
    expected = run(engine(checkpoint), item)
    late.engine.add(late.engine.prepare(item))
    late.engine.step()

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    if is_faulty:
        late.device.noted.appendleft(fail)
        late.device.num_done -= 1
    late.engine.abort("a", RequestError.cancelled())
    had_work = [late.engine.has_work]
    assert late.engine.step() == []
    had_work.append(late.engine.has_work)
    assert had_work == [True, False]
    assert_same(run(late.engine, item), expected, item)


def test_the_late_device_is_late() -> None:
    """What the other tests rest on: values come when an event is waited for, not before, and in order."""
    device = DeferredDevice()
    with device:
        values = torch.tensor([1.0, 2.0]).to("meta", non_blocking=True)
        early = values.to("cpu", non_blocking=True)
        number = device.num_noted
        values += 1
        late = values.to("cpu", non_blocking=True)
    assert early.isnan().all()
    device.run_until(number)
    assert early.tolist() == [1.0, 2.0]
    assert late.isnan().all()
    assert device.waits == []
    with device:
        assert values.cpu().tolist() == [2.0, 3.0]
        assert values[torch.tensor([1])].shape == (1,)
        places = torch.tensor([0]).to("meta", non_blocking=True)
        values[places] = values.new_full((), 5)
        values[:1] = 6
        values.masked_fill_(values > 5, 7)
        assert len(device.waits) == 2
        values[places] = 8
        assert values.cpu().tolist() == [8.0, 3.0]
    waits = ["a", "aten.index.Tensor", "aten.index_put_.default", "a"]
    assert [wait.split()[0] for wait in device.waits] == waits
