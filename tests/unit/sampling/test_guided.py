"""Guided decoding: whatever the logits, the text fits what was asked for; and what cannot be enforced is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers
import torch
from pydantic import ValidationError
from sampling_helpers import EOS, make_sequence, sample, sample_tokens
from transformers import PreTrainedTokenizerFast

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.execution.sampling import SampledToken
from paged_engine.guided import GrammarCompiler
from paged_engine.scheduling.sequence import Sequence
from paged_engine.structured_outputs import StructuredOutputs

NUM_PADDED_LOGITS = 20
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges, so that tokens cross the borders of grammar symbols."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "r"),
        ("u", "e"),
        ("tr", "ue"),
        ("1", "2"),
        ('"', ":"),
        ("}", "]"),
        ("Ġ", "a"),
        ("Ã", "©"),
    ]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    model = tokenizers.models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


TOKENIZER = byte_tokenizer()
VOCAB_SIZE = len(TOKENIZER) + NUM_PADDED_LOGITS
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["S", "M", "été"]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "maxItems": 3,
        },
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "numbers", "ok"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == list(SCHEMA["properties"])  # type: ignore[call-overload]
        and len(value["name"]) <= 6
        and value["size"] in ("S", "M", "été")
        and len(value["numbers"]) <= 3
        and all(isinstance(number, int) and 0 <= number <= 999 for number in value["numbers"])
        and isinstance(value["ok"], bool)
    )


NUMBER = r"[0-9]{1,3}(\.[0-9]+)?/[a-zé]{2}"
LIST = r"(a|[0-9]{2})(,(a|[0-9]{2}))?"
FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"json": SCHEMA, "disable_any_whitespace": True}, fits_schema),
    ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, fits_schema),
    ({"regex": NUMBER}, lambda text: bool(re.fullmatch(NUMBER, text))),
    ({"regex": "^(true|truer)$"}, lambda text: text in ("true", "truer")),
    (
        {"choice": ["true", "été 😀", 'a "b" \\ \n', "t"]},
        lambda text: text in ("true", "été 😀", 'a "b" \\ \n', "t"),
    ),
    (
        {"grammar": 'root ::= item ("," item)?\nitem ::= "a" | [0-9] [0-9]'},
        lambda text: bool(re.fullmatch(LIST, text)),
    ),
    ({"grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
]


def guided(form: dict[str, Any], seed: int, **controls: Any) -> Sequence:
    sequence = make_sequence(VOCAB_SIZE, [10, 11], seed=seed, **controls)
    sequence.grammar = COMPILER.start(StructuredOutputs.model_validate(form))
    return sequence


def generate(sequences: list[Sequence], choice: random.Random, max_steps: int = 400) -> list[str]:
    """Run until each has generated EOS; at each step only some of them, as if the others were preempted."""
    for _ in range(max_steps):
        running = [item for item in sequences if item.token_ids[-1] != EOS]
        if not running:
            break
        stepping = choice.sample(running, choice.randint(1, len(running)))
        logits = torch.stack([_logits(item) for item in stepping])
        for item, token_id in zip(stepping, sample_tokens(logits, stepping), strict=True):
            item.token_ids.append(token_id)
    return [TOKENIZER.decode(item.token_ids[item.num_prompt_tokens : -1]) for item in sequences]


def _logits(sequence: Sequence) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sequence.seed * 1000 + sequence.num_output_tokens)
    return torch.randn(VOCAB_SIZE, generator=generator) * 3


@pytest.mark.parametrize(("form", "fits"), FORMS)
def test_text_fits_its_form_whatever_the_logits(form: dict[str, Any], fits: Callable[[str], bool]) -> None:
    sequences = [guided(form, seed, temperature=seed % 3) for seed in range(30)]
    texts = generate(sequences, random.Random(0))
    assert all(item.token_ids[-1] == EOS for item in sequences)
    assert [text for text in texts if not fits(text)] == []
    assert len(set(texts)) > 1


def test_any_json_object() -> None:
    sequences = [
        guided({"json_object": True, "disable_any_whitespace": True}, seed, logit_bias={"96": 4})
        for seed in range(5)
    ]
    for text in generate(sequences, random.Random(1), max_steps=2000):
        assert text.startswith("{")


def test_a_mixed_batch_equals_solo_runs_and_leaves_free_rows_alone() -> None:
    def fresh() -> list[Sequence]:
        free = make_sequence(VOCAB_SIZE, [10, 11], seed=99)
        return [*(guided(form, seed) for seed, (form, _) in enumerate(FORMS)), free]

    mixed = fresh()
    for _ in range(12):
        logits = torch.stack([_logits(item) for item in mixed])
        for item, token_id in zip(mixed, sample_tokens(logits, mixed), strict=True):
            item.token_ids.append(token_id)
    for together, alone in zip(mixed, fresh(), strict=True):
        for _ in range(12):
            alone.token_ids.extend(sample_tokens(_logits(alone)[None], [alone]))
        assert alone.token_ids == together.token_ids


def test_the_sequences_of_one_request_do_not_share_a_state() -> None:
    first, second = guided({"regex": "ab"}, 0), guided({"regex": "ab"}, 1)
    logits = torch.zeros(1, VOCAB_SIZE)
    a, b = TOKENIZER.encode("ab")
    assert sample_tokens(logits, [first]) == [a]
    first.token_ids.append(a)
    assert sample_tokens(logits.repeat(2, 1), [first, second]) == [b, a]


def test_a_state_catches_up_with_any_number_of_tokens_and_asking_twice_changes_nothing() -> None:
    sequence, (a, b) = guided({"regex": "abab"}, 0), TOKENIZER.encode("ab")
    logits = torch.zeros(1, VOCAB_SIZE)
    sequence.token_ids.extend([a, b])
    assert sample_tokens(logits, [sequence]) == sample_tokens(logits, [sequence]) == [a]
    sequence.token_ids.append(a)
    assert sample_tokens(logits, [sequence]) == sample_tokens(logits, [sequence]) == [b]


def test_a_complete_grammar_leaves_only_eos_also_where_eos_is_ignored() -> None:
    sequence = guided({"choice": ["t"]}, 0, ignore_eos=True)
    sequence.token_ids.extend(TOKENIZER.encode("t"))
    for _ in range(3):
        assert sample_tokens(torch.randn(1, VOCAB_SIZE), [sequence]) == [EOS]
        sequence.token_ids.append(EOS)


def test_a_grammar_and_other_controls_that_exclude_each_other_end_their_sequence_only() -> None:
    stuck = guided({"choice": ["t"]}, 0, min_tokens=3)
    stuck.token_ids.extend(TOKENIZER.encode("t"))
    results = sample(torch.zeros(2, VOCAB_SIZE), [stuck, guided({"choice": ["t"]}, 0)])
    assert isinstance(results[0], RequestError)
    assert results[0].code is ErrorCode.INVALID_ARG
    assert "min_tokens and structured_outputs" in results[0].message
    assert isinstance(results[1], SampledToken)


def test_one_of_many_choices() -> None:
    choices = [f"{number:05}" for number in range(20_000)] + ["", '"\\ \n', "0"]
    sequences = [guided({"choice": choices}, seed, temperature=1.0) for seed in range(5)]
    texts = generate(sequences, random.Random(0))
    assert set(texts) <= set(choices)


def test_a_grammar_that_cannot_be_followed_ends_its_sequence_only() -> None:
    """Here because the output was not made under it."""
    stuck = guided({"choice": ["t"]}, 0)
    stuck.token_ids.extend(TOKENIZER.encode("x"))
    results = sample(torch.zeros(2, VOCAB_SIZE), [stuck, guided({"choice": ["t"]}, 0)])
    assert isinstance(results[0], RequestError)
    assert isinstance(results[1], SampledToken)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "[0-9"}, "unclosed character class"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": 'root ::= "a" | missing'}, "missing"),
        ({"grammar": "%%%"}, "grammar"),
        ({"json": '{"type":'}, "not valid JSON"),
        ({"json": {"type": "strnig"}}, "strnig"),
        ({"json": {"not": {"type": "string"}}}, "not"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum"),
        ({"json": {"type": "string", "format": "banana"}}, "banana"),
        ({"json": {"const": "\ud800"}}, "hex escape"),
        ({"json": json.loads('{"items":' * 400 + "{}" + "}" * 400)}, "recursion"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"choice": ["\ud800"]}, "hex escape"),
        ({"grammar": 'start: "' + "a" * (1 << 18) + '"'}, "at most 262144 characters"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(form: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        COMPILER.start(StructuredOutputs.model_validate(form))
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert reason in caught.value.message
    assert "structured_outputs" in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"json_object": False},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"regexp": "a"},
        {"regex": 5},
        [1],
        "[" * 100_000,
    ],
)
def test_a_value_that_is_not_exactly_one_form_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        StructuredOutputs.model_validate(value)


def test_a_checkpoint_without_an_end_of_text_cannot_be_guided() -> None:
    with pytest.raises(RequestError, match="end-of-sequence token"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset()).start(StructuredOutputs(regex="a"))


def test_threads_may_compile_at_once() -> None:
    compiler = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    forms = [StructuredOutputs(regex=f"[a-{letter}]{{3}}") for letter in "bcdefgh"] * 20
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(compiler.start, forms))
    assert len({id(state) for state in states}) == len(forms)
