"""The text that a whole engine gives, where it ends or is interrupted in the middle of something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Answers, engine, request, run
from tiny_checkpoint import save_tiny_checkpoint

from paged_engine.engine import Engine
from paged_engine.scheduling.sequence import FinishReason

PROMPT = list(range(60, 80))
FAMILY = "👨\u200d👩\u200d👧"
HALF = "\ufffd"

pytestmark = pytest.mark.usefixtures("one_thread")


def saying(text: str, **sampling: Any) -> dict[str, Any]:
    """Controls that make the model say `text`, one byte a token, and then end."""
    return {"structured_outputs": {"choice": [text]}, "ignore_eos": False, "max_tokens": 100, **sampling}


@pytest.mark.usefixtures("any_order_of_steps")
def test_max_tokens_inside_a_character_of_many_tokens(checkpoint: Path) -> None:
    """With every max_tokens there is, the one with which the text comes to its own end included."""
    target = engine(checkpoint)
    num_bytes = len(FAMILY.encode())
    for num_tokens in range(1, num_bytes + 2):
        answers = run(target, request("a", PROMPT, **saying(FAMILY, max_tokens=num_tokens)))
        tokens = answers.tokens("a")
        deltas = [output.text for output in answers.outputs["a", 0]]
        assert len(tokens) == num_tokens
        assert answers.text("a") == target.tokenizer.decode(tokens)
        assert not any(HALF in delta for delta in deltas[:-1])
        assert answers.ending("a") is (FinishReason.LENGTH if num_tokens <= num_bytes else FinishReason.STOP)


@pytest.mark.usefixtures("any_order_of_steps")
def test_a_stop_string_in_the_prompt_does_not_count(checkpoint: Path) -> None:
    target = engine(checkpoint)
    for prompt, text in (("say stop now", "go on, st"), ("say sto", "p it")):
        answers = run(target, request("a", prompt, **saying(text, stop=["stop"])))
        assert answers.text("a") == text


@pytest.mark.parametrize("stop_token", ["of the request", "of the tokenizer", "of generation_config"])
def test_each_token_that_may_end_a_text_ends_it(tmp_path: Path, stop_token: str) -> None:
    """The tokenizer's own is 2, generation_config's are 2 and 50, the request's is 51."""
    save_tiny_checkpoint(tmp_path)
    config = tmp_path / "generation_config.json"
    config.write_text('{"eos_token_id": [50]}', encoding="utf-8")
    token_id = {"of the request": 51, "of the tokenizer": 2, "of generation_config": 50}[stop_token]
    answers = run(
        engine(tmp_path),
        request("a", PROMPT, ignore_eos=False, stop_token_ids=[51], logit_bias={token_id: 100}, min_tokens=3),
    )
    assert answers.tokens("a")[3:] == [token_id]
    assert answers.ending("a") is FinishReason.STOP


def interrupted(target: Engine, name: str, moments: tuple[int, ...], **sampling: Any) -> Answers:
    """One request whose pages are taken away after each of these numbers of tokens."""
    answers = Answers()
    target.add(target.prepare(request(name, PROMPT, **sampling)))
    while target.has_work:
        answers.take(target.step())
        target.check_integrity()
        if (name, 0) in answers.outputs and len(answers.tokens(name)) in moments and target.has_work:
            moments = tuple(moment for moment in moments if moment != len(answers.tokens(name)))
            target.scheduler.preempt_last()
    assert not moments
    return answers


TEXT = f"ABC DEFGH {FAMILY} ABC DEFGHIJ and so on, and on"
INTERRUPTED: dict[str, dict[str, Any]] = {
    "a half-matched stop string": saying(TEXT, stop=["DEFGHIJ"]),
    "a pending character": saying(TEXT),
    "both in the text": saying(TEXT, stop=["👧 ABC DEFGHIJ"], include_stop_str_in_output=True),
    "a seed": {"temperature": 1.2, "seed": 42, "top_p": 0.9, "max_tokens": 60, "logprobs": 1},
    "penalties": {
        "temperature": 0.9,
        "seed": 7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "max_tokens": 60,
        "min_tokens": 50,
    },
}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("what", INTERRUPTED)
def test_an_interrupted_text_is_the_same(checkpoint: Path, what: str, enable_prefix_caching: bool) -> None:
    """Preempted here and there, and twice: nothing is repeated or lost, and nothing is counted anew."""
    sampling = INTERRUPTED[what]
    target = engine(checkpoint, enable_prefix_caching=enable_prefix_caching)
    whole = run(target, request("whole", PROMPT, **sampling))
    num_tokens = len(whole.tokens("whole"))
    for first in range(1, num_tokens - 1, 5):
        name = f"{first}"
        target = engine(checkpoint, enable_prefix_caching=enable_prefix_caching)
        answers = interrupted(target, name, (first, min(first + 3, num_tokens - 1)), **sampling)
        assert [output.text for output in answers.outputs[name, 0]] == [
            output.text for output in whole.outputs["whole", 0]
        ]
        assert answers.tokens(name) == whole.tokens("whole")
        assert answers.ending(name) == whole.ending("whole")
        assert target.statistics().num_preemptions == 2
