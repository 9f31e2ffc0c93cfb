"""WaitingQueue: order by rank, whatever is pushed, popped and taken out in between."""

from __future__ import annotations

import random

from scheduling_harness import make_sequence

from paged_engine.scheduling.sequence import Sequence
from paged_engine.scheduling.waiting_queue import WaitingQueue


def ranked(value: float, order: int) -> Sequence:
    sequence = make_sequence(1, name=f"{value}")
    sequence.rank = (value, order)
    return sequence


def test_pops_in_order_of_rank_and_leaves_out_what_was_discarded() -> None:
    queue = WaitingQueue()
    sequences = [ranked(value, order) for order, value in enumerate((3, 1, 2, 1))]
    for sequence in sequences:
        queue.push(sequence)
    queue.discard(sequences[2])
    queue.discard(sequences[2])
    assert len(queue) == 3
    assert [queue.pop() for _ in range(4)] == [sequences[1], sequences[3], sequences[0], None]
    assert len(queue) == 0


def test_equals_a_sorted_list_and_does_not_grow_with_what_has_left() -> None:
    chance = random.Random(5)
    queue = WaitingQueue()
    expected: list[Sequence] = []
    for order in range(3000):
        action = chance.random()
        if action < 0.5 or not expected:
            sequence = ranked(chance.randrange(100), order)
            queue.push(sequence)
            expected.append(sequence)
        elif action < 0.6:
            expected.sort(key=lambda item: item.rank)
            assert queue.pop() is expected.pop(0)
        else:
            sequence = expected.pop(chance.randrange(len(expected)))
            queue.discard(sequence)
            assert sequence not in queue
        assert len(queue) == len(expected)
        assert len(queue.heap) <= 2 * len(queue) + 17
