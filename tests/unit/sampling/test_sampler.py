"""The sampler as the engine sees it: rows of any mixture equal their solo runs, and one bad row hurts no other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from sampling_helpers import EOS, make_sequence, sample, sample_tokens

from paged_engine.errors import ErrorCode, RequestError
from paged_engine.execution.sampling import SampledToken
from paged_engine.scheduling.sequence import Sequence

VOCAB_SIZE = 400


def random_rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def random_controls(choice: random.Random) -> dict[str, Any]:
    """What a request might ask for: any mixture of everything."""
    possible: dict[str, list[Any]] = {
        "temperature": [0, 1e-6, 1e-3, 0.7, 1.0, 2.0, 100.0],
        "top_k": [-1, 0, 1, 2, 50, 300, 10**9],
        "top_p": [1e-6, 0.3, 0.9, 0.999, 1.0],
        "min_p": [0.0, 0.0, 0.05, 1.0],
        "repetition_penalty": [1.0, 1.3, 0.7],
        "presence_penalty": [0.0, 1.0, -1.0],
        "frequency_penalty": [0.0, 0.5, -0.5],
        "logit_bias": [{}, {"7": 30.0, "8": -100}],
        "min_tokens": [0, 5],
        "stop_token_ids": [[], [9]],
        "bad_word_ids": [[], [[11], [4, 5], [7, 7]]],
        "allowed_token_ids": [None, None, list(range(0, VOCAB_SIZE, 3))],
        "logprobs": [None, None, 0, 3],
        "seed": list(range(50)),
        "index": [0, 1],
    }
    chosen = {name: choice.choice(values) for name, values in possible.items() if choice.random() < 0.5}
    if chosen.get("allowed_token_ids") is None:
        chosen.pop("allowed_token_ids", None)
    return chosen


def random_sequence(choice: random.Random) -> Sequence:
    prompt = choice.choices(range(20), k=choice.randint(1, 30))
    output = choice.choices(range(20), k=choice.randint(0, 10))
    return make_sequence(VOCAB_SIZE, prompt, output, **random_controls(choice))


@pytest.mark.parametrize("batch", range(5))
def test_any_mixture_equals_its_rows_alone_to_the_last_bit(batch: int) -> None:
    choice = random.Random(batch)
    sequences = [random_sequence(choice) for _ in range(40)]
    logits = random_rows(40, seed=batch)
    together = sample(logits, sequences)
    for row, sequence in enumerate(sequences):
        assert sample(logits[row : row + 1], [sequence]) == [together[row]]


class TinyModel:
    """Logits that are a function of the last two tokens, standing in for a model."""

    def __init__(self) -> None:
        self.table = random_rows(64)

    def logits(self, sequences: list[Sequence]) -> torch.Tensor:
        rows = [(7 * sequence.token_ids[-1] + 3 * sequence.token_ids[-2]) % 64 for sequence in sequences]
        return self.table[rows].clone()


def run_alone(model: TinyModel, sequence: Sequence, num_tokens: int) -> list[int]:
    for _ in range(num_tokens):
        sequence.token_ids.extend(sample_tokens(model.logits([sequence]), [sequence]))
    return list(sequence.token_ids[sequence.num_prompt_tokens :])


def test_200_requests_over_4_slots_each_equal_their_solo_runs() -> None:
    """Sequences come, stall (as after a preemption), change places and go; nothing of a slot's last occupant stays."""
    model, choice = TinyModel(), random.Random(1)

    def fresh(request: int) -> Sequence:
        own = random.Random(request)
        controls = random_controls(own)
        return make_sequence(VOCAB_SIZE, own.choices(range(20), k=5), **controls)

    lengths = [choice.randint(1, 8) for _ in range(200)]
    waiting, running, finished = list(range(200)), {}, {}
    while waiting or running:
        while waiting and len(running) < 4:
            request = waiting.pop(0)
            running[request] = fresh(request)
        batch = choice.sample(sorted(running), choice.randint(1, len(running)))
        sequences = [running[request] for request in batch]
        for request, token_id in zip(batch, sample_tokens(model.logits(sequences), sequences), strict=True):
            running[request].token_ids.append(token_id)
            if running[request].num_output_tokens == lengths[request]:
                finished[request] = list(running.pop(request).token_ids[5:])
    for request in range(200):
        assert finished[request] == run_alone(model, fresh(request), lengths[request]), request


def test_a_seed_names_the_tokens_and_the_sequences_of_one_request_differ() -> None:
    model = TinyModel()
    runs = {
        (seed, index): run_alone(model, make_sequence(VOCAB_SIZE, [1, 1], seed=seed, index=index), 12)
        for seed in (42, 43, 2**64 - 1)
        for index in range(8)
    }
    assert len({tuple(tokens) for tokens in runs.values()}) == len(runs)
    assert run_alone(model, make_sequence(VOCAB_SIZE, [1, 1], seed=42, index=3), 12) == runs[42, 3]


def test_torchs_own_generator_is_neither_read_nor_moved() -> None:
    sequences = [make_sequence(VOCAB_SIZE, seed=seed, top_p=0.9) for seed in range(20)]
    logits = random_rows(20)
    torch.manual_seed(1)
    first, state = sample(logits, sequences), torch.get_rng_state()
    torch.manual_seed(2)
    assert sample(logits, sequences) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "controls", [{"temperature": 0}, {"temperature": 9e-6}, {"top_k": 1}, {"top_k": 1, "temperature": 5}]
)
def test_greedy_takes_the_lowest_of_the_best_whatever_the_other_controls(controls: dict[str, Any]) -> None:
    logits = random_rows(30)
    logits[:, [100, 50, 399]] = 99.0
    sequences = [make_sequence(VOCAB_SIZE, seed=seed, top_p=0.5, min_p=0.1, **controls) for seed in range(30)]
    assert sample_tokens(logits, sequences) == [50] * 30
    assert sample_tokens(logits[:1], sequences[:1]) == [50]


def test_top_k_of_all_kinds_in_one_batch() -> None:
    logits = random_rows(1).repeat(4, 1)
    sequences = [make_sequence(VOCAB_SIZE, top_k=top_k, seed=6) for top_k in (10**9, 0, -1, 1)]
    tokens = sample_tokens(logits, sequences)
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[3] == logits[0].argmax()


def test_ignore_eos_lets_eos_be_chosen_and_min_tokens_does_not() -> None:
    logits = random_rows(1)
    logits[0, EOS] = 50.0
    assert sample_tokens(logits, [make_sequence(VOCAB_SIZE, temperature=0, ignore_eos=True)]) == [EOS]
    for output in ([], [7], [7, 7]):
        token = sample_tokens(logits, [make_sequence(VOCAB_SIZE, [1], output, temperature=0, min_tokens=2)])[
            0
        ]
        assert (token == EOS) == (len(output) == 2)


def test_logprobs_are_of_the_raw_logits_and_only_where_asked_for() -> None:
    logits = random_rows(3)
    controls = {
        "temperature": 0.1,
        "allowed_token_ids": [5, 6],
        "repetition_penalty": 2.0,
        "logit_bias": {5: 9.0},
    }
    sequences = [
        make_sequence(VOCAB_SIZE, [5], [5], **controls),
        make_sequence(VOCAB_SIZE, [5], [5], logprobs=0, **controls),
        make_sequence(VOCAB_SIZE, [5], [5], logprobs=2, **controls),
    ]
    results = sample(logits, sequences)
    expected = logits.log_softmax(dim=-1)
    assert isinstance(results[0], SampledToken)
    assert (results[0].logprob, results[0].rank, results[0].top) == (None, None, ())
    for row in (1, 2):
        token = results[row]
        assert isinstance(token, SampledToken)
        assert token.logprob == pytest.approx(expected[row, token.token_id].item(), abs=1e-6)
        assert token.rank == 1 + int((logits[row] > logits[row, token.token_id]).sum())
        assert [entry.token_id for entry in token.top] == logits[row].argsort(descending=True)[
            : 2 * row - 2
        ].tolist()


@pytest.mark.parametrize("bad_value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "controls",
    [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"logprobs": 2, "temperature": 0}],
)
def test_a_row_of_broken_logits_ends_its_own_sequence_only(
    bad_value: float, controls: dict[str, Any]
) -> None:
    logits = random_rows(5)
    sequences = [make_sequence(VOCAB_SIZE, seed=seed, **controls) for seed in range(5)]
    healthy = sample(logits, sequences)
    logits[2, 33] = bad_value
    logits[4] = bad_value
    results = sample(logits, sequences)
    for row in (2, 4):
        error = results[row]
        assert isinstance(error, RequestError)
        assert error.code is ErrorCode.INTERNAL
        assert "not finite" in error.message
    for row in (0, 1, 3):
        assert results[row] == healthy[row]


def test_a_nan_that_no_control_lets_through_still_spoils_the_logprobs() -> None:
    logits = random_rows(1)
    logits[0, 33] = torch.nan
    controls: dict[str, Any] = {"allowed_token_ids": [5, 6]}
    assert isinstance(sample(logits, [make_sequence(VOCAB_SIZE, **controls)])[0], SampledToken)
    assert isinstance(sample(logits, [make_sequence(VOCAB_SIZE, logprobs=0, **controls)])[0], RequestError)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_whose_controls_leave_nothing_ends_its_own_sequence_only(temperature: float) -> None:
    """No fault of the single controls: the one allowed token would complete a bad word."""
    logits = random_rows(3)
    stuck = make_sequence(
        VOCAB_SIZE, [4], allowed_token_ids=[5], bad_word_ids=[[4, 5]], temperature=temperature
    )
    free = [make_sequence(VOCAB_SIZE, seed=seed, temperature=temperature) for seed in range(2)]
    results = sample(logits, [free[0], stuck, free[1]])
    assert isinstance(results[1], RequestError)
    assert results[1].code is ErrorCode.INVALID_ARG
    assert "allowed_token_ids" in results[1].message
    assert [results[0], results[2]] == [*sample(logits[:1], free[:1]), *sample(logits[2:], free[1:])]


def test_no_sequences_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB_SIZE), []) == []
