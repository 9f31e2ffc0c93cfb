"""Streamed text is the whole decoding, cut at the first stop string, for any tokens in any portions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sample_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_tokenizers import SampleTokenizer
from tokenizers import decoders

from paged_engine.text.stream import TextStream
from paged_engine.text.tokenizer import Tokenizer

HALF = "\ufffd"
SURROGATE = HALF * 2
MULTILINGUAL = "聪明 😀 👨‍👩‍👧 ď  two spaces\n\ttab, naïve café."
property_test = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ids_of_any_size = st.lists(st.integers(0, 2**20), max_size=60)


def stream_one_by_one(
    tokenizer: Tokenizer, token_ids: Sequence[int], **options: Any
) -> tuple[list[str], TextStream]:
    """The delta of every token up to a stop string, then the rest; and the stream."""
    stream = TextStream(tokenizer, **options)
    deltas = []
    for token_id in token_ids:
        deltas.append(stream.push([token_id]))
        if stream.stopped_by is not None:
            return deltas, stream
    deltas.append(stream.finish())
    return deltas, stream


def within(tokenizer: SampleTokenizer, numbers: Sequence[int]) -> list[int]:
    """Arbitrary numbers as token ids, some of which no token has (a model may have more rows than its tokenizer)."""
    return [number % (tokenizer.vocab_size + 3) for number in numbers]


def first_stop(text: str, stops: Sequence[str], num_exempt: int = 0) -> tuple[int, str] | None:
    """By the definition: the end that comes first behind the exempt characters, and the longest that ends there."""
    for end in range(num_exempt + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@property_test
@given(numbers=ids_of_any_size, skip=st.booleans())
def test_joined_deltas_are_the_whole_decoding(
    tokenizer: SampleTokenizer, numbers: list[int], skip: bool
) -> None:
    token_ids = within(tokenizer, numbers)
    deltas, _ = stream_one_by_one(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_200_random_sequences_of_each_tokenizer(tokenizer: SampleTokenizer) -> None:
    generator = random.Random(0)
    for _ in range(200):
        token_ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(80))]
        deltas, _ = stream_one_by_one(tokenizer, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)


@property_test
@given(data=st.data(), length=st.integers(0, 40))
def test_joined_deltas_of_raw_bytes(
    llama: SampleTokenizer, byte_level: SampleTokenizer, data: st.DataObject, length: int
) -> None:
    """Runs of bytes, valid and not, are where half characters come from."""
    tokenizer = data.draw(st.sampled_from([llama, byte_level]))
    some_bytes = st.sampled_from([*"é聪😀A".encode(), 0x80, 0xC0, 0xED, 0xA0, 0xF4, 0xFF])
    values = data.draw(st.lists(some_bytes, min_size=length, max_size=length))
    token_ids = tokenizer.byte_ids(bytes(values))
    deltas, _ = stream_one_by_one(tokenizer, token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids)


@property_test
@given(text=st.text(alphabet="聪明😀ď👨‍👩‍👧é ab\n", max_size=30))
def test_valid_text_never_shows_half_a_character(
    llama: SampleTokenizer, byte_level: SampleTokenizer, text: str
) -> None:
    for tokenizer in (llama, byte_level):
        token_ids = tokenizer.encode(text)
        deltas, _ = stream_one_by_one(tokenizer, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)
        assert not any(HALF in delta for delta in deltas)


def test_the_multilingual_case(llama: SampleTokenizer, byte_level: SampleTokenizer) -> None:
    for tokenizer in (llama, byte_level):
        deltas, _ = stream_one_by_one(tokenizer, tokenizer.encode(MULTILINGUAL))
        assert "".join(deltas) == MULTILINGUAL
        assert not any(HALF in delta for delta in deltas)


@pytest.mark.parametrize("emoji", ["😀", "👨‍👩‍👧", "聪"])
def test_ending_inside_a_character_of_many_tokens(
    llama: SampleTokenizer, byte_level: SampleTokenizer, emoji: str
) -> None:
    for tokenizer in (llama, byte_level):
        all_ids = tokenizer.byte_ids(emoji.encode())
        for num_tokens in range(len(all_ids) + 1):
            deltas, _ = stream_one_by_one(tokenizer, all_ids[:num_tokens])
            assert "".join(deltas) == tokenizer.decode(all_ids[:num_tokens])
            assert not any(HALF in delta for delta in deltas[:-1])


def test_a_real_replacement_character_is_shown_at_once(byte_level: SampleTokenizer) -> None:
    assert TextStream(byte_level).push(byte_level.byte_ids("a\ufffd".encode())) == "a\ufffd"


@property_test
@given(numbers=ids_of_any_size)
def test_text_is_held_back_only_while_it_may_change(tokenizer: SampleTokenizer, numbers: list[int]) -> None:
    """While a character is incomplete, or, where an invalid byte spoils all bytes next to it, in a run of bytes.

    Two bytes that begin a surrogate are held back too (a property of Python's decoder), though nothing can save them.
    """
    token_ids = within(tokenizer, numbers)
    stream = TextStream(tokenizer)
    shown = ""
    for count, token_id in enumerate(token_ids, start=1):
        shown += stream.push([token_id])
        if not (tokenizer.piece_of(token_id) or "<").startswith("<"):
            assert tokenizer.decode(token_ids[:count]) in (shown, shown + HALF, shown + SURROGATE)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("value", [0xFF, 0xE2, 0x80, 0x41])
def test_cost_per_token_does_not_grow_with_a_run_of_bytes(
    llama: SampleTokenizer, byte_level: SampleTokenizer, value: int
) -> None:
    """Decoding the run anew with every token of it would take hours here."""
    for tokenizer in (llama, byte_level):
        token_ids = tokenizer.byte_ids(bytes([value])) * 50_000
        deltas, _ = stream_one_by_one(tokenizer, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)


def test_special_tokens_show_only_when_asked_for(tokenizer: SampleTokenizer) -> None:
    special, word = tokenizer.id_of("</s>"), tokenizer.encode("the")[0]
    token_ids = [special, word, special, word, special]
    hidden, _ = stream_one_by_one(tokenizer, token_ids)
    visible, _ = stream_one_by_one(tokenizer, token_ids, skip_special_tokens=False)
    assert "".join(hidden) == tokenizer.decode([word, word])
    assert "".join(visible) == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert "".join(visible).count("</s>") == 3


def test_a_space_survives_a_special_token_in_front_of_it(llama: SampleTokenizer) -> None:
    fox, the = llama.encode("fox"), llama.encode("the")
    deltas, _ = stream_one_by_one(llama, [*fox, *llama.eos_token_ids, *the])
    assert "".join(deltas) == "fox the"


@property_test
@given(numbers=ids_of_any_size, data=st.data())
def test_stopped_stream_is_the_text_up_to_the_first_stop_string(
    tokenizer: SampleTokenizer, numbers: list[int], data: st.DataObject
) -> None:
    token_ids = within(tokenizer, numbers)
    whole = tokenizer.decode(token_ids)
    stops = data.draw(stop_sets(whole))
    include_stop = data.draw(st.booleans())
    min_tokens = data.draw(st.integers(0, 10))
    first_tokens = TextStream(tokenizer).push(token_ids[:min_tokens])
    checked = len(token_ids) > min_tokens
    expected = first_stop(whole, stops, num_exempt=len(first_tokens)) if checked else None

    stream = TextStream(tokenizer, stop=stops, include_stop=include_stop, min_tokens=min_tokens)
    shown, position = "", 0
    while position < len(token_ids) and stream.stopped_by is None:
        count = data.draw(st.integers(1, 5))
        shown += stream.push(token_ids[position : position + count])
        position += count
    shown += stream.finish()

    if expected is None:
        assert (shown, stream.stopped_by) == (whole, None)
    else:
        end, stop = expected
        assert (shown, stream.stopped_by) == (whole[: end if include_stop else end - len(stop)], stop)


def stop_sets(whole: str) -> st.SearchStrategy[list[str]]:
    """Stop strings that often occur in the text, or nearly."""
    anywhere = st.tuples(st.integers(0, max(len(whole), 1)), st.integers(1, 6))
    parts = anywhere.map(lambda place: whole[place[0] : place[0] + place[1]] or "the")
    nearly = parts.map(lambda part: part + "~")
    return st.lists(st.one_of(parts, nearly, st.text(alphabet="the ab.", min_size=1, max_size=3)), max_size=4)


def test_none_of_a_stop_string_over_many_tokens_leaks(byte_level: SampleTokenizer) -> None:
    token_ids = byte_level.encode("The alphabet: ABCDEFGHIJKLM")
    deltas, stream = stream_one_by_one(byte_level, token_ids, stop=["DEFGHIJ"])
    assert "".join(deltas) == "The alphabet: ABC"
    assert stream.stopped_by == "DEFGHIJ"


def test_held_back_part_is_delivered_at_the_end(byte_level: SampleTokenizer) -> None:
    deltas, stream = stream_one_by_one(byte_level, byte_level.encode("ABCDEF"), stop=["DEFGHIJ"])
    assert "".join(deltas[:-1]) == "ABC"
    assert (deltas[-1], stream.stopped_by) == ("DEF", None)


def test_a_stop_string_inside_a_token_cuts_exactly_there(byte_level: SampleTokenizer) -> None:
    token_ids = byte_level.encode('The dog."\nThe')
    assert byte_level.id_of('."\n') in token_ids
    for include_stop, expected in [(False, "The dog"), (True, "The dog.")]:
        deltas, _ = stream_one_by_one(byte_level, token_ids, stop=["."], include_stop=include_stop)
        assert "".join(deltas) == expected


def test_long_stop_strings_that_never_occur_delay_nothing(byte_level: SampleTokenizer) -> None:
    token_ids = byte_level.encode("The quick brown fox jumps over the lazy dog. The alphabet: ABC DEF")
    plain, _ = stream_one_by_one(byte_level, token_ids)
    stopped, _ = stream_one_by_one(byte_level, token_ids, stop=["#" * 5000, "§ never " * 1000])
    assert stopped == plain


def test_the_end_may_complete_a_stop_string(llama: SampleTokenizer) -> None:
    """The last character is a run of byte tokens, held until it is known that no byte follows."""
    token_ids = llama.encode("fox") + llama.byte_ids("。".encode())
    stream = TextStream(llama, stop=["。"])
    shown = stream.push(token_ids)
    assert stream.stopped_by is None
    assert shown + stream.finish() == "fox"
    assert stream.stopped_by == "。"


def test_tokens_behind_a_stop_string_are_ignored(byte_level: SampleTokenizer) -> None:
    stream = TextStream(byte_level, stop=["DEF"])
    assert stream.push(byte_level.encode("ABC DEF GHIJ")) == "ABC "
    assert stream.finish() == ""


def test_min_tokens_counts_tokens_and_lets_a_later_stop_string_end_the_text(
    byte_level: SampleTokenizer,
) -> None:
    token_ids = byte_level.byte_ids(b"a.b.c.d")
    for min_tokens, expected in [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c"), (7, "a.b.c.d")]:
        deltas, _ = stream_one_by_one(byte_level, token_ids, stop=["."], min_tokens=min_tokens)
        assert "".join(deltas) == expected


def test_a_stop_string_that_begins_within_min_tokens_may_end_behind_them(byte_level: SampleTokenizer) -> None:
    token_ids = byte_level.byte_ids(b"xabcy")
    deltas, stream = stream_one_by_one(byte_level, token_ids, stop=["abc"], min_tokens=3)
    assert ("".join(deltas), stream.stopped_by) == ("x", "abc")


def test_streams_of_a_real_sentencepiece_model(sentencepiece_folder: Path) -> None:
    tokenizer = Tokenizer.load(str(sentencepiece_folder))
    generator = random.Random(1)
    sequences = [
        [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(60))]
        for _ in range(200)
    ]
    for token_ids in [*sequences, tokenizer.encode(MULTILINGUAL)]:
        deltas, _ = stream_one_by_one(tokenizer, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)
    assert "".join(deltas) == MULTILINGUAL
    assert not any(HALF in delta for delta in deltas)


@property_test
@given(text=st.text(alphabet="聪明😀ďé ab\n", max_size=30), num_tokens=st.integers(0, 30))
def test_streams_of_a_tokenizer_written_in_python(text: str, num_tokens: int) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = Tokenizer(ByT5Tokenizer())
    token_ids = tokenizer.encode(text)[:num_tokens]
    deltas, _ = stream_one_by_one(tokenizer, token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids)
    assert not any(HALF in delta for delta in deltas)


@pytest.fixture(scope="module")
def unusual() -> SampleTokenizer:
    """A chain of decoders that nothing is known about."""
    tokenizer = sample_tokenizers.make("byte_level")
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace("~", "-")]
    )
    return SampleTokenizer(tokenizer)


@property_test
@given(text=st.text(alphabet="聪明😀ďé ab~", max_size=30))
def test_streams_of_an_unusual_decoder(unusual: SampleTokenizer, text: str) -> None:
    for token_ids in (unusual.encode(text), unusual.byte_ids(text.encode())):
        deltas, _ = stream_one_by_one(unusual, token_ids)
        assert "".join(deltas) == text.replace("~", "-")
        assert not any(HALF in delta for delta in deltas)


def test_an_unusual_decoder_holds_no_long_run_of_invalid_bytes(unusual: SampleTokenizer) -> None:
    token_ids = unusual.byte_ids(b"\xff" * 100)
    deltas, _ = stream_one_by_one(unusual, token_ids)
    assert "".join(deltas) == HALF * 100
    assert max(map(len, deltas)) < 10
