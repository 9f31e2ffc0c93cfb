"""WaitingQueue: sequences in order of rank, at a cost that stays flat however many wait."""

from __future__ import annotations

import heapq

from paged_engine.scheduling.sequence import Sequence


class WaitingQueue:
    """A heap by `Sequence.rank`. Taking one out of the middle only marks it; marked ones are dropped when they surface,
    or all together once they outnumber the others, so that a blocked queue whose clients come and go does not grow."""

    def __init__(self) -> None:
        self.heap: list[tuple[tuple[float, int], Sequence]] = []
        self.members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self.members

    def push(self, sequence: Sequence) -> None:
        """Put a sequence in its place. O(log n)."""
        self.members.add(sequence)
        heapq.heappush(self.heap, (sequence.rank, sequence))

    def pop(self) -> Sequence | None:
        """Take out the sequence whose turn it is, or None. O(log n)."""
        while self.heap:
            _, sequence = heapq.heappop(self.heap)
            if sequence in self.members:
                self.members.remove(sequence)
                return sequence
        return None

    def discard(self, sequence: Sequence) -> None:
        """Take out a sequence wherever it stands, if it is here at all. O(1), amortized."""
        self.members.discard(sequence)
        if len(self.heap) > 2 * len(self.members) + 16:
            self.heap = [entry for entry in self.heap if entry[1] in self.members]
            heapq.heapify(self.heap)
