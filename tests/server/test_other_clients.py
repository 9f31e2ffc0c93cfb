"""Requests in the shapes that programs written for other servers send: they work here without a change.

vllm_backend's sample client and tests, NVIDIA's OpenAI frontend with its backend set to vllm, genai-perf's converters, and
the curl lines of vllm_backend's and TensorRT-LLM's documentation.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
from wire import HANG_S, GrpcStream, generate, generate_stream, grpc_answer, grpc_infer, outputs_of, tensor

PROMPTS = ["The most dangerous animal is", "The capital of France is", "The future of AI is"]

SAMPLING = {"temperature": "0", "top_p": "1", "max_tokens": "16"}

COMPLETION: dict[str, Any] = {
    "best_of": 1,
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "n": 1,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_tokens": 16,
}
"""What NVIDIA's OpenAI frontend makes of a completion request that says nothing but `max_tokens`; below, of a chat."""
CHAT: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "ignore_eos": False,
    "logprobs": False,
    "n": 1,
    "presence_penalty": 0.0,
    "temperature": 0.7,
    "top_p": 1.0,
    "max_tokens": 16,
}


class TestVllmBackend:
    """Sampling parameters travel as strings in a JSON tensor, as request parameters, or as both at once."""

    async def test_sample_client(self, tiny_server):
        """Several prompts on one asyncio stream, each with the parameters twice."""
        sampling = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "20"}

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number, prompt in enumerate(PROMPTS):
                yield {
                    "model_name": "llm",
                    "inputs": [
                        tensor("text_input", "BYTES", [prompt]),
                        tensor("stream", "BOOL", [True]),
                        tensor("sampling_parameters", "BYTES", [json.dumps(sampling)]),
                        tensor("exclude_input_in_output", "BOOL", [True]),
                    ],
                    "outputs": [grpcclient.InferRequestedOutput("text_output")],
                    "request_id": str(number),
                    "parameters": sampling,
                }

        texts = dict.fromkeys(["0", "1", "2"], "")
        async with grpc_aio.InferenceServerClient(tiny_server.grpc_url) as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=HANG_S):
                assert error is None, error
                outputs = outputs_of(result)
                assert outputs.keys() == {"text_output"}
                texts[result.get_response().id] += outputs["text_output"][0]
        assert all(texts.values())

    def test_three_prompts_on_one_stream(self, tiny_server):
        """Not streamed: one response each. (Without `exclude_input_in_output` the prompt is left out here.)"""
        for as_tensor, exclude in itertools.product((True, False), (None, False, True)):
            with GrpcStream(tiny_server) as stream:
                for number, prompt in enumerate(PROMPTS):
                    inputs = [tensor("text_input", "BYTES", [prompt]), tensor("stream", "BOOL", [False])]
                    if as_tensor:
                        inputs.append(tensor("sampling_parameters", "BYTES", [json.dumps(SAMPLING)]))
                    if exclude is not None:
                        inputs.append(tensor("exclude_input_in_output", "BOOL", [exclude]))
                    stream.send(
                        {},
                        SAMPLING,
                        inputs=inputs,
                        request_id=str(number),
                        enable_empty_final_response=False,
                    )
                arrived = stream.finish()
            texts = {}
            for result, error in arrived:
                assert error is None, error
                texts[result.get_response().id] = outputs_of(result)["text_output"]
            assert sorted(texts) == ["0", "1", "2"]
            for number, prompt in enumerate(PROMPTS):
                assert len(texts[str(number)]) == 1
                assert texts[str(number)][0].startswith(prompt) == (exclude is False)

    def test_streaming_with_the_prompt_is_an_error(self, tiny_server):
        inputs = [
            tensor("text_input", "BYTES", [PROMPTS[0]]),
            tensor("stream", "BOOL", [True]),
            tensor("sampling_parameters", "BYTES", [json.dumps(SAMPLING)]),
            tensor("exclude_input_in_output", "BOOL", [False]),
        ]
        answer = grpc_infer(tiny_server, {}, SAMPLING, inputs=inputs)
        assert answer.error is not None and "exclude_input_in_output" in answer.error
        assert not answer.responses

    @pytest.mark.parametrize("stream", [True, False])
    def test_additional_outputs(self, server, stream):
        """Every choice of them, in the formats that its tests check."""
        for number in range(18):
            self.check_additional_outputs(
                server,
                stream,
                finish_reason=[None, True, False][number % 3],
                cumulative_logprob=[True, None][number // 2 % 2],
                logprobs=[None, 0, 2][number // 3 % 3],
                return_logprobs=[True, False, None][number // 4 % 3],
                num_tokens=bool(number // 5 % 2),
            )

    def check_additional_outputs(
        self,
        server: Any,
        stream: bool,
        finish_reason: bool | None,
        cumulative_logprob: bool | None,
        logprobs: int | None,
        return_logprobs: bool | None,
        num_tokens: bool,
    ) -> None:
        prompt = "In this example,"
        sampling: dict[str, Any] = {**SAMPLING, "max_tokens": "4"}
        if logprobs is not None:
            sampling["logprobs"] = logprobs
        inputs = [
            tensor("text_input", "BYTES", [prompt]),
            tensor("stream", "BOOL", [stream]),
            tensor("sampling_parameters", "BYTES", [json.dumps(sampling)]),
        ]
        asked = {
            "return_finish_reason": finish_reason,
            "return_cumulative_logprob": cumulative_logprob,
            "return_logprobs": return_logprobs,
            "return_num_input_tokens": num_tokens,
            "return_num_output_tokens": num_tokens,
        }
        inputs += [tensor(name, "BOOL", [value]) for name, value in asked.items() if value is not None]
        answer = grpc_infer(server, {}, sampling, inputs=inputs, enable_empty_final_response=False).checked()
        previous = 0.0
        for position, response in enumerate(answer.responses):
            is_last = position == len(answer.responses) - 1
            assert response["text_output"][0] or is_last
            assert ("finish_reason" in response) == bool(finish_reason)
            if finish_reason:
                assert response["finish_reason"] == ["length" if is_last else "None"]
            assert ("cumulative_logprob" in response) == bool(cumulative_logprob)
            if cumulative_logprob:
                assert response["cumulative_logprob"][0] != previous
                previous = response["cumulative_logprob"][0]
            assert ("num_input_tokens" in response) == ("num_output_tokens" in response) == num_tokens
            if num_tokens:
                assert 0 < response["num_input_tokens"][0] <= len(prompt)
                assert response["num_output_tokens"][0] > 0
            assert ("logprobs" in response) == bool(return_logprobs)
            if return_logprobs:
                self.check_logprobs(response, logprobs)

    def check_logprobs(self, response: dict[str, list[Any]], logprobs: int | None) -> None:
        entries = json.loads(response["logprobs"][0])
        if logprobs is None:
            assert entries is None
            return
        text = ""
        for entry in entries:
            assert 1 <= len(entry) <= logprobs + 1
            for token_id, value in entry.items():
                assert token_id.isdigit() and len(value) == 3
                assert isinstance(value["logprob"], float) and isinstance(value["decoded_token"], str)
                if value["rank"] == 1:  # greedy: the chosen one
                    text += value["decoded_token"]
        assert text == response["text_output"][0]

    def test_documented_curl(self, tiny_server):
        body = {
            "text_input": "What is Triton Inference Server?",
            "parameters": {"stream": False, "temperature": 0},
        }
        answer = generate(tiny_server, body).checked()
        assert answer.status == 200 and len(answer.responses) == 1
        streamed = generate_stream(tiny_server, {**body, "parameters": {"stream": True, "temperature": 0}})
        assert streamed.checked().text == answer.text

    def test_cancelled_after_a_while(self, tiny_server):
        stream = GrpcStream(tiny_server)
        stream.send(
            {
                "text_input": "[[fault:slow]] Write an original and creative poem of at least 200 words.",
                "stream": False,
                "sampling_parameters": json.dumps({**SAMPLING, "max_tokens": "1500"}),
            }
        )
        stream.close(cancel_requests=True)
        result, error = stream.next()
        assert result is None and error is not None and error.status() == "StatusCode.CANCELLED"


class TestOpenAiFrontend:
    """What NVIDIA's frontend sends with its backend set to vllm: all fields that are not null, defaults included."""

    def test_its_tensors(self, tiny_server):
        for sampling, stream, echo in itertools.product((COMPLETION, CHAT), (True, False), (True, False)):
            inputs = [
                tensor("text_input", "BYTES", [PROMPTS[1]]),
                tensor("stream", "BOOL", [stream]),
                tensor("exclude_input_in_output", "BOOL", [not echo]),
                tensor("sampling_parameters", "BYTES", [json.dumps(sampling)]),
                tensor("return_num_input_tokens", "BOOL", [True]),
                tensor("return_num_output_tokens", "BOOL", [True]),
            ]
            answer = grpc_infer(tiny_server, {}, inputs=inputs)
            if stream and echo:
                assert answer.error is not None and "exclude_input_in_output" in answer.error
                continue
            for response in answer.checked().responses:
                assert len(response["text_output"]) == 1, "it reads exactly one string"
                assert len(response["num_input_tokens"]) == 1
            assert 1 <= sum(answer.joined("num_output_tokens")) <= 16, "it adds these up for `usage`"
            assert len({tuple(response["num_input_tokens"]) for response in answer.responses}) == 1
            if not stream:
                assert len(answer.responses) == 1 and answer.final_flags == [True]
                assert answer.text.startswith(PROMPTS[1]) == echo

    def test_what_its_users_may_set(self, tiny_server):
        for more in (
            {"stop": "\n"},
            {"stop": ["\n", "zebra"]},
            {"seed": 5, "min_tokens": 2, "logit_bias": {"50": -100}},
            {"logprobs": 5},
        ):
            sampling = json.dumps({**COMPLETION, **more})
            assert grpc_infer(
                tiny_server, {"text_input": PROMPTS[0], "sampling_parameters": sampling}
            ).checked()
        for refused, word in (({"best_of": 3}, "best_of"), ({"lora_name": "mine"}, "lora_name")):
            sampling = json.dumps({**COMPLETION, **refused})
            answer = grpc_infer(tiny_server, {"text_input": PROMPTS[0], "sampling_parameters": sampling})
            assert answer.error is not None and word in answer.error

    def test_a_tool_that_must_be_called(self, tiny_server):
        """Its guide is JSON in JSON in JSON, with every field of vLLM's object."""
        guide = {
            "json": json.dumps({"enum": ["yes", "no"]}),
            "regex": None,
            "backend": None,
            "disable_fallback": False,
        }
        sampling = json.dumps({**CHAT, "guided_decoding": json.dumps(guide)})
        answer = grpc_infer(
            tiny_server, {"text_input": PROMPTS[0], "sampling_parameters": sampling}
        ).checked()
        assert json.loads(answer.text) in ("yes", "no")


class TestGenaiPerf:
    """The load generator: counts as strings, and over HTTP every field as a list of one."""

    def test_vllm_converter(self, tiny_server):
        exact = {"max_tokens": "12", "min_tokens": "12"}
        for sampling, stream in itertools.product(({"max_tokens": "12"}, exact), (True, False)):
            inputs = [
                tensor("text_input", "BYTES", ["Once upon a time"]),
                tensor("exclude_input_in_output", "BOOL", [True]),
                tensor("sampling_parameters", "BYTES", [json.dumps(sampling)]),
                tensor("return_num_output_tokens", "BOOL", [True]),
                *([tensor("stream", "BOOL", [True])] if stream else []),
            ]
            count = sum(grpc_infer(tiny_server, {}, inputs=inputs).checked().joined("num_output_tokens"))
            assert count == 12 if sampling is exact else 1 <= count <= 12

    def test_triton_generate_converter(self, tiny_server):
        body = {"text_input": ["Once upon a time"], "max_tokens": 12, "temperature": 0}
        whole = generate(tiny_server, body).checked()
        streamed = generate_stream(tiny_server, {**body, "stream": True}).checked()
        assert streamed.text == whole.text
        assert len(streamed.responses) > 1

    def test_empty_final_response_where_it_is_asked_for(self, tiny_server):
        """perf_analyzer asks for it; ours rides on the last text, so that there is nothing empty to count."""
        for enable in (True, False):
            with GrpcStream(tiny_server) as stream:
                stream.send(
                    {"text_input": "Hello", "max_tokens": 4, "ignore_eos": True, "stream": True, "seed": 1},
                    enable_empty_final_response=enable,
                )
                answer = grpc_answer(stream.finish()).checked()
            assert all(response["text_output"] != [""] for response in answer.responses[:-1])
            assert answer.final_flags.count(True) == 1


class TestTensorRtLlm:
    """Its names over HTTP; "" stands for no words."""

    def test_documented_curl(self, tiny_server):
        plain = {"text_input": "What is machine learning?", "max_tokens": 20, "temperature": 0}
        body = {**plain, "bad_words": "", "stop_words": ""}
        answer = generate(tiny_server, body).checked()
        assert answer.status == 200
        assert answer.text == generate(tiny_server, plain).checked().text
        assert generate_stream(tiny_server, {**body, "stream": True}).checked().text == answer.text

    def test_lists_of_words(self, tiny_server):
        plain = {"text_input": "Hello there", "max_tokens": 20, "temperature": 0}
        text = generate(tiny_server, plain).checked().text
        word = text.split()[0]
        assert (
            generate(tiny_server, {**plain, "stop_words": [word]}).checked().text == text[: text.index(word)]
        )
        assert word not in generate(tiny_server, {**plain, "bad_words": [word]}).checked().text

    def test_neutral_values_and_others(self, tiny_server):
        plain = {"text_input": "Hello", "max_tokens": 4, "temperature": 0}
        neutral = {
            "beam_width": 1,
            "length_penalty": 1.0,
            "end_id": 2,
            "pad_id": 2,
            "random_seed": 0,
            "top_k": 1,
            "top_p": 0.9,
            "repetition_penalty": 1.0,
        }
        answer = generate(tiny_server, {**plain, **neutral}).checked()
        assert answer.text == generate(tiny_server, plain).checked().text
        for name, value in (("beam_width", 4), ("length_penalty", 2.0), ("end_id", 50256)):
            refused = generate(tiny_server, {**plain, name: value})
            assert refused.error is not None and refused.error.startswith(f"INVALID_ARG: {name} must be ")

    def test_its_grpc_shapes_are_refused_by_triton(self, tiny_server):
        """[1, 1] is for models with a batch dimension, which this one has not."""
        inputs = [
            tensor("text_input", "BYTES", ["Hello"], [1, 1]),
            tensor("max_tokens", "INT64", [np.int64(4)], [1, 1]),
        ]
        answer = grpc_infer(tiny_server, {}, inputs=inputs)
        assert answer.error is not None and not answer.responses
