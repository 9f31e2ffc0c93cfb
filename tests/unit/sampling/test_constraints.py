"""Controls that name tokens are checked against the vocabulary, with the field's name, before a request is queued."""

from __future__ import annotations

from array import array

import pytest

from paged_engine.constraints import TokenConstraints
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.request import SamplingParams

EOS = frozenset({2, 900})  # a tokenizer's EOS may lie outside the model's logits
VOCAB_SIZE = 100


def resolve(bad_word_ids: list[list[int]] | None = None, **controls: object) -> TokenConstraints | None:
    return TokenConstraints.resolve(SamplingParams.parse(controls), VOCAB_SIZE, EOS, bad_word_ids or [])


def test_a_request_that_names_no_token_has_none() -> None:
    assert resolve(temperature=0.3, top_k=4, repetition_penalty=1.3, stop_token_ids=[5]) is None


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_an_id_outside_the_vocabulary_is_refused_by_name_value_and_range(field: str, token_id: int) -> None:
    value = {3: 1.0, token_id: 1.0} if field == "logit_bias" else [3, token_id]
    with pytest.raises(RequestError) as caught:
        resolve(**{field: value})
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message == f"{field} must hold token ids from 0 to 99, got {token_id}"


@pytest.mark.parametrize(
    ("bad_word_ids", "controls"),
    [
        ([[7], [8]], {"allowed_token_ids": [7, 8]}),
        ([], {"allowed_token_ids": [2], "min_tokens": 1}),
        ([[7]], {"allowed_token_ids": [7, 2, 9], "stop_token_ids": [9], "min_tokens": 1}),
        ([[token] for token in range(VOCAB_SIZE)], {}),
    ],
)
def test_controls_that_exclude_every_token_are_refused(
    bad_word_ids: list[list[int]], controls: dict[str, object]
) -> None:
    with pytest.raises(RequestError, match="must leave at least one token"):
        resolve(bad_word_ids, **controls)


def test_what_is_banned_next_follows_the_tokens_so_far() -> None:
    constraints = resolve([[7], [4, 5], [3, 4, 6], [3, 4, 6]], min_tokens=2, stop_token_ids=[11])
    assert constraints is not None

    def banned(token_ids: list[int], num_output_tokens: int) -> list[int]:
        return constraints.banned_next(array("i", token_ids), num_output_tokens).tolist()

    assert banned([1], 0) == [7, 2, 11]
    assert banned([1, 1], 1) == [7, 2, 11]
    assert banned([1, 1, 1], 2) == [7]
    assert sorted(banned([3, 4], 2)) == [5, 6, 7]
    assert sorted(banned([9, 4], 2)) == [5, 7]
    assert sorted(banned([4], 2)) == [5, 7]
    assert banned([4, 3], 2) == [7]
