"""The whole engine over a tiny checkpoint: a request's tokens depend on nothing but the request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from engine_runs import Answers, engine, random_requests, request, run
from transformers import AutoModelForCausalLM

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.request import GenerateRequest, SamplingParams
from paged_engine.scheduling.sequence import FinishReason

EOS = 2

pytestmark = pytest.mark.usefixtures("one_thread", "any_order_of_steps")


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path) -> None:
    prompt = list(range(30, 67))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    answers = run(engine(checkpoint, max_num_tokens=9, page_size=4), request("a", prompt, max_tokens=48))
    assert answers.tokens("a") == expected
    assert answers.ending("a") is FinishReason.LENGTH


@pytest.mark.parametrize(
    "parameters",
    [
        {"page_size": 1, "num_pages": 1024},
        {"page_size": 7},
        {"page_size": 16, "num_pages": 64},
        {"max_num_tokens": 9},
        {"long_prefill_token_threshold": 1},
        {"long_prefill_token_threshold": 5, "chunking_policy": "equal_progress"},
        {"num_pages": 40},
        {"num_pages": 44, "enable_prefix_caching": False},
        {"num_pages": 60, "scheduler_policy": "guaranteed_no_evict"},
        {"max_num_tokens": 256, "enable_chunked_prefill": False},
        {"max_batch_size": 1},
    ],
    ids=lambda parameters: " ".join(f"{key}={value}" for key, value in parameters.items()),
)
def test_a_request_gives_the_same_in_any_company(checkpoint: Path, parameters: dict[str, object]) -> None:
    """Whatever the page and chunk size, the neighbours, preemptions and prefix hits: each answer is that of the request alone."""
    requests = random_requests(seed=5, count=16)
    solo = engine(checkpoint, enable_prefix_caching=False, max_num_tokens=512, num_pages=512)
    alone = {item.request_id: run(solo, item) for item in requests}
    together = run(engine(checkpoint, **parameters), *requests, stagger=2)
    for item in requests:
        for index in range(item.sampling.n):
            expected = alone[item.request_id]
            assert together.tokens(item.request_id, index) == expected.tokens(item.request_id, index), item
            assert together.text(item.request_id, index) == expected.text(item.request_id, index), item
            assert together.ending(item.request_id, index) == expected.ending(item.request_id, index), item


def test_a_small_pool_does_preempt(checkpoint: Path) -> None:
    """The case above with 40 pages means something only if sequences are really sent back."""
    target = engine(checkpoint, num_pages=40)
    run(target, *random_requests(seed=5, count=16), stagger=2)
    assert target.statistics().num_preemptions > 0


def test_two_requests_of_more_than_half_the_pool_both_finish(checkpoint: Path) -> None:
    target = engine(checkpoint, num_pages=20, page_size=4)
    answers = run(target, request("a", [5] * 24, max_tokens=24), request("b", [6] * 24, max_tokens=24))
    assert (len(answers.tokens("a")), len(answers.tokens("b"))) == (24, 24)


def test_a_request_that_cannot_fit_is_refused_with_the_numbers(checkpoint: Path) -> None:
    target = engine(checkpoint, num_pages=8, page_size=16)
    with pytest.raises(
        RequestError, match=r"it has 200 tokens, at most 127 .* pool of 8 pages of 16 tokens"
    ) as caught:
        target.prepare(request("a", [5] * 200))
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert len(run(target, request("b", [5] * 5)).tokens("b")) == 24


@pytest.mark.parametrize("length", [255, 256, 257, 2560])
def test_prompts_around_the_longest(checkpoint: Path, length: int) -> None:
    target = engine(checkpoint)
    if length >= 256:
        with pytest.raises(RequestError, match=f"prompt too long: it has {length} tokens, at most 255"):
            target.prepare(request("a", [5] * length))
    else:
        answers = run(target, request("a", [5] * length, max_tokens=1000))
        assert len(answers.tokens("a")) == 1
        assert answers.ending("a") is FinishReason.LENGTH


def test_max_tokens_beyond_the_context_is_capped(checkpoint: Path) -> None:
    answers = run(engine(checkpoint, max_seq_len=128), request("a", [5] * 100, max_tokens=1000))
    assert len(answers.tokens("a")) == 28
    assert answers.ending("a") is FinishReason.LENGTH


def test_an_empty_prompt_starts_from_bos(checkpoint: Path) -> None:
    target = engine(checkpoint)
    assert run(target, request("a", "")).tokens("a") == run(target, request("b", [1])).tokens("b")
    assert run(target, request("c", [])).tokens("c") == run(target, request("d", [1])).tokens("d")


@pytest.mark.parametrize("token_id", [-1, 320, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(checkpoint: Path, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"input_ids must be token ids from 0 to 319, got {token_id}"):
        engine(checkpoint).prepare(request("a", [5, token_id]))


def test_bad_sampling_ids_are_refused(checkpoint: Path) -> None:
    with pytest.raises(RequestError, match="logit_bias must hold token ids from 0 to 319, got 320"):
        engine(checkpoint).prepare(request("a", [5], logit_bias={"320": 1.0}))


def test_huge_max_tokens_run_together(checkpoint: Path) -> None:
    """Four requests that might take the whole pool, but end soon, share the steps."""
    target = engine(checkpoint, num_pages=64)
    solo = run(target, request("x", [9] * 8, max_tokens=10)).tokens("x")
    stop_token = solo[9]
    first = solo.index(stop_token) + 1
    requests = [request(f"r{i}", [9] * 8, max_tokens=240, stop_token_ids=[stop_token]) for i in range(4)]
    answers = Answers()
    for item in requests:
        target.add(target.prepare(item))
    num_steps = 0
    while target.has_work:
        answers.take(target.step())
        num_steps += 1
    assert all(answers.tokens(item.request_id) == solo[:first] for item in requests)
    assert num_steps <= first + 4


@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 8, 30])
def test_stops_end_where_they_should(checkpoint: Path, prompt_length: int) -> None:
    """EOS, stop tokens, stop strings and max_tokens each end the text once, and only what belongs to it is shown."""
    target = engine(checkpoint)
    prompt = [40 + i for i in range(prompt_length)]
    plain = run(target, request("a", prompt, max_tokens=30))
    tokens, text = plain.tokens("a"), plain.text("a")
    assert target.tokenizer.decode(tokens) == text

    by_token = run(target, request("b", prompt, max_tokens=30, stop_token_ids=[tokens[6]]))
    end = tokens.index(tokens[6])
    assert by_token.tokens("b") == tokens[: end + 1]
    assert by_token.text("b") == target.tokenizer.decode(tokens[:end])
    assert by_token.ending("b") is FinishReason.STOP

    for start in range(0, len(text) - 3, 3):
        stop = text[start : start + 3]
        if "\ufffd" in stop:
            continue
        name = f"s{start}"
        by_string = run(target, request(name, prompt, max_tokens=30, stop=[stop]))
        assert by_string.text(name) == text[: text.index(stop)]
        assert by_string.ending(name) is FinishReason.STOP


def test_eos_ends_unless_ignored(checkpoint: Path) -> None:
    """A strong bias makes EOS the choice; min_tokens holds it back; ignore_eos goes on through it."""
    target = engine(checkpoint)
    bias = {str(EOS): 100}
    ends = run(target, request("a", [5], ignore_eos=False, logit_bias=bias, max_tokens=10))
    assert (ends.tokens("a"), ends.text("a"), ends.ending("a")) == ([EOS], "", FinishReason.STOP)
    later = run(target, request("b", [5], ignore_eos=False, logit_bias=bias, max_tokens=10, min_tokens=4))
    assert len(later.tokens("b")) == 5
    ignored = run(target, request("c", [5], logit_bias=bias, max_tokens=64))
    assert ignored.tokens("c") == [EOS] * 64
    assert ignored.ending("c") is FinishReason.LENGTH


def test_a_cancelled_request_frees_its_pages_at_any_moment(checkpoint: Path) -> None:
    """Queued, in each chunk, between the last chunk and the first token, decoding, and while it waits after preemption."""
    target = engine(checkpoint, num_pages=24, max_num_tokens=9, max_batch_size=3, enable_prefix_caching=False)
    for moment in range(30):
        for name in ("a", "b", "c", "victim"):
            target.add(target.prepare(request(name, [7] * 20, max_tokens=24)))
        answers = Answers()
        for _ in range(moment):
            answers.take(target.step())
        aborted = target.abort("victim", RequestError.cancelled())
        assert [output.error.code for output in aborted if output.error] == [ErrorCode.CANCELLED] * len(
            aborted
        )
        assert target.abort("victim", RequestError.cancelled()) == []
        while target.has_work:
            target.check_integrity()
            answers.take(target.step())
        assert target.statistics().num_pages_used == 0
        assert [len(answers.tokens(name)) for name in ("a", "b", "c")] == [24, 24, 24]


def test_a_deadline_keeps_the_text_so_far(checkpoint: Path, any_order_of_steps: bool) -> None:
    """With look-ahead, the token that a step in flight is choosing is no part of it."""
    target = engine(checkpoint)
    whole = run(target, request("a", [50, 60], max_tokens=40))
    target.add(target.prepare(request("b", [50, 60], max_tokens=40, stop=[whole.text("a")[:200] + "never"])))
    answers = Answers()
    for _ in range(7):
        answers.take(target.step())
    answers.take(target.abort("b", FinishReason.TIMEOUT))
    assert answers.ending("b") is FinishReason.TIMEOUT
    so_far = whole.tokens("a")[: 7 - any_order_of_steps]
    assert answers.tokens("b") == so_far
    assert answers.text("b") == target.tokenizer.decode(so_far)


def test_a_fault_in_a_step_ends_the_sequences_of_that_step_only(checkpoint: Path) -> None:
    """The model raises once (a token it does not have); the one that had to wait is served, and the pool is clean."""
    target = engine(checkpoint, max_batch_size=2)
    solo = run(target, request("c", [9, 8, 7])).tokens("c")
    broken = target.prepare(request("a", [5, 6]))
    broken.sequences[0].token_ids[0] = 2**31 - 1
    target.add(broken)
    target.add(target.prepare(request("b", [5, 7])))
    target.add(target.prepare(request("c", [9, 8, 7])))
    answers = Answers()
    while target.has_work:
        answers.take(target.step())
        target.check_integrity()
    for name in ("a", "b"):
        ending = answers.ending(name)
        assert isinstance(ending, RequestError)
        assert ending.code is ErrorCode.INTERNAL
    assert answers.tokens("c") == solo
    assert target.statistics().num_pages_used == 0


def test_a_fault_in_one_of_several_sequences_ends_the_request_once(checkpoint: Path) -> None:
    target = engine(checkpoint)
    prepared = target.prepare(request("a", [5, 6], n=3, temperature=1, seed=1))
    target.add(prepared)

    def fail(token_ids: object) -> str:
        raise RuntimeError("no text for these")

    target._generations["a"][1]._text.push = fail  # type: ignore[method-assign]
    answers = Answers()
    while target.has_work:
        answers.take(target.step())
    assert all(isinstance(answers.ending("a", index), RequestError) for index in range(3))
    assert target.statistics().num_pages_used == 0


def test_steps_never_exceed_the_budget_and_a_long_prompt_holds_no_stream_up(checkpoint: Path) -> None:
    """Beside a prompt of 240 tokens in chunks, a running stream gets a token in every step and a newcomer is not kept waiting."""
    target = engine(checkpoint, max_num_tokens=16, page_size=4, max_batch_size=4)
    sizes = []
    plan = target.scheduler.plan

    def recorded_plan():  # type: ignore[no-untyped-def]
        result = plan()
        sizes.append(result.num_tokens)
        return result

    target.scheduler.plan = recorded_plan  # type: ignore[method-assign]
    target.add(target.prepare(request("stream", [5, 6, 7], max_tokens=60)))
    target.step()
    target.add(target.prepare(request("long", [8] * 240, max_tokens=4)))
    target.step()
    target.add(target.prepare(request("newcomer", [9] * 10, max_tokens=4)))
    ended: list[str] = []
    while target.has_work:
        outputs = target.step()
        names = [output.request_id for output in outputs]
        assert "stream" in names or "stream" in ended
        ended += [output.request_id for output in outputs if output.finished]
    assert max(sizes) <= 16
    assert ended.index("newcomer") < ended.index("long")


def test_a_conversation_reuses_what_it_has_computed(checkpoint: Path) -> None:
    """Ten turns: the same tokens as without the cache, and most of each prompt comes from it."""
    cached, plain = engine(checkpoint), engine(checkpoint, enable_prefix_caching=False)
    history: list[int] = [1]
    for turn in range(10):
        history += [30 + turn] * 6
        item = request(f"t{turn}", list(history), max_tokens=12)
        answers = run(cached, item)
        assert answers.tokens(item.request_id) == run(plain, item).tokens(item.request_id)
        history += answers.tokens(item.request_id)
    assert cached.statistics().num_prefix_cached_tokens > 0.7 * (cached.statistics().num_prompt_tokens - 12)
    assert plain.statistics().num_prefix_cached_tokens == 0


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[ab]{3,8}c"}, "[ab]{3,8}c"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        (
            {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
            r'\{\s*"a"\s*:\s*[12]\s*(,.*)?\}',
        ),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_outputs_have_their_form_in_any_company(
    checkpoint: Path, form: dict[str, object], pattern: str
) -> None:
    """Beside free neighbours, over a pool that preempts: the text has the form, and is that of the request alone."""
    guided = [
        request(
            f"g{i}",
            [40 + i] * 30,
            structured_outputs=form,
            ignore_eos=False,
            max_tokens=60,
            temperature=1,
            seed=i,
        )
        for i in range(4)
    ]
    target = engine(checkpoint, num_pages=40)
    together = run(target, *random_requests(seed=9, count=6), *guided, stagger=1)
    assert target.statistics().num_preemptions > 0
    for item in guided:
        if together.ending(item.request_id) is FinishReason.STOP:
            assert re.fullmatch(pattern, together.text(item.request_id), re.DOTALL)
        alone = run(engine(checkpoint), item)
        assert together.tokens(item.request_id) == alone.tokens(item.request_id)
    assert any(together.ending(item.request_id) is FinishReason.STOP for item in guided)


def test_a_grammar_that_is_none_is_refused(checkpoint: Path) -> None:
    target = engine(checkpoint)
    for form in ({"regex": "("}, {"json": {"type": "banana"}}, {"grammar": "::="}):
        with pytest.raises(RequestError, match="structured_outputs") as caught:
            target.prepare(request("a", [5], structured_outputs=form))
        assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_salt_keeps_tenants_apart(checkpoint: Path) -> None:
    target = engine(checkpoint)
    prompt, sampling = [11] * 40, SamplingParams.parse({"temperature": 0, "max_tokens": 2})
    for salt, hits in (("a", 0), ("b", 0), ("a", 36), ("", 0), ("b", 36)):
        before = target.statistics().num_prefix_cached_tokens
        run(target, GenerateRequest(f"r{salt}", prompt, sampling, cache_salt=salt))
        assert target.statistics().num_prefix_cached_tokens - before == hits
