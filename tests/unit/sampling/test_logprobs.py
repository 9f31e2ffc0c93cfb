"""Log-probabilities, ranks and the most likely tokens, against log_softmax and a full sort."""

from __future__ import annotations

import math

import pytest
import torch

from paged_engine.execution.logprobs import PendingScores


@pytest.mark.parametrize("num_top", [0, 1, 20, 100])
def test_the_chosen_and_the_best_tokens_with_their_ranks(num_top: int) -> None:
    logprobs = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).mul(3).log_softmax(dim=-1)
    order = logprobs.argsort(dim=-1, descending=True)
    chosen = torch.stack((order[0, 0], order[1, 17], order[2, 4999]))
    scored = PendingScores(logprobs, chosen, [num_top] * 3).result()
    assert [token.rank for token in scored] == [1, 18, 5000]
    for row, token in enumerate(scored):
        assert token.token_id == chosen[row]
        assert token.logprob == logprobs[row, chosen[row]].item()
        assert [entry.token_id for entry in token.top] == order[row, :num_top].tolist()
        assert [entry.rank for entry in token.top] == list(range(1, num_top + 1))
        assert [entry.logprob for entry in token.top] == logprobs[row, order[row, :num_top]].tolist()


def test_rows_may_ask_for_different_numbers_and_for_more_than_there_are() -> None:
    logprobs = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).log_softmax(dim=-1)
    scored = PendingScores(logprobs, torch.zeros(4, dtype=torch.int64), [0, 3, 100, 1]).result()
    assert [len(token.top) for token in scored] == [0, 3, 50, 1]


def test_equals_share_a_rank_and_come_lowest_id_first_even_where_the_list_ends_among_them() -> None:
    logits = torch.zeros(1, 900)
    logits[0, [800, 5]] = 1.0
    scored = PendingScores(logits.log_softmax(dim=-1), torch.tensor([899]), [6]).result()[0]
    assert [entry.token_id for entry in scored.top] == [5, 800, 0, 1, 2, 3]
    assert [entry.rank for entry in scored.top] == [1, 1, 3, 3, 3, 3]
    assert scored.rank == 3


def test_tokens_of_probability_zero_are_not_listed() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    scored = PendingScores(logits.log_softmax(dim=-1), torch.tensor([2]), [4]).result()[0]
    assert [entry.token_id for entry in scored.top] == [2, 0]
    assert all(math.isfinite(entry.logprob) for entry in scored.top)
