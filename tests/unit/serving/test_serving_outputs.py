"""Responses: when there is one, and what is in its tensors."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from paged_engine.config import EngineConfig
from paged_engine.errors import RequestError
from paged_engine.execution.sampling import SampledToken, TokenLogprob
from paged_engine.generation import Output
from paged_engine.scheduling.sequence import FinishReason
from paged_engine.serving.contract import Contract
from paged_engine.serving.inputs import OUTPUTS
from paged_engine.serving.outputs import Response, ResponseAssembler
from paged_engine.serving.sources import RawRequest

NUMPY_TYPES = {
    "TYPE_STRING": np.object_,
    "TYPE_UINT32": np.uint32,
    "TYPE_INT32": np.int32,
    "TYPE_FP32": np.float32,
}
EVERYTHING: dict[str, Any] = {
    f"return_{item.name}": True for item in OUTPUTS if item.name not in ("text_output", "prompt_logprobs")
} | {"prompt_logprobs": 1}


def assembler(prompt_text: str = "", **tensors: Any) -> ResponseAssembler:
    raw = RawRequest({"text_input": [b"hi"], **{name: [value] for name, value in tensors.items()}})
    parsed = Contract(EngineConfig(model="unused"), frozenset()).parse(raw, "7")
    return ResponseAssembler(
        parsed, num_prompt_tokens=4, prompt_text=prompt_text, decode_token=lambda token: f"<{token}>"
    )


def output(text: str = "", *token_ids: int, index: int = 0, **more: Any) -> Output:
    return Output("7", index, num_prompt_tokens=4, text=text, token_ids=token_ids, **more)


def values(response: Response | None) -> dict[str, list[Any]]:
    assert response is not None
    return {
        name: [item.decode() if isinstance(item, bytes) else item for item in array.tolist()]
        for name, array in response.tensors.items()
    }


def test_only_what_was_asked_for_is_sent() -> None:
    last = output("a", 1, finish_reason=FinishReason.STOP)
    assert values(assembler().add([last])) == {"text_output": ["a"]}
    assert values(assembler(return_token_ids=True).add([last])) == {"text_output": ["a"], "token_ids": [1]}


@pytest.mark.parametrize("n", [1, 3])
def test_types_and_shapes_are_those_declared(n: int) -> None:
    wanted = assembler(n=n, logprobs=0, **EVERYTHING)
    token = SampledToken(1, -0.5, 1)
    last = {"finish_reason": FinishReason.LENGTH, "logprobs": (token,), "cumulative_logprob": -0.5}
    first, *others = [output("a", 1, index=index, **last) for index in range(n)]
    response = wanted.add([output(prompt_logprobs=(token,)), first, *others])
    assert response is not None
    assert list(response.tensors) == [item.name for item in OUTPUTS]
    for item in OUTPUTS:
        array = response.tensors[item.name]
        assert array.dtype == NUMPY_TYPES[item.datatype]
        assert array.shape == ((n,) if item.is_list else (1,))


def test_streamed_counts_and_ids_are_those_since_the_response_before() -> None:
    stream = assembler(
        stream=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
        return_token_ids=True,
        return_num_input_tokens=True,
    )
    assert values(stream.add([output("a", 1)])) == {
        "text_output": ["a"],
        "finish_reason": ["None"],
        "num_input_tokens": [4],
        "num_output_tokens": [1],
        "token_ids": [1],
    }
    assert stream.add([output("", 2)]) is None
    assert stream.add([output("", 3)]) is None
    last = stream.add([output("bcd", 4, finish_reason=FinishReason.STOP)])
    assert last is not None
    assert last.is_final
    assert values(last)["token_ids"] == [2, 3, 4]
    assert values(last)["num_output_tokens"] == [3]
    assert values(last)["finish_reason"] == ["stop"]


@pytest.mark.parametrize("at_end", [False, True])
def test_what_is_the_same_in_every_response_can_be_left_to_the_last(at_end: bool) -> None:
    stream = assembler(
        stream=True,
        n=2,
        return_at_end=at_end,
        return_finish_reason=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    first = stream.add([output("a", 1), output("b", 2, index=1, finish_reason=FinishReason.STOP)])
    repeated = {} if at_end else {"finish_reason": ["None", "stop"], "num_input_tokens": [4]}
    assert values(first) == {"text_output": ["a", "b"], "num_output_tokens": [1, 1], **repeated}
    assert values(stream.add([output("c", 3, finish_reason=FinishReason.LENGTH)])) == {
        "text_output": ["c", ""],
        "num_output_tokens": [1, 0],
        "finish_reason": ["length", "stop"],
        "num_input_tokens": [4],
    }


def test_an_array_that_is_the_one_of_the_response_before_has_its_content() -> None:
    stream = assembler(stream=True, return_finish_reason=True, return_num_output_tokens=True)
    responses = [stream.add([output(text, *range(len(text)))]) for text in ("a", "b", "cd", "ef")]
    arrays = [response.tensors for response in responses if response is not None]
    contents = [values(response) for response in responses]
    assert [content["num_output_tokens"] for content in contents] == [[1], [1], [2], [2]]
    assert arrays[0]["num_output_tokens"] is arrays[1]["num_output_tokens"]
    assert arrays[0]["finish_reason"] is arrays[3]["finish_reason"]


def test_without_streaming_everything_is_in_one_response() -> None:
    whole = assembler(return_num_output_tokens=True, return_token_ids=True)
    assert whole.add([output("a", 1)]) is None
    response = whole.add([output("b", 2, finish_reason=FinishReason.LENGTH)])
    assert values(response) == {"text_output": ["ab"], "num_output_tokens": [2], "token_ids": [1, 2]}


def test_a_last_response_is_sent_even_without_text() -> None:
    response = assembler(stream=True).add([output("", 0, finish_reason=FinishReason.STOP)])
    assert response is not None
    assert response.is_final
    assert values(response)["text_output"] == [""]


def test_several_sequences_share_responses_and_the_last_to_end_makes_it_final() -> None:
    stream = assembler(
        stream=True, n=2, return_finish_reason=True, return_num_output_tokens=True, return_token_ids=True
    )
    first = stream.add([output("a", 1), output("x", 9, index=1, finish_reason=FinishReason.STOP)])
    assert values(first) == {
        "text_output": ["a", "x"],
        "finish_reason": ["None", "stop"],
        "num_output_tokens": [1, 1],
        "token_ids": [1, 9],
    }
    assert first is not None
    assert not first.is_final
    last = stream.add([output("b", 2, finish_reason=FinishReason.LENGTH)])
    assert last is not None
    assert last.is_final
    assert values(last) == {
        "text_output": ["b", ""],
        "finish_reason": ["length", "stop"],
        "num_output_tokens": [1, 0],
        "token_ids": [2],
    }


def test_the_prompt_stands_in_front_of_each_sequence_once() -> None:
    whole = assembler("hi ", n=2)
    assert whole.add([output("a"), output("b", index=1)]) is None
    last: dict[str, Any] = {"finish_reason": FinishReason.STOP}
    assert values(whole.add([output("c", **last), output("d", index=1, **last)]))["text_output"] == [
        "hi ac",
        "hi bd",
    ]


def test_an_error_is_final_and_carries_no_text() -> None:
    error = RequestError.internal("broken")
    response = assembler(stream=True).add([output("a", 1), output(error=error)])
    assert response == Response(error=error, is_final=True)


def test_logprobs_are_strict_json_in_vllm_s_format() -> None:
    whole = assembler(logprobs=2, return_logprobs=True)
    tokens = (
        SampledToken(5, -1.5, 3, (TokenLogprob(8, -0.25, 1), TokenLogprob(9, -math.inf, 2))),
        SampledToken(8, -0.25, 1, (TokenLogprob(8, -0.25, 1),)),
    )
    response = whole.add([output("ab", 5, 8, logprobs=tokens, finish_reason=FinishReason.STOP)])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    assert json.loads(values(response)["logprobs"][0], parse_constant=refuse) == [
        {
            "5": {"logprob": -1.5, "rank": 3, "decoded_token": "<5>"},
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": "<8>"},
            "9": {"logprob": -9999.0, "rank": 2, "decoded_token": "<9>"},
        },
        {"8": {"logprob": -0.25, "rank": 1, "decoded_token": "<8>"}},
    ]


def test_logprobs_that_were_not_computed_are_null() -> None:
    whole = assembler(return_logprobs=True, return_cumulative_logprob=True)
    token = SampledToken(5, -1.5, 1)
    last = output("a", 5, logprobs=(token,), cumulative_logprob=-1.5, finish_reason=FinishReason.STOP)
    got = values(whole.add([last]))
    assert got["logprobs"] == ["null"]
    assert got["cumulative_logprob"] == [-1.5]


def test_the_cumulative_logprob_is_finite() -> None:
    whole = assembler(return_cumulative_logprob=True)
    last = output("a", 5, cumulative_logprob=-math.inf, finish_reason=FinishReason.STOP)
    assert math.isfinite(values(whole.add([last]))["cumulative_logprob"][0])


PROMPT_TOKENS = (SampledToken(8, -1.5, 2, (TokenLogprob(9, -0.5, 1),)), SampledToken(7, -math.inf, 9))
PROMPT_JSON = [
    None,
    {
        "8": {"logprob": -1.5, "rank": 2, "decoded_token": "<8>"},
        "9": {"logprob": -0.5, "rank": 1, "decoded_token": "<9>"},
    },
    {"7": {"logprob": -9999.0, "rank": 9, "decoded_token": "<7>"}},
]


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_logprobs_are_in_the_first_response_only(stream: bool) -> None:
    wanted = assembler(prompt_logprobs=1, stream=stream)
    responses = [
        wanted.add([output(prompt_logprobs=PROMPT_TOKENS[:1])]),
        wanted.add(
            [output(prompt_logprobs=PROMPT_TOKENS[1:]), output("", 1)]
        ),  # half a character: no text yet
        wanted.add([output("a", 2)]),
        wanted.add([output("b", 3, finish_reason=FinishReason.STOP)]),
    ]
    sent = [values(response) for response in responses if response is not None]
    assert len(sent) == (2 if stream else 1)
    assert json.loads(sent[0]["prompt_logprobs"][0]) == PROMPT_JSON
    assert all("prompt_logprobs" not in response for response in sent[1:])


def test_no_sequence_answers_before_the_prompt_logprobs_are_known() -> None:
    wanted = assembler(prompt_logprobs=1, stream=True, n=2)
    assert wanted.add([output(prompt_logprobs=PROMPT_TOKENS[:1]), output("x", 1, index=1)]) is None
    response = wanted.add(
        [output(prompt_logprobs=PROMPT_TOKENS[1:]), output("a", 1), output("y", 2, index=1)]
    )
    assert values(response)["text_output"] == ["a", "xy"]
    assert json.loads(values(response)["prompt_logprobs"][0]) == PROMPT_JSON


def test_prompt_logprobs_of_a_prompt_of_one_token_and_of_one_that_was_not_computed() -> None:
    last = output("a", 1, finish_reason=FinishReason.STOP)
    assert values(assembler(prompt_logprobs=1).add([last]))["prompt_logprobs"] == ["[null]"]
    last = output(finish_reason=FinishReason.TIMEOUT)
    too_soon = assembler(prompt_logprobs=1)
    assert too_soon.add([output(prompt_logprobs=PROMPT_TOKENS[:1])]) is None
    assert values(too_soon.add([last]))["prompt_logprobs"] == ["null"]
