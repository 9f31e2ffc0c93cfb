"""Runs a whole engine over a tiny checkpoint, step by step, and collects what comes of each sequence."""

from __future__ import annotations

import random
from pathlib import Path

from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.errors import RequestError
from paged_engine.execution.sampling import SampledToken
from paged_engine.generation import Output
from paged_engine.loading import load_engine
from paged_engine.request import GenerateRequest, Prompt, SamplingParams
from paged_engine.scheduling.sequence import FinishReason

MAX_STEPS = 20_000


def engine(checkpoint: Path, **parameters: object) -> Engine:
    given = {
        "page_size": 4,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "num_pages": 256,
        "num_threads": 1,
        **parameters,
    }
    return load_engine(
        EngineConfig.from_parameters({"model": str(checkpoint), **{k: str(v) for k, v in given.items()}})
    )


def request(name: str, prompt: Prompt, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        name,
        prompt,
        SamplingParams.parse({"max_tokens": 24, "temperature": 0, "ignore_eos": True, **sampling}),
    )


class Answers:
    """What came of each sequence: tokens, joined text, log-probabilities, how it ended."""

    def __init__(self) -> None:
        self.outputs: dict[tuple[str, int], list[Output]] = {}

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.outputs.setdefault((output.request_id, output.index), []).append(output)

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[name, index] for token in output.token_ids]

    def text(self, name: str, index: int = 0) -> str:
        return "".join(output.text for output in self.outputs[name, index])

    def logprobs(self, name: str, index: int = 0) -> list[SampledToken]:
        return [token for output in self.outputs[name, index] for token in output.logprobs]

    def prompt_logprobs(self, name: str, index: int = 0) -> list[SampledToken]:
        """They all come before the first token."""
        outputs = self.outputs[name, index]
        with_token = next((i for i, output in enumerate(outputs) if output.token_ids), len(outputs))
        assert not any(output.prompt_logprobs for output in outputs[with_token:])
        return [token for output in outputs[:with_token] for token in output.prompt_logprobs]

    def ending(self, name: str, index: int = 0) -> FinishReason | RequestError | None:
        outputs = self.outputs[name, index]
        assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
        return outputs[-1].finish_reason or outputs[-1].error


def run(target: Engine, *requests: GenerateRequest, stagger: int = 0) -> Answers:
    """Run to the end, adding a request every `stagger` steps (all at once for 0); the books are checked at each step."""
    answers = Answers()
    waiting = list(requests)
    for step in range(MAX_STEPS):
        while waiting and (stagger == 0 or step % stagger == 0 or not target.has_work):
            target.add(target.prepare(waiting.pop(0)))
            if stagger:
                break
        answers.take(target.step())
        target.check_integrity()
        if not target.has_work and not waiting:
            break
    statistics = target.statistics()
    assert (statistics.num_pages_used, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
    return answers


def random_requests(seed: int, count: int, longest: int = 120) -> list[GenerateRequest]:
    """Prompts of shared and of own beginnings, greedy and seeded, with penalties, stops and n > 1 among them."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 259) for _ in range(40)]
    requests = []
    for i in range(count):
        prompt = stem[: rng.choice([0, 0, 7, 8, 40])] + [
            rng.randrange(3, 259) for _ in range(rng.randint(1, longest - 40))
        ]
        sampling: dict[str, object] = {"max_tokens": rng.randint(1, 40)}
        if rng.random() < 0.6:
            sampling |= {
                "temperature": rng.choice([0.7, 1.0, 1.5]),
                "seed": rng.randrange(2**64),
                "top_p": rng.choice([1.0, 0.9]),
            }
            sampling |= {"top_k": rng.choice([0, 5, 50]), "n": rng.choice([1, 1, 1, 3])}
        if rng.random() < 0.3:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        if rng.random() < 0.3:
            sampling["stop"] = [bytes(rng.randrange(97, 123) for _ in range(2)).decode() for _ in range(3)]
        requests.append(request(f"r{i}", prompt, **sampling))
    return requests
