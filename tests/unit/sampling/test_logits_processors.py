"""What constraints and penalties do to logits: the values of transformers' processors, and of the published formulas."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sampling_helpers import EOS, make_sequence
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from paged_engine.execution.logits_processors import apply_constraints, apply_penalties
from paged_engine.scheduling.sequence import Sequence

VOCAB_SIZE = 300
BAD_WORDS = [[17], [5, 6], [1, 5, 9], [200, 201, 202, 203]]
BIAS = {0: -100.0, 3: 5.5, 299: 100.0}


def random_rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def processed(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    changed = logits.clone()
    apply_constraints(changed, sequences)
    apply_penalties(changed, sequences)
    return changed


@pytest.mark.parametrize(
    ("controls", "bad_words", "reference"),
    [
        ({"repetition_penalty": 1.3}, [], RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.6}, [], RepetitionPenaltyLogitsProcessor(0.6)),
        ({}, BAD_WORDS, NoBadWordsLogitsProcessor(BAD_WORDS)),
        (
            {"logit_bias": BIAS},
            [],
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()]),
        ),
        (
            {"allowed_token_ids": [4, 250, 4, 9]},
            [],
            PrefixConstrainedLogitsProcessor(lambda *_: [4, 9, 250], 1),
        ),
    ],
)
def test_values_equal_those_of_transformers(
    controls: dict[str, object], bad_words: list[list[int]], reference: LogitsProcessor
) -> None:
    logits = random_rows(4)
    histories = [([1], []), ([1, 5], []), ([9, 1, 1], [5]), ([200, 201], [202, 5, 200, 201, 202])]
    sequences = [
        make_sequence(VOCAB_SIZE, prompt, output, bad_word_ids=bad_words, **controls)
        for prompt, output in histories
    ]
    changed = processed(logits, sequences)
    for row, (prompt, output) in enumerate(histories):
        expected = reference(torch.tensor([prompt + output]), logits[row : row + 1].clone())
        torch.testing.assert_close(changed[row : row + 1], expected, rtol=1e-6, atol=0)
        assert not torch.equal(expected, logits[row : row + 1])


@pytest.mark.parametrize("num_output_tokens", [0, 2, 3, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_back_eos_and_stop_tokens(num_output_tokens: int, ignore_eos: bool) -> None:
    logits, prompt, output = random_rows(1), [1, 8], [40, 41, 42, 43][:num_output_tokens]
    sequence = make_sequence(
        VOCAB_SIZE, prompt, output, min_tokens=3, stop_token_ids=[70], ignore_eos=ignore_eos
    )
    reference = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [EOS, 70])
    expected = reference(torch.tensor([prompt + output]), logits.clone())
    assert torch.equal(processed(logits, [sequence]), expected)


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    logits, prompt, output = random_rows(1), [10, 10, 11], [12, 10, 12, 13, 12]
    sequence = make_sequence(VOCAB_SIZE, prompt, output, frequency_penalty=0.7, presence_penalty=-1.5)
    expected = logits.clone()
    for token, count in Counter(output).items():
        expected[0, token] -= 0.7 * count - 1.5
    torch.testing.assert_close(processed(logits, [sequence]), expected, rtol=1e-6, atol=1e-6)


class Pending:
    """The last tokens of some sequences, as they are while only the device knows them; each sequence forgets its own."""

    def __init__(self, *sequences: Sequence) -> None:
        self.row_of = {item: row for row, item in enumerate(sequences)}
        self.tokens = torch.tensor([item.token_ids.pop() for item in sequences])
        for item in sequences:
            item.num_pending = 1


@pytest.mark.parametrize(
    "controls",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.3},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 0.1},
    ],
    ids=str,
)
def test_a_pending_token_counts_to_the_last_bit_as_if_it_were_known(controls: dict[str, float]) -> None:
    """Whether it is new, in the prompt, or in the output once or several times; beside rows that have none."""
    histories = [
        ([1, 5], [9]),
        ([1, 5], [7, 5]),
        ([1], [7, 8, 7, 7]),
        ([3], [4, 5, 4, 6]),
        ([8, 9], []),
        ([2], [6, 6]),
    ]
    logits = random_rows(len(histories), seed=4)
    expected, pending = (
        [make_sequence(VOCAB_SIZE, prompt, output, **controls) for prompt, output in histories]
        for _ in range(2)
    )
    others = [pending[3], pending[0], pending[5], pending[1], pending[2]]  # in another order than the rows
    changed = logits.clone()
    apply_penalties(changed, pending, Pending(*others))
    assert torch.equal(changed, processed(logits, expected))
    for item in others:
        item.num_pending = 0
    assert not torch.equal(changed[0], processed(logits, pending)[0]), "a new token's penalty shows"


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others() -> None:
    logits = torch.full((1, VOCAB_SIZE), -1.0)
    sequence = make_sequence(
        VOCAB_SIZE,
        [1],
        [5],
        logit_bias={5: 5.0},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    assert processed(logits, [sequence])[0, 5].item() == (-1 + 5) / 2 - 0.25 - 0.5


def test_a_banned_token_stays_banned_whatever_else_is_asked_for_it() -> None:
    for penalty in (1e-30, 0.5, 2.0, 1e30, 1e300):
        sequence = make_sequence(
            VOCAB_SIZE,
            [7],
            [7],
            bad_word_ids=[[7]],
            logit_bias={7: 100.0},
            repetition_penalty=penalty,
            frequency_penalty=-2,
        )
        changed = processed(random_rows(1), [sequence])
        assert changed[0, 7] == -torch.inf
        assert not changed.isnan().any()


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 1e30, 1.7e308])
def test_absurd_penalties_make_no_infinity(penalty: float) -> None:
    logits = random_rows(1)
    logits[0, 20] = 0
    changed = processed(logits, [make_sequence(VOCAB_SIZE, [20, 21, 22, 23], repetition_penalty=penalty)])
    assert changed.max().isfinite()
    assert not changed.isnan().any()


def test_a_row_is_changed_by_its_own_controls_alone_and_rows_without_any_not_at_all() -> None:
    logits = random_rows(6)
    sequences = [
        make_sequence(VOCAB_SIZE, [1]),
        make_sequence(VOCAB_SIZE, [1, 5], [9], repetition_penalty=1.7),
        make_sequence(VOCAB_SIZE, [1, 5], [9, 9], frequency_penalty=1, allowed_token_ids=[9, 10]),
        make_sequence(VOCAB_SIZE, [1, 5], bad_word_ids=BAD_WORDS, logit_bias=BIAS),
        make_sequence(VOCAB_SIZE, [1, 5], [9, 3], temperature=0.5, top_k=5),
        make_sequence(VOCAB_SIZE, [1], [9, 3], presence_penalty=2, min_tokens=9, repetition_penalty=0.5),
    ]
    together = processed(logits, sequences)
    for row, sequence in enumerate(sequences):
        assert torch.equal(together[row], processed(logits[row : row + 1], [sequence])[0])
    assert torch.equal(together[0], logits[0])
    assert torch.equal(together[4], logits[4])
