"""Traces of requests for `simulate_scheduler`: who asks for how much, and when."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(order=True)
class Arrival:
    """One request: what is asked, and what the conversation it belongs to asks after it."""

    time: float
    prompt: array[int] = field(compare=False)
    num_output: int = field(compare=False)
    max_tokens: int = field(compare=False)
    follow_ups: list[tuple[float, int, int]] = field(default_factory=list, compare=False)
    """Seconds of thought after the answer, tokens of the next question, tokens of its answer."""


class Traffic:
    """Makes traces; lengths are cut to what a sequence may have."""

    def __init__(self, seed: int, seconds: float, rate: float, max_seq_len: int) -> None:
        self.random = random.Random(seed)
        self.seconds = seconds
        self.rate = rate
        self.max_seq_len = max_seq_len
        self.next_token = itertools.count(1)

    def tokens(self, count: int) -> array[int]:
        """Tokens that occur nowhere else."""
        return array("i", itertools.islice(self.next_token, count))

    def length(self, median: float, sigma: float) -> int:
        """A log-normal number of tokens."""
        return max(
            1, min(self.max_seq_len // 2 - 1, round(self.random.lognormvariate(math.log(median), sigma)))
        )

    def arrival_times(self, rate: float) -> Iterator[float]:
        """A Poisson process."""
        now = self.random.expovariate(rate)
        while now < self.seconds:
            yield now
            now += self.random.expovariate(rate)

    def request(self, now: float, prompt: float = 1020, prompt_sigma: float = 0.5) -> Arrival:
        """One request of its own; its client asks for up to four times of what will come."""
        num_prompt, num_output = self.length(prompt, prompt_sigma), self.length(129, 0.99)
        limit = self.max_seq_len - num_prompt
        max_tokens = min(limit, max(num_output, self.random.choice([256, 512, 4 * num_output])))
        return Arrival(now, self.tokens(num_prompt), min(num_output, max_tokens), max_tokens)

    def poisson(self) -> list[Arrival]:
        """Independent arrivals."""
        return [self.request(now) for now in self.arrival_times(self.rate)]

    def bursts(self) -> list[Arrival]:
        """The same mean rate, 40 at a time."""
        return [
            self.request(now + self.random.random())
            for now in self.arrival_times(self.rate / 40)
            for _ in range(40)
        ]

    def tail(self) -> list[Arrival]:
        """Short questions and, one in ten, a long document."""
        return [
            self.request(now, 6000, 0.3) if self.random.random() < 0.1 else self.request(now, 60, 0.8)
            for now in self.arrival_times(self.rate)
        ]

    def chat(self) -> list[Arrival]:
        """Conversations of about five turns; the rate counts turns."""
        system = self.tokens(400)
        arrivals = []
        for now in self.arrival_times(self.rate / 5):
            turns = [
                (self.random.expovariate(1 / 20), self.length(60, 0.8), self.length(129, 0.6))
                for _ in range(self.random.randint(2, 8))
            ]
            _, question, answer = turns.pop(0)
            arrivals.append(Arrival(now, system + self.tokens(question), answer, max(answer, 512), turns))
        return arrivals
