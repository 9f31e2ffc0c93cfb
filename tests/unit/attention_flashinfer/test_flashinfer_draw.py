"""Drawing for requests without a seed: our code over FlashInfer's documented semantics in plain torch."""

from __future__ import annotations

import logging
import types
from pathlib import Path
from typing import Any

import flashinfer_double
import pytest
import torch
from deferred_device import defer
from engine_runs import engine, request, run
from tiny_checkpoint import save_tiny_checkpoint

from paged_engine.constraints import TokenConstraints
from paged_engine.engine import Engine
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.execution.flashinfer_draw import FlashInferDraw, load_flashinfer_draw
from paged_engine.execution.sampling import SampledToken, Sampler
from paged_engine.execution.token_choice import RandomControls, draw
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import Sequence

CPU = torch.device("cpu")
VOCAB_SIZE = 64
NUM_DRAWS = 20_000
LEVEL = 0.001
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"top_p": 0.8},
    {"top_p": 1e-6},
    {"top_p": 1e-40},
    {"top_p": 1e-60},
    {"top_k": 5},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 10**9, "top_p": 0.95, "temperature": 2.0},
    {"min_p": 0.05},
    {"min_p": 0.02, "top_p": 0.9},
    {"min_p": 0.01, "top_k": 9, "top_p": 0.9, "temperature": 1.5},
]


def library(**replaced: Any) -> Any:
    """The double, some of its functions replaced."""
    return types.SimpleNamespace(**{**vars(flashinfer_double), **replaced})


def sequences_of(controls: dict[str, Any], count: int, first_seed: int = 0) -> list[Sequence]:
    sampling = SamplingParams.parse(controls)
    return [
        Sequence("r", [1], sampling, max_num_tokens=99, seed=seed)
        for seed in range(first_seed, first_seed + count)
    ]


def row(seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """No two tokens alike."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def tokens_of(results: list[SampledToken | RequestError]) -> list[int]:
    assert all(isinstance(result, SampledToken) for result in results), results
    return [result.token_id for result in results if isinstance(result, SampledToken)]


def fused_sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(vocab_size, FlashInferDraw(flashinfer_double, CPU))


def filtered(logits: torch.Tensor, controls: dict[str, Any]) -> torch.Tensor:
    """float64 [vocab_size]: the distribution by its definition, filters in our order."""
    weights = (logits.double() / controls.get("temperature", 1)).softmax(dim=-1)
    weights[weights < controls.get("min_p", 0) * weights.max()] = 0
    order = weights.argsort(descending=True, stable=True)
    weights[order[controls.get("top_k") or VOCAB_SIZE :]] = 0
    weights /= weights.sum()
    before = weights[order].cumsum(dim=-1) - weights[order]
    weights[order[before >= controls.get("top_p", 1)]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("controls", FILTERS, ids=str)
def test_what_is_drawn_has_the_filtered_distribution(controls: dict[str, Any]) -> None:
    """A chi-square test over steps of 100 rows; the numbers are fixed, so it passes always or never."""
    logits, sampler = row(), fused_sampler()
    counts = torch.zeros(VOCAB_SIZE)
    for step in range(NUM_DRAWS // 100):
        results = sampler.sample(logits.repeat(100, 1), sequences_of(controls, 100, 100 * step))
        counts += torch.tensor(tokens_of(results)).bincount(minlength=VOCAB_SIZE)
    expected = filtered(logits, controls) * NUM_DRAWS
    assert not counts[expected == 0].any()
    used = expected >= 5
    statistic = ((counts - expected)[used] ** 2 / expected[used]).sum()
    degrees = torch.tensor(float(max(int(used.sum()) - 1, 1)))
    assert torch.special.gammaincc(degrees / 2, statistic.float() / 2) > LEVEL


@pytest.mark.parametrize("controls", FILTERS, ids=str)
def test_it_draws_only_what_our_own_draw_may(controls: dict[str, Any]) -> None:
    """In one batch with rows of all other controls."""
    logits = torch.stack([row(seed) for seed in range(len(FILTERS))]).repeat_interleave(40, dim=0)
    sequences = [item for filters in FILTERS for item in sequences_of(filters, 40)]
    tokens = tokens_of(fused_sampler().sample(logits.clone(), sequences))
    number = FILTERS.index(controls)
    allowed = filtered(row(number), controls) > 0
    assert allowed[tokens[40 * number : 40 * number + 40]].all()


def test_only_rows_without_a_seed_go_there() -> None:
    """The others come out as they do alone and without it; greedy ones are greedy."""
    received: list[int] = []

    def recording(logits: torch.Tensor, controls: RandomControls) -> torch.Tensor:
        received.append(len(logits))
        return FlashInferDraw(flashinfer_double, CPU)(logits, controls)

    logits = torch.stack([row(seed) for seed in range(8)])
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"seed": 3, "top_p": 0.9},
        {"temperature": 0},
        {"top_k": 1},
    ]
    sequences = [item for kind in kinds for item in sequences_of(kind, 2)]
    tokens = tokens_of(Sampler(VOCAB_SIZE, recording).sample(logits.clone(), sequences))
    assert received == [2]
    assert tokens[4:] == logits[4:].argmax(dim=-1).tolist()
    for number in (2, 3):
        alone = Sampler(VOCAB_SIZE).sample(logits[number : number + 1].clone(), [sequences[number]])
        assert tokens_of(alone) == [tokens[number]]
    Sampler(VOCAB_SIZE, recording).sample(logits[2:6].clone(), sequences[2:6])
    assert received == [2], "nobody else is asked"


def test_no_two_rows_and_no_two_steps_get_the_same_numbers() -> None:
    logits = torch.zeros(1, 5000)
    sampler = fused_sampler(5000)
    (sequence,) = sequences_of({}, 1)
    in_one_step = tokens_of(sampler.sample(logits.repeat(50, 1), [sequence] * 50))
    assert len(set(in_one_step)) > 45
    step_by_step = []
    for _ in range(50):
        step_by_step += tokens_of(sampler.sample(logits.clone(), [sequence]))
        sequence.token_ids.append(step_by_step[-1])
    assert len(set(step_by_step)) > 45


def test_torchs_own_generator_is_neither_read_nor_moved() -> None:
    state = torch.get_rng_state()
    fused_sampler().sample(row().repeat(9, 1), sequences_of({"top_k": 9}, 9))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bad_value", [torch.nan, torch.inf])
@pytest.mark.parametrize("controls", [{}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_a_row_of_broken_logits_ends_its_own_sequence_only(
    bad_value: float, controls: dict[str, Any]
) -> None:
    logits = torch.stack([row(seed) for seed in range(5)])
    sequences = sequences_of(controls, 5)
    healthy = fused_sampler().sample(logits.clone(), sequences)
    logits[2, 33] = bad_value
    logits[4] = bad_value
    pending = fused_sampler().launch(logits, sequences)
    assert pending.tokens.min() >= 0, "the next step may be fed with it"
    assert pending.tokens.max() < VOCAB_SIZE
    for number, result in enumerate(pending.result()):
        if number in (2, 4):
            assert isinstance(result, RequestError)
            assert result.code is ErrorCode.INTERNAL
        else:
            assert result == healthy[number]


def test_a_row_whose_controls_leave_nothing_is_told_so() -> None:
    sampling = SamplingParams.parse({"allowed_token_ids": [5]})
    constraints = TokenConstraints.resolve(sampling, VOCAB_SIZE, frozenset(), [[4, 5]])
    stuck = Sequence("r", [4], sampling, max_num_tokens=99, constraints=constraints)
    (free,) = sequences_of({}, 1)
    results = fused_sampler().sample(row().repeat(2, 1), [stuck, free])
    assert isinstance(results[0], RequestError)
    assert results[0].code is ErrorCode.INVALID_ARG
    assert isinstance(results[1], SampledToken)


def half_of_it(probs: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
    return flashinfer_double.top_p_sampling_from_probs(probs, *rest, **keywords) // 2


def without_top_k(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, **seed: Any) -> torch.Tensor:
    return flashinfer_double.top_p_sampling_from_probs(probs, top_p, **seed)


def greedy(probs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return probs.argmax(dim=-1).int()


def failing(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("nvcc: not found")


@pytest.mark.parametrize(
    ("function", "replacement", "reason"),
    [
        ("top_p_sampling_from_probs", half_of_it, "it draws"),
        ("top_p_sampling_from_probs", greedy, "it draws"),
        ("top_p_sampling_from_probs", failing, "RuntimeError: nvcc: not found"),
        ("top_k_top_p_sampling_from_probs", without_top_k, r"{'top_k': 3}"),
        ("top_k_top_p_sampling_from_probs", failing, "nvcc"),
    ],
)
def test_what_draws_something_else_is_not_used(
    function: str, replacement: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert load_flashinfer_draw(library(**{function: replacement}), VOCAB_SIZE, CPU) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()


@pytest.mark.parametrize("vocab_size", [4, 5, 1000])
def test_the_trial_passes_what_is_right_and_says_nothing(
    vocab_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert load_flashinfer_draw(flashinfer_double, vocab_size, CPU) is not None
    assert not caplog.records


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("llama"))


def fused_engine(checkpoint: Path, **parameters: Any) -> Engine:
    target = engine(checkpoint, **parameters)
    target._sampler = fused_sampler(target._sampler.vocab_size)
    return target


def test_a_launch_waits_for_nothing_beside_seeded_and_greedy_requests(checkpoint: Path) -> None:
    """On a device that is late; the others' tokens are what they are alone, those without a seed differ from each other."""
    target = fused_engine(checkpoint, look_ahead=True)
    device = defer(target)
    items = [
        *(request(f"free{i}", [40, 41, 42], temperature=1, top_p=0.9, min_p=0.01) for i in range(3)),
        request("many", [40, 41, 42], temperature=1.5, top_k=50, n=3),
        request("seeded", [50, 51], temperature=1, seed=7, top_k=20, top_p=0.9),
        request("greedy", [60, 61]),
    ]
    answers = run(target, *items, stagger=2)
    assert device.waits == []
    alone = engine(checkpoint)
    for item in items[-2:]:
        assert answers.tokens(item.request_id) == run(alone, item).tokens(item.request_id)
    texts = [answers.tokens(*key) for key in answers.outputs if key[0].startswith(("free", "many"))]
    assert len({tuple(tokens) for tokens in texts}) == len(texts) == 6
    assert {len(tokens) for tokens in texts} == {24}


def test_tokens_that_are_out_are_not_drawn_again_after_a_preemption(checkpoint: Path) -> None:
    target = fused_engine(checkpoint, num_pages=24)
    items = [request(f"r{i}", [40 + i] * 20, temperature=1, top_p=0.95) for i in range(4)]
    answers = run(target, *items)
    assert target.statistics().num_preemptions > 0
    for item in items:
        outputs = answers.outputs[item.request_id, 0]
        assert len(answers.tokens(item.request_id)) == 24
        assert answers.text(item.request_id) == target.tokenizer.decode(answers.tokens(item.request_id))
        assert outputs[-1].finished


def test_a_cpu_keeps_to_torch(checkpoint: Path) -> None:
    assert engine(checkpoint)._sampler._draw_unseeded is draw
