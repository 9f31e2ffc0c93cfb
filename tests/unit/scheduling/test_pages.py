"""PagePool by itself: which pages are handed out, in which order they are forgotten, and what check_integrity sees."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from scheduling_harness import make_sequence

from paged_engine.scheduling.pages import IntegrityError, PagePool
from paged_engine.scheduling.prefix_index import page_key
from paged_engine.scheduling.sequence import Sequence


def hold(pool: PagePool, sequence: Sequence, num_computed: int) -> Sequence:
    """Give a sequence its pages, and enter those that its first `num_computed` tokens complete."""
    hits = pool.match(sequence)
    pool.share(hits)
    sequence.page_table.extend([*hits, *pool.allocate(pool.pages_for(sequence.num_tokens) - len(hits))])
    sequence.num_computed = num_computed
    pool.enter_computed(sequence, 0)
    return sequence


def let_go(pool: PagePool, sequence: Sequence) -> None:
    pool.release(sequence.page_table)
    del sequence.page_table[:]
    sequence.num_computed = 0


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.num_held, pool.num_cached, pool.num_free


def test_pages_are_handed_out_in_order_and_come_back_in_order() -> None:
    pool = PagePool(6, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) == [3]
    pool.release([0, 1, 2])
    assert counts(pool) == (1, 0, 5)
    assert pool.allocate(4) == [0, 1, 2, 4]
    assert counts(pool) == (5, 0, 1)


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "expected"), [(1, 5, 5), (16, 0, 0), (16, 1, 1), (16, 16, 1), (16, 17, 2)]
)
def test_pages_for(page_size: int, num_tokens: int, expected: int) -> None:
    assert PagePool(1, page_size).pages_for(num_tokens) == expected


def test_more_pages_than_are_free_is_an_error_that_changes_nothing() -> None:
    pool = PagePool(3, 4)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match="2 pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert counts(pool) == (2, 0, 1)


def test_giving_back_what_nobody_holds_is_an_error() -> None:
    pool = PagePool(3, 4)
    pool.release(pool.allocate(1))
    with pytest.raises(IntegrityError, match="page 0 was given back"):
        pool.release([0])


def test_computed_pages_stay_cached_and_are_shared_by_reference() -> None:
    pool = PagePool(8, 4)
    first = hold(pool, make_sequence(range(10)), 10)
    assert first.page_table == array("i", [0, 1, 2])
    second = hold(pool, make_sequence([*range(8), 77, 78]), 10)
    assert second.page_table == array("i", [0, 1, 3])
    assert counts(pool) == (4, 0, 4)
    pool.check_integrity([first, second])

    let_go(pool, first)
    assert counts(pool) == (3, 0, 5), "the second still holds the shared pages"
    let_go(pool, second)
    assert counts(pool) == (0, 2, 8), "full pages stay in the index, partial ones do not"
    assert pool.match(make_sequence([*range(8), 5])) == [0, 1]
    pool.check_integrity([])


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 2)]
)
def test_a_hit_leaves_at_least_one_token_to_compute(num_tokens: int, expected: int) -> None:
    pool = PagePool(8, 4)
    let_go(pool, hold(pool, make_sequence(range(11)), 11))
    assert len(pool.match(make_sequence(range(num_tokens)))) == expected


def test_a_page_is_found_only_once_all_its_tokens_are_computed() -> None:
    pool = PagePool(8, 4)
    sequence = hold(pool, make_sequence(range(9)), 7)
    assert pool.match(make_sequence(range(9))) == [0]
    sequence.num_computed = 8
    pool.enter_computed(sequence, 7)
    assert pool.match(make_sequence(range(9))) == [0, 1]


def test_a_page_that_lacks_a_known_token_is_found_once_that_is_known() -> None:
    """Positions 4 to 8 are computed, the last of them from a token that only the device knows."""
    pool = PagePool(8, 4)
    sequence = make_sequence(range(7))
    sequence.num_pending = 1
    hold(pool, sequence, 8)
    assert pool.match(make_sequence(range(9))) == [0]
    pool.check_integrity([sequence])
    sequence.num_pending = 0
    sequence.token_ids.append(7)
    pool.enter_computed(sequence, 7)
    assert pool.match(make_sequence(range(9))) == [0, 1]
    pool.check_integrity([sequence])


def test_what_is_cached_can_be_forgotten() -> None:
    """Pages that are held stay held, those that were only kept are blank, and nothing is found any more."""
    pool = PagePool(8, 4)
    let_go(pool, hold(pool, make_sequence(range(12)), 12))
    holder = hold(pool, make_sequence([7] * 9), 9)
    pool.forget_cached()
    assert counts(pool) == (3, 0, 5)
    assert pool.match(make_sequence(range(12))) == pool.match(make_sequence([7] * 9)) == []
    pool.check_integrity([holder])
    let_go(pool, holder)
    assert counts(pool) == (0, 0, 8)


def test_a_page_counts_only_after_the_same_beginning_and_under_the_same_salt() -> None:
    pool = PagePool(8, 4)
    let_go(pool, hold(pool, make_sequence(range(12), salt="a"), 12))
    assert len(pool.match(make_sequence(range(12), salt="a"))) == 2
    assert pool.match(make_sequence(range(12), salt="b")) == []
    assert pool.match(make_sequence(range(12))) == []
    assert pool.match(make_sequence([9, 9, 9, 9, 4, 5, 6, 7, 8], salt="a")) == [], (
        "same second page, other first"
    )
    assert len(pool.match(make_sequence([0, 1, 2, 3, 9, 9, 9, 9, 8], salt="a"))) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("", [1, 2]), ("\x01\x02", [])),
        (("a", [1, 2]), ("a ", [1, 2])),
        (("", [1, 256]), ("", [1, 1])),
        (("", [-1, 1]), ("", [1, -1])),
        (("\ud800", [1, 2]), ("\udfff", [1, 2])),
    ],
)
def test_keys_of_different_prefixes_differ(one: tuple[str, list[int]], other: tuple[str, list[int]]) -> None:
    """Salts that are no valid Unicode arrive from JSON too."""
    keys = {page_key(make_sequence([*tokens, 3, 4, 5], salt=salt), 0, 3) for salt, tokens in (one, other)}
    assert len(keys) == 2


def test_the_least_recently_used_page_goes_first_and_of_a_chain_its_end() -> None:
    pool = PagePool(6, 4)
    old, new = make_sequence(range(12)), make_sequence(range(100, 112))
    for sequence in (old, new):
        let_go(pool, hold(pool, sequence, 12))
    assert pool.num_cached == 6
    assert pool.allocate(1) == [2], "the end of the old chain"
    assert (pool.match(make_sequence(range(13))), pool.match(make_sequence(range(100, 113)))) == (
        [0, 1],
        [3, 4, 5],
    )
    let_go(pool, hold(pool, make_sequence(range(8)), 8))
    assert pool.allocate(2) == [5, 4], "what was used again is now the most recent"
    assert pool.match(make_sequence(range(9))) == [0, 1]


def test_blank_pages_are_used_before_cached_ones() -> None:
    pool = PagePool(4, 4)
    let_go(pool, hold(pool, make_sequence(range(8)), 8))
    assert pool.allocate(2) == [2, 3]
    assert pool.num_cached == 2
    assert pool.allocate(2) == [1, 0]
    assert (pool.num_cached, pool.num_free) == (0, 0)


def test_of_two_that_computed_the_same_page_one_is_indexed() -> None:
    pool = PagePool(8, 4)
    twins = [make_sequence(range(6)) for _ in range(2)]
    for twin in twins:
        twin.page_table.extend(pool.allocate(2))
        twin.num_computed = 6
    for twin in twins:
        pool.enter_computed(twin, 0)
    pool.check_integrity(twins)
    assert pool.match(make_sequence(range(6))) == [0]
    for twin in twins:
        let_go(pool, twin)
    assert counts(pool) == (0, 1, 8)
    pool.check_integrity([])


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = PagePool(8, 4, enable_prefix_caching=False)
    let_go(pool, hold(pool, make_sequence(range(12)), 12))
    assert counts(pool) == (0, 0, 8)
    assert pool.match(make_sequence(range(12))) == []


def lose_a_page(pool: PagePool, _: Sequence) -> None:
    pool.blank.pop()


def free_a_held_page(pool: PagePool, sequence: Sequence) -> None:
    pool.blank.append(sequence.page_table[0])


def miscount(pool: PagePool, sequence: Sequence) -> None:
    pool.references[sequence.page_table[1]] += 1


def write_to_a_shared_page(pool: PagePool, sequence: Sequence) -> None:
    sequence.num_computed = 3


def forget_a_key(pool: PagePool, _: Sequence) -> None:
    pool.index.page_by_key.popitem()


def index_a_blank_page(pool: PagePool, _: Sequence) -> None:
    pool.index.add(b"key", pool.blank[0])


def unindex_a_cached_page(pool: PagePool, _: Sequence) -> None:
    pool.index.remove(next(iter(pool.cached)))


def compute_beyond_the_pages(pool: PagePool, sequence: Sequence) -> None:
    sequence.num_computed = 13


def hold_a_page_twice(pool: PagePool, sequence: Sequence) -> None:
    sequence.page_table[2] = sequence.page_table[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_page, "exactly one state"),
        (free_a_held_page, "exactly one state"),
        (miscount, "reference counts"),
        (write_to_a_shared_page, "written to by"),
        (forget_a_key, "one to one"),
        (index_a_blank_page, "blank ones not"),
        (unindex_a_cached_page, "cached pages must be indexed"),
        (compute_beyond_the_pages, "more than its pages hold"),
        (hold_a_page_twice, "exactly one state|reference counts"),
    ],
)
def test_check_integrity_sees(damage: Callable[[PagePool, Sequence], None], message: str) -> None:
    pool = PagePool(10, 4)
    let_go(pool, hold(pool, make_sequence(range(50, 58)), 8))
    sequence = hold(pool, make_sequence(range(12)), 10)
    pool.check_integrity([sequence])
    damage(pool, sequence)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity([sequence])
