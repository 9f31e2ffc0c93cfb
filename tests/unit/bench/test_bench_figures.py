"""Loads, tables and the stopwatch say what they should."""

from __future__ import annotations

import time

import pytest
from agreement import agreement, leading_tokens
from loads import LOADS, Load
from report import markdown_table
from stopwatch import Stopwatch


def test_throughput_counts_outputs_or_with_one_output_token_everything() -> None:
    assert Load(8, 32, 128).num_counted_tokens == 8 * 128
    assert Load(8, 1024, 1).num_counted_tokens == 8 * 1025


def test_prompts_are_the_same_for_the_same_seed_and_share_no_beginning_otherwise() -> None:
    beginnings = []
    for load in LOADS:
        for seed in range(3):
            prompts = load.prompts(seed)
            assert prompts == load.prompts(seed)
            assert {len(prompt) for prompt in prompts} == {load.num_prompt_tokens}
            beginnings += [tuple(prompt[:16]) for prompt in prompts]
    assert len(set(beginnings)) == len(beginnings)


def test_a_table_is_markdown_with_aligned_columns() -> None:
    table = markdown_table(["load", "tokens/s"], [["1 x 2+3", "5"], ["64 x 2+3", "1,234"]])
    assert table.splitlines() == [
        "| load     | tokens/s |",
        "|----------|---------:|",
        "| 1 x 2+3  |        5 |",
        "| 64 x 2+3 |    1,234 |",
    ]


def test_agreement_counts_tokens_until_outputs_part() -> None:
    assert leading_tokens([1, 2, 3], [1, 2, 3]) == 3
    assert leading_tokens([1, 2, 3], [1, 5, 3]) == 1
    assert agreement([[1, 2], [3, 4]], [[1, 2], [5, 4]]) == "50%, 1 of 2"


class Machine:
    def work(self) -> str:
        time.sleep(0.02)
        return "done"

    def fail(self) -> None:
        raise ValueError("broken")


def test_a_stopwatch_adds_up_calls_and_leaves_the_class_as_it_was() -> None:
    original = Machine.work
    machine = Machine()
    with Stopwatch({"all": [(Machine, "work"), (Machine, "fail")]}) as watch:
        assert [machine.work() for _ in range(3)] == ["done"] * 3
        with pytest.raises(ValueError, match="broken"):
            machine.fail()
    assert watch.seconds["all"] >= 0.06
    assert Machine.work is original
