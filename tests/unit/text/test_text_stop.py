"""The stop matcher against its definition, on texts of few letters so that stop strings overlap in every way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_engine.text.stop import StopMatcher

few_letters = st.text(alphabet="ab", min_size=1, max_size=5)
stop_sets = st.lists(few_letters, max_size=4)
parts_of_text = st.lists(st.text(alphabet="ab", max_size=6), max_size=8)
property_test = settings(max_examples=500, deadline=None)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """By the definition: the end that comes first, and the longest stop string that ends there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def longest_beginning_of_a_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that begins a stop string without being the whole of it."""
    return max(
        (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])),
        default=0,
    )


@property_test
@given(parts=parts_of_text, stops=stop_sets, include_stop=st.booleans())
def test_text_ends_at_the_first_stop_string_however_it_is_cut(
    parts: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = ""
    for part in parts:
        shown += matcher.push(part)
        if matcher.matched is not None:
            break
    shown += matcher.finish()

    text = "".join(parts)
    expected = first_stop(text, stops)
    if expected is None:
        assert (shown, matcher.matched) == (text, None)
    else:
        end, stop = expected
        assert (shown, matcher.matched) == (text[: end if include_stop else end - len(stop)], stop)


@property_test
@given(parts=parts_of_text, stops=stop_sets)
def test_exactly_what_may_become_a_stop_string_is_held_back(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = text = ""
    for part in parts:
        shown += matcher.push(part)
        text += part
        if matcher.matched is not None:
            return
        assert shown == text[: len(text) - longest_beginning_of_a_stop(text, stops)]


@property_test
@given(parts=parts_of_text, stops=stop_sets, num_exempt=st.integers(0, 8))
def test_stop_strings_completed_in_exempt_parts_do_not_count(
    parts: list[str], stops: list[str], num_exempt: int
) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for index, part in enumerate(parts):
        shown += matcher.push(part, may_stop=index >= num_exempt)
        if matcher.matched is not None:
            break
    shown += matcher.finish()

    text, exempt = "".join(parts), len("".join(parts[:num_exempt]))
    counting = [
        (end, stop) for end in range(exempt + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)
    ]
    if not counting:
        assert (shown, matcher.matched) == (text, None)
    else:
        end, stop = min(counting, key=lambda found: (found[0], -len(found[1])))
        assert (shown, matcher.matched) == (text[: end - len(stop)], stop)


@pytest.mark.timeout(60)
def test_cost_per_character_does_not_grow_with_what_is_held_back() -> None:
    """A text that matches all but the last character of a long stop string, again and again."""
    size = 5_000
    matcher = StopMatcher(["a" * size + "b"])
    shown = "".join(matcher.push("a") for _ in range(40 * size))
    assert shown == "a" * (39 * size)
    assert matcher.finish() == "a" * size
