"""Prefix reuse: what is computed once, and that no page is ever read that does not hold exactly the right prefix.

The harness checks the second at each step; the tests look at how much is computed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from scheduling_harness import Harness, make_sequence

from paged_engine.scheduling.sequence import Sequence

PROMPT = range(1000, 1100)


def harness_of(**values: Any) -> Harness:
    return Harness(**{"page_size": 16, "num_pages": 64, "max_num_tokens": 64, "max_batch_size": 8, **values})


def test_the_same_prompt_twice_in_one_step_is_computed_once() -> None:
    harness = harness_of(max_num_tokens=256)
    twins = [make_sequence(PROMPT, 1, index=index) for index in range(2)]
    harness.add(*twins)
    assert [item.sequence for item in harness.step().ranges] == twins[:1], "the second waits for the first"
    [item] = harness.step().ranges
    assert (item.sequence, item.start, item.end) == (twins[1], 96, 100)
    assert not harness.scheduler.has_work
    assert [twin.num_cached for twin in twins] == [0, 96]
    assert harness.scheduler.num_prefix_cached_tokens == 96


@pytest.mark.parametrize("num_copies", [4, 40])
def test_n_sequences_of_one_prompt_compute_it_once(num_copies: int) -> None:
    harness = harness_of(num_pages=400)
    harness.add(*(make_sequence(PROMPT, 1, index=index) for index in range(num_copies)))
    harness.run()
    assert harness.num_tokens_computed == 100 + 4 * (num_copies - 1)
    assert harness.num_steps <= 2 + -(-num_copies // 8)


def test_nobody_waits_for_a_page_that_it_cannot_use() -> None:
    """The last page of a prompt of whole pages is computed by each: all can do so in the same step."""
    harness = harness_of(max_num_tokens=128)
    harness.add(*(make_sequence(PROMPT[:96], 1, index=index) for index in range(5)))
    assert [len(plan.ranges) for plan in harness.run()] == [1, 4]
    assert harness.num_tokens_computed == 96 + 4 * 16


def test_without_the_prefix_cache_each_computes_all() -> None:
    harness = harness_of(enable_prefix_caching=False, max_num_tokens=512)
    harness.add(*(make_sequence(PROMPT, 1, index=index) for index in range(4)))
    assert len(harness.step().ranges) == 4
    assert harness.num_tokens_computed == 400


def test_the_same_prompt_while_the_first_is_in_prefill() -> None:
    harness = harness_of()
    first, second = make_sequence(PROMPT, 4, arrival=1), make_sequence(PROMPT, 4, arrival=2)
    harness.add(first)
    harness.step()
    assert first.num_computed == 64
    harness.add(second)
    harness.run()
    assert second.num_cached == 96
    assert first.token_ids == second.token_ids


def test_a_longer_prompt_after_a_shorter_one() -> None:
    harness = harness_of()
    harness.add(make_sequence(PROMPT, 1))
    harness.run()
    longer = make_sequence([*PROMPT, 7, 8, 9], 1)
    harness.add(longer)
    harness.run()
    assert longer.num_cached == 96


@pytest.mark.parametrize("num_pages", [1, 2, 3])
def test_a_prompt_of_whole_pages_leaves_its_last_page_to_compute(num_pages: int) -> None:
    harness = harness_of()
    for expected in (0, 16 * (num_pages - 1)):
        sequence = make_sequence(PROMPT[: 16 * num_pages], 3)
        harness.add(sequence)
        harness.run()
        assert sequence.num_cached == expected


def test_a_conversation_computes_only_what_is_new() -> None:
    """Generated pages are reused too."""
    harness = harness_of(num_pages=200)
    history: list[int] = []
    for turn in range(10):
        history += [turn] * 30
        sequence = make_sequence(history, 50)
        harness.add(sequence)
        harness.run()
        if turn:
            assert sequence.num_prompt_tokens - sequence.num_cached <= 30 + 16
        history = list(sequence.token_ids)


def test_after_eviction_it_is_computed_again() -> None:
    harness = harness_of(num_pages=10)
    expected = None
    for _ in range(2):
        subject = make_sequence(PROMPT, 5)
        harness.add(subject)
        harness.run()
        assert subject.num_cached == 0
        assert expected in (None, subject.token_ids)
        expected = subject.token_ids
        harness.add(make_sequence(150, 5, name="another"))
        harness.run()


def test_a_salt_shares_with_its_own_only_also_within_a_step() -> None:
    harness = harness_of(max_num_tokens=512)
    sequences = [make_sequence(PROMPT, 1, salt=salt) for salt in ("a", "b", "a")]
    harness.add(*sequences)
    assert [item.sequence for item in harness.step().ranges] == sequences[:2]
    harness.run()
    assert [sequence.num_cached for sequence in sequences] == [0, 0, 96]


def test_those_that_wait_for_a_prefix_hold_nobody_up() -> None:
    harness = harness_of()
    harness.add(
        *(make_sequence(PROMPT, 2, index=index) for index in range(3)),
        make_sequence(9, 2, name="other", arrival=1),
    )
    assert [item.sequence.request_id for item in harness.step().ranges] == ["", "other"]
    harness.run()


def test_a_place_is_kept_for_those_that_wait_for_a_prefix() -> None:
    harness = harness_of(max_batch_size=2)
    first, second = make_sequence(PROMPT, 9, arrival=1), make_sequence(PROMPT, 9, arrival=2)
    other = make_sequence(9, 2, name="other", arrival=3)
    harness.add(first, second, other)
    harness.run()
    assert harness.first_token_step[second] == 3
    assert harness.first_token_step[other] > harness.finish_step[first]


def test_when_the_one_computing_the_prefix_is_cancelled_the_next_computes_it() -> None:
    harness = harness_of()
    first, second = make_sequence(PROMPT, 2, arrival=1), make_sequence(PROMPT, 2, arrival=2)
    harness.add(first, second)
    harness.step()
    harness.scheduler.finish(first)
    harness.run()
    assert second.num_cached == 64
    assert second.num_output_tokens == 2


def test_nobody_waits_for_one_that_comes_after_it() -> None:
    """A sooner sequence computes the prefix itself rather than wait for a later one that it has to itself overtaken."""
    harness = harness_of()
    later = make_sequence(range(1000, 1300), 1, priority=5)
    harness.add(later)
    harness.step()
    sooner = make_sequence(range(1000, 1100), 1, priority=0)
    harness.add(sooner)
    harness.step()
    assert (sooner.num_cached, harness.first_token_step.get(sooner)) == (64, 2)
    harness.run()


def test_equal_texts_growing_side_by_side_keep_their_own_pages() -> None:
    harness = harness_of()
    twins = [make_sequence(5, 60, name="a", index=index) for index in range(3)]
    harness.add(*twins)
    for _ in range(40):
        harness.step()
    assert twins[0].token_ids == twins[1].token_ids
    tables = [twin.page_table for twin in twins]
    assert not set(tables[0]) & set(tables[1])
    harness.run()
    assert harness.pool.num_cached == 4, "one of each page is worth keeping"


def test_what_is_found_again_after_a_preemption_is_not_counted_as_a_hit() -> None:
    harness = harness_of(num_pages=14, max_num_tokens=128)
    older, younger = (make_sequence(60, 100, name=name, arrival=ord(name)) for name in "oy")
    harness.add(older, younger)
    while not younger.num_preemptions:
        harness.step()
    num_lost = younger.num_tokens - 1
    harness.run()
    assert (younger.num_cached, harness.scheduler.num_prefix_cached_tokens) == (0, 0)
    assert 2 * 159 < harness.num_tokens_computed < 2 * 159 + num_lost, "some of its pages were found again"


def test_forty_prompts_with_a_code_word_each_in_a_small_pool() -> None:
    """The memory of the harness would show a foreign code word as a foreign prefix."""
    chance = random.Random(3)
    common = [chance.randrange(100) for _ in range(70)]
    sequences: list[Sequence] = []
    for number in range(40):
        where = chance.choice([0, 16, 33, 64, 70])
        prompt = [*common[:where], 10_000 + number, *common[where:]]
        sequences.append(make_sequence(prompt, 30, name=f"{number}", arrival=number))
    harness = harness_of(num_pages=20)
    for sequence in sequences:
        harness.add(sequence)
        if chance.random() < 0.5:
            harness.step()
    harness.run()
    assert all(sequence.num_output_tokens == 30 for sequence in sequences)
    assert harness.scheduler.num_prefix_cached_tokens > 0
    assert harness.scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_pages", [9, 12, 30])
def test_the_text_is_the_same_with_and_without_the_prefix_cache(num_pages: int) -> None:
    texts = []
    for enabled in (True, False):
        harness = harness_of(num_pages=num_pages, enable_prefix_caching=enabled)
        sequences = [
            make_sequence([*PROMPT[: 10 * (i % 4)], *PROMPT[:60]], 40, name=f"{i}", arrival=i)
            for i in range(12)
        ]
        for sequence in sequences:
            harness.add(sequence)
            harness.step()
        harness.run()
        texts.append([sequence.token_ids for sequence in sequences])
    assert texts[0] == texts[1]
