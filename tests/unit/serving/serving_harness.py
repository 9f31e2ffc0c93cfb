"""What the serving tests stand on: the real engine and scheduler over a model that spells the alphabet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch

from paged_engine.admission import Admission
from paged_engine.config import EngineConfig
from paged_engine.engine import Engine
from paged_engine.execution.sampling import SampledToken, TokenLogprob
from paged_engine.guided import GrammarCompiler
from paged_engine.scheduling.pages import PagePool
from paged_engine.scheduling.scheduler import Scheduler
from paged_engine.serving.faults import FaultyEngine
from paged_engine.serving.metrics import ServiceMetrics
from paged_engine.serving.outputs import Response
from paged_engine.serving.service import Service
from paged_engine.serving.sources import RawRequest

WAIT_S = 20.0
"""How long a test waits for what must happen, before it fails."""
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
"""The answer to everything."""
EOS_TOKEN_ID = 0
VOCAB_SIZE = 128


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.002)


class CharacterTokenizer:
    """One token for each ASCII character; token 0 ends a text and shows nothing."""

    bos_token_id = None
    eos_token_ids = frozenset({EOS_TOKEN_ID})

    def __init__(self) -> None:
        self.before_encoding: Callable[[str], None] = lambda text: None

    def encode(self, text: str) -> list[int]:
        self.before_encoding(text)
        return list(text.encode("ascii"))

    encode_part = encode

    def render_chat(self, messages: Any, template_kwargs: Mapping[str, Any], tools: Any) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.decode_token(token_id) for token_id in token_ids)

    def decode_token(self, token_id: int) -> str:
        return chr(token_id) if token_id != EOS_TOKEN_ID else ""

    def open_detokenizer(self, *, skip_special_tokens: bool) -> Any:
        return SimpleNamespace(push=self.decode_token, finish=lambda: "")


class AlphabetModel:
    """Runner and sampler in one: the answer to everything is abcdefghijklmnopqrstuvwxyz, and then the end token."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.may_step = threading.Event()
        """Cleared, a step does not end."""
        self.may_step.set()
        self.steps_to_go: int | None = None
        """As many steps are made, and then none until this is set again."""
        self.num_steps = 0
        self.failure: Exception | None = None
        """Raised by the next step."""

    def pause_after(self, num_steps: int) -> None:
        self.steps_to_go = num_steps
        self.may_step.set()

    def go_on(self) -> None:
        self.steps_to_go = None
        self.may_step.set()

    def recover(self) -> None:
        """There is nothing to give back."""

    def execute(self, batch: Any) -> torch.Tensor:
        if self.steps_to_go == 0:
            self.may_step.clear()
        if not self.may_step.wait(WAIT_S):
            raise RuntimeError("the test left the model paused")
        if self.steps_to_go:
            self.steps_to_go -= 1
        self.num_steps += 1
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return torch.zeros(len(batch.logit_rows), 1)

    def needs_history(self, sequence: Any) -> bool:
        return False

    def launch(self, logits: torch.Tensor, sequences: Sequence[Any], pending: Any = None) -> Any:
        tokens = [self._next_token(sequence) for sequence in sequences]
        token_ids = torch.tensor([token.token_id for token in tokens], dtype=torch.int64)
        return SimpleNamespace(
            row_of={item: row for row, item in enumerate(sequences)},
            tokens=token_ids,
            result=lambda: tokens,
        )

    def _next_token(self, sequence: Any) -> SampledToken:
        number = sequence.num_output_tokens
        token_id = ord("a") + number if number < 26 else EOS_TOKEN_ID
        if sequence.sampling.logprobs is None:
            return SampledToken(token_id, None, None)
        runners_up = [TokenLogprob(ord("A"), float("-inf"), 2), TokenLogprob(ord("B"), -3.0, 3)]
        top = [TokenLogprob(token_id, -0.5, 1), *runners_up][: sequence.sampling.logprobs]
        return SampledToken(token_id, -0.5, 1, tuple(top))


class MemoryResponder:
    """A client that writes down what it gets, and fails the test for anything after the final response."""

    def __init__(self) -> None:
        self.responses: list[Response] = []
        self.is_cancelled = False
        self.build_failure: Exception | None = None
        """Raised when the next response is built."""
        self.send_failure: Exception | None = None
        """Raised by the next send."""
        self._done = threading.Event()
        self.num_finals = 0

    def prepare(self, response: Response) -> Callable[[], None]:
        if self.build_failure is not None:
            failure, self.build_failure = self.build_failure, None
            raise failure
        return partial(self._send, response)

    def _send(self, response: Response) -> None:
        if self.send_failure is not None:
            failure, self.send_failure = self.send_failure, None
            raise failure
        if self.num_finals:
            self.num_finals += 1
            return
        self.responses.append(response)
        if response.is_final:
            self.num_finals = 1
            self._done.set()

    def cancelled(self) -> bool:
        assert not self.num_finals, "not to be asked after the final response"
        return self.is_cancelled

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> MemoryResponder:
        assert self._done.wait(WAIT_S), "no final response"
        assert self.num_finals == 1
        return self

    @property
    def texts(self) -> list[str]:
        """The first sequence's text of each response that has any."""
        tensors = [response.tensors for response in self.responses if response.tensors]
        return [tensor["text_output"][0].decode() for tensor in tensors]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def error(self) -> str:
        """The error's code and message, "" if there is none."""
        error = self.responses[-1].error
        return "" if error is None else str(error)

    @property
    def finish_reason(self) -> str:
        return str(self.responses[-1].tensors["finish_reason"][0].decode())


class MemoryMetrics:
    """A registry that keeps values by name and labels."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.observations: dict[str, list[float]] = {}
        self.is_open = True
        self.is_closed = False

    def open(self) -> bool:
        return self.is_open

    def counter(self, name: str, description: str, labels: Mapping[str, str]) -> Any:
        key = (name, tuple(sorted(labels.items())))
        self.values[key] = 0.0

        def increment(difference: float) -> None:
            assert not name.endswith("_total") or difference > 0, "a counter only grows"
            self.values[key] += difference

        return SimpleNamespace(increment=increment)

    gauge = counter

    def histogram(
        self, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Any:
        assert list(buckets) == sorted(set(buckets))
        self.observations[name] = []
        return SimpleNamespace(observe=self.observations[name].append)

    def close(self) -> None:
        self.is_closed = True

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels."""
        return sum(
            value
            for (series, have), value in self.values.items()
            if series == name and set(labels.items()) <= set(have)
        )


class ServedModel:
    """A running service, what it stands on, and ways to ask it for something."""

    def __init__(self, wedged_after_s: float = WAIT_S, faults: bool = False, **parameters: Any) -> None:
        values = {"page_size": 4, "num_pages": 256, "max_seq_len": 512, "max_num_tokens": 256, **parameters}
        self.config = EngineConfig(model="unused", **values)
        self.tokenizer = cast(Any, CharacterTokenizer())
        self.model = AlphabetModel()
        admission = Admission(
            self.config,
            self.tokenizer,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=self.tokenizer.eos_token_ids,
            grammars=GrammarCompiler(None, VOCAB_SIZE, frozenset()),
            sampling_defaults={},
        )
        model: Any = self.model
        self.engine = Engine(
            self.config,
            admission=admission,
            tokenizer=self.tokenizer,
            eos_token_ids=self.tokenizer.eos_token_ids,
            scheduler=Scheduler(self.config, PagePool(self.config.num_pages, self.config.page_size)),
            runner=model,
            sampler=model,
        )
        self.metrics = MemoryMetrics()
        self.service = Service(
            FaultyEngine(self.engine) if faults else self.engine,
            self.config,
            ServiceMetrics(self.metrics, {"model": "llm", "version": "1"}),
            wedged_after_s=wedged_after_s,
        )
        self.service.start()

    def ask(self, text: str = "hi", **tensors: Any) -> MemoryResponder:
        """Submit a request; tensors are given by their only element, or as a list."""
        elements = {name: value if isinstance(value, list) else [value] for name, value in tensors.items()}
        return self.ask_raw(RawRequest({"text_input": [text.encode()], **elements}))

    def ask_raw(self, raw: RawRequest) -> MemoryResponder:
        responder = MemoryResponder()
        self.service.submit(lambda: raw, responder)
        return responder

    def assert_clean(self) -> None:
        """Nobody holds a page, nothing runs or waits, and the metrics come to say so."""
        wait_until(lambda: not self.engine.has_work)
        self.engine.check_integrity()
        assert self.engine.statistics().num_pages_used == 0
        gauges = ("llm_requests_running", "llm_requests_waiting", "llm_kv_pages_used")
        wait_until(lambda: all(self.metrics.value(name) == 0 for name in gauges))


Serve = Callable[..., ServedModel]
"""The fixture `serve`: starts a service with these parameters of EngineConfig."""
