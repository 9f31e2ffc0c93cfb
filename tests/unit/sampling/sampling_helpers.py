"""What the tests of sampling share: sequences made in one line, and the distribution that transformers gives a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paged_engine.constraints import TokenConstraints
from paged_engine.errors import RequestError
from paged_engine.execution.sampling import SampledToken, Sampler
from paged_engine.request import SamplingParams
from paged_engine.scheduling.sequence import Sequence

EOS = 2


def make_sequence(
    vocab_size: int,
    prompt: Iterable[int] = (1,),
    output: Iterable[int] = (),
    *,
    seed: int = 0,
    index: int = 0,
    bad_word_ids: Iterable[Iterable[int]] = (),
    **controls: Any,
) -> Sequence:
    """A sequence that has generated `output` after `prompt`, as admission would have made it."""
    sampling = SamplingParams.parse(controls)
    constraints = TokenConstraints.resolve(sampling, vocab_size, frozenset({EOS}), bad_word_ids)
    sequence = Sequence(
        "request", prompt, sampling, max_num_tokens=10_000, seed=seed, index=index, constraints=constraints
    )
    sequence.token_ids.extend(output)
    return sequence


def with_seeds(sequence: Sequence, seeds: Iterable[int]) -> list[Sequence]:
    """The same request with other seeds."""
    copies = [
        Sequence(
            sequence.request_id,
            sequence.token_ids,
            sequence.sampling,
            max_num_tokens=sequence.max_num_tokens,
            seed=seed,
            constraints=sequence.constraints,
        )
        for seed in seeds
    ]
    for copy in copies:
        copy.num_prompt_tokens = sequence.num_prompt_tokens
    return copies


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken | RequestError]:
    """Sample without overwriting `logits`."""
    return Sampler(logits.shape[1]).sample(logits.clone(), sequences)


def sample_tokens(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """The token ids sampled; fails where a row ended in an error."""
    results = sample(logits, sequences)
    assert all(isinstance(result, SampledToken) for result in results), results
    return [result.token_id for result in results if isinstance(result, SampledToken)]


def processors_of_transformers(
    sequence: Sequence, bad_word_ids: Iterable[Iterable[int]] = ()
) -> LogitsProcessorList:
    """transformers' counterparts of a sequence's controls, in the order vLLM applies them."""
    sampling, processors = sequence.sampling, LogitsProcessorList()
    if bad_word_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in bad_word_ids]))
    if sampling.min_tokens:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                sequence.num_prompt_tokens, sampling.min_tokens, [EOS, *sampling.stop_token_ids]
            )
        )
    if sampling.logit_bias:
        processors.append(
            SequenceBiasLogitsProcessor(
                [[[token], float(bias)] for token, bias in sampling.logit_bias.items()]
            )
        )
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def distribution_of_transformers(
    logits: torch.Tensor, sequence: Sequence, bad_word_ids: Iterable[Iterable[int]] = ()
) -> torch.Tensor:
    """float64 [vocab_size]: what transformers would draw the next token of `sequence` from, given its row of logits."""
    token_ids = torch.tensor([list(sequence.token_ids)])
    warped = processors_of_transformers(sequence, bad_word_ids)(token_ids, logits[None].clone())
    return warped[0].double().softmax(dim=-1)
