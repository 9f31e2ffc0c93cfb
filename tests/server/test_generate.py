"""What one request brings: the text, the same by every way there is; and all that can be asked for besides it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from triton_server import TritonServer
from wire import Answer, GrpcStream, at_once, generate, generate_stream, grpc_infer, is_final

from paged_client import AsyncClient, Client, Message

GREEDY = {"temperature": 0.0}
QUESTION: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
EVERYTHING = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": True,
}
ONLY_END_TOKEN = {"sampling_parameters": json.dumps({"logit_bias": {"2": 100}})}
"""Makes the end-of-sequence token, 2, the first one generated."""

WAYS: dict[str, Callable[[TritonServer, dict[str, Any]], Answer]] = {
    "generate": generate,
    "generate_stream": lambda server, fields: generate_stream(server, {**fields, "stream": True}),
    "generate_stream, not streaming": generate_stream,
    "gRPC": grpc_infer,
    "gRPC, streaming": lambda server, fields: grpc_infer(server, {**fields, "stream": True}),
}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


async def test_capital_of_france_by_every_way(server):
    fields = {"messages": json.dumps(QUESTION), "max_tokens": 16, **GREEDY}
    texts = {name: send(server, fields).checked().text for name, send in WAYS.items()}
    options = {"max_tokens": 16, **GREEDY}
    for url in (f"grpc://{server.grpc_url}", f"http://{server.http_url}"):
        with Client(url) as client:
            texts[f"Client.generate, {url}"] = client.generate(QUESTION, **options).text
            texts[f"Client.stream, {url}"] = "".join(
                delta.text for delta in client.stream(QUESTION, **options)
            )
        async with AsyncClient(url) as client:
            texts[f"AsyncClient.generate, {url}"] = (await client.generate(QUESTION, **options)).text
            texts[f"AsyncClient.stream, {url}"] = "".join(
                [delta.text async for delta in client.stream(QUESTION, **options)]
            )
    assert set(texts.values()) == {texts["generate"]}, texts
    assert "Paris" in texts["generate"]


@pytest.mark.parametrize(
    "prompt",
    ["Once upon a time", "聪明 😀 👨\u200d👩\u200d👧 ď! 聪明 😀 👨\u200d👩\u200d👧", "def add(a, b):\n    "],
)
def test_deltas_join_to_the_whole_text(server, tokenizer, prompt):
    fields = {"text_input": prompt, "max_tokens": 24, **GREEDY, **EVERYTHING}
    whole = generate(server, fields).checked()
    assert len(whole.responses) == 1
    assert whole.text == tokenizer.decode(whole.joined("token_ids"), skip_special_tokens=True)
    for name in ("generate_stream", "gRPC, streaming"):
        streamed = WAYS[name](server, fields).checked()
        assert streamed.text == whole.text
        assert streamed.joined("token_ids") == whole.joined("token_ids")
        assert sum(streamed.joined("num_output_tokens")) == len(whole.joined("token_ids"))
        assert len(streamed.responses) > 1


@pytest.mark.parametrize("seed", [1, 2])
def test_deltas_join_to_the_whole_text_of_random_tokens(tiny_server, tokenizer, seed):
    """The tiny model at a temperature says anything, broken characters included."""
    fields = {"text_input": "x", "max_tokens": 200, "ignore_eos": True, "seed": seed, **EVERYTHING}
    whole = generate(tiny_server, fields).checked()
    token_ids = whole.joined("token_ids")
    assert len(token_ids) == 200 and len(set(token_ids)) > 100
    assert whole.text == tokenizer.decode(token_ids, skip_special_tokens=True)
    for name in ("generate_stream", "gRPC, streaming"):
        streamed = WAYS[name](tiny_server, fields).checked()
        assert streamed.text == whole.text
        assert streamed.joined("token_ids") == token_ids


@pytest.mark.parametrize(("model", "num_tokens"), [("server", 8), ("tiny_server", 64), ("ahead_server", 64)])
def test_16_concurrent_streams_equal_their_solo_runs(request, model, num_tokens):
    server = request.getfixturevalue(model)
    themes = ["tides", "a fox", "bread", "the year 1923", "prime numbers", "rain", "my grandmother", "iron"]
    requests = [
        {
            "text_input": f"{index}. " + f"Some words on {theme}, and then some more. " * (1 + index),
            "stream": True,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "logprobs": 2,
            "return_logprobs": True,
            "return_token_ids": True,
            **(GREEDY if index % 2 == 0 else {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": index}),
        }
        for index, theme in enumerate(themes * 2)
    ]
    together = at_once([partial(grpc_infer, server, fields) for fields in requests])
    for fields, answer in zip(requests, together, strict=True):
        assert_same(grpc_infer(server, fields).checked(), answer.checked())


def assert_same(solo: Answer, other: Answer) -> None:
    """Same tokens; from where the two best logits tie (to 1e-4) on, rounding may decide otherwise."""
    ours, theirs = solo.joined("token_ids"), other.joined("token_ids")
    if ours == theirs:
        assert solo.text == other.text
        return
    position = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    candidates = [entry for text in solo.joined("logprobs") for entry in json.loads(text)][position]
    best = sorted((value["logprob"] for value in candidates.values()), reverse=True)
    assert best[0] - best[1] < 1e-4, f"token {position} is {theirs[position]}, alone {ours[position]}"


@pytest.mark.parametrize("stream", [None, False])
def test_generate_answers_with_exactly_one_json(tiny_server, stream):
    fields = {"text_input": "Hello", "max_tokens": 5, **GREEDY}
    answer = generate(tiny_server, fields if stream is None else {**fields, "stream": stream}).checked()
    assert answer.status == 200
    assert len(answer.responses) == 1


def test_generate_with_stream_true_is_tritons_own_error_and_leaves_nothing_behind(tiny_server):
    answer = generate(tiny_server, {"text_input": "Hello", "max_tokens": 5, "stream": True})
    assert answer.error is not None and "1 response" in answer.error


def test_the_last_response_is_marked_and_none_comes_after_it(tiny_server):
    """FINAL rides on the last response with text, and is never a response of its own."""
    for stream in (False, True):
        fields = {"text_input": "Hello", "max_tokens": 6, "ignore_eos": True, "stream": stream, "seed": 5}
        answer = grpc_infer(tiny_server, fields).checked()
        assert answer.final_flags == [False] * (len(answer.responses) - 1) + [True]
        assert all("text_output" in response for response in answer.responses)


def test_immediate_end_of_sequence_is_one_response_with_an_empty_text(tiny_server):
    fields = {"text_input": "Hello", "max_tokens": 5, **GREEDY, **ONLY_END_TOKEN, **EVERYTHING}
    for name, send in WAYS.items():
        answer = send(tiny_server, fields).checked()
        assert [response["text_output"] for response in answer.responses] == [[""]], name
        assert answer.joined("finish_reason") == ["stop"]
        assert answer.joined("num_output_tokens") == [len(answer.joined("token_ids"))]


def test_stop_string_in_the_first_token_is_one_response_with_an_empty_text(tiny_server):
    fields = {"text_input": "Hello there", "max_tokens": 8, **GREEDY, **EVERYTHING}
    first = generate(tiny_server, {**fields, "max_tokens": 1}).checked().text
    assert first
    for name, send in WAYS.items():
        answer = send(tiny_server, {**fields, "stop": [first]}).checked()
        assert [response["text_output"] for response in answer.responses] == [[""]], name
        assert answer.joined("finish_reason") == ["stop"]
        assert answer.joined("num_output_tokens") == [1]


def test_stop_string_over_several_tokens_never_leaks(server):
    fields = {"text_input": "The letters of the alphabet: A B C D E", "max_tokens": 16, **GREEDY}
    whole = generate(server, fields).checked().text
    assert " K L M" in whole
    before = whole[: whole.index(" K L M")]
    for name in ("generate", "generate_stream", "gRPC, streaming"):
        answer = WAYS[name](server, {**fields, "stop": [" K L M"], "return_finish_reason": True}).checked()
        assert answer.text == before
        assert answer.joined("finish_reason")[-1] == "stop"


def test_counts_and_finish_reasons(tiny_server):
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"max_tokens": 1}, 1, "length"),
        ({"max_tokens": 5, "ignore_eos": True}, 5, "length"),
        ({"max_tokens": 64, "ignore_eos": True}, 64, "length"),
        ({"max_tokens": 5, **ONLY_END_TOKEN}, 1, "stop"),
        ({"max_tokens": 3, "min_tokens": 3, **ONLY_END_TOKEN}, 3, "length"),
    ]
    for options, num_tokens, finish_reason in cases:
        for name, send in WAYS.items():
            answer = send(tiny_server, {"text_input": "Hello there", **GREEDY, **options, **EVERYTHING})
            case = f"{options} by {name}"
            assert sum(answer.checked().joined("num_output_tokens")) == num_tokens, case
            assert len(answer.joined("token_ids")) == num_tokens, case
            reasons = answer.joined("finish_reason")
            assert reasons == ["None"] * (len(answer.responses) - 1) + [finish_reason], case
            assert set(answer.joined("num_input_tokens")) == {2}, case


def test_outputs_have_the_declared_types_and_come_only_where_asked_for(tiny_server):
    asked = {
        **EVERYTHING,
        "logprobs": 1,
        "return_logprobs": True,
        "return_cumulative_logprob": True,
        "prompt_logprobs": 1,
    }
    for options, expected in (
        ({}, {"text_output": ("BYTES", [1])}),
        (dict.fromkeys(EVERYTHING, False), {"text_output": ("BYTES", [1])}),
        (
            asked,
            {
                "text_output": ("BYTES", [1]),
                "finish_reason": ("BYTES", [1]),
                "num_input_tokens": ("UINT32", [1]),
                "num_output_tokens": ("UINT32", [1]),
                "token_ids": ("INT32", [3]),
                "cumulative_logprob": ("FP32", [1]),
                "logprobs": ("BYTES", [1]),
                "prompt_logprobs": ("BYTES", [1]),
            },
        ),
        (
            {**asked, "n": 2},
            {
                "text_output": ("BYTES", [2]),
                "finish_reason": ("BYTES", [2]),
                "num_input_tokens": ("UINT32", [1]),
                "num_output_tokens": ("UINT32", [2]),
                "token_ids": ("INT32", [6]),
                "cumulative_logprob": ("FP32", [2]),
                "logprobs": ("BYTES", [2]),
                "prompt_logprobs": ("BYTES", [1]),
            },
        ),
    ):
        with GrpcStream(tiny_server) as stream:
            stream.send({"text_input": "Hello", "max_tokens": 3, "ignore_eos": True, **options})
            result, error = stream.next()
        assert error is None, str(error)
        assert is_final(result)
        outputs = result.get_response().outputs
        assert {output.name: (output.datatype, list(output.shape)) for output in outputs} == expected


@pytest.mark.parametrize("way", ["generate", "generate_stream", "gRPC, streaming"])
def test_logprobs(tiny_server, tokenizer, way):
    fields = {
        "text_input": "Hello there",
        "max_tokens": 12,
        "ignore_eos": True,
        "seed": 11,
        "logprobs": 2,
        "return_logprobs": True,
        "return_cumulative_logprob": True,
        **EVERYTHING,
    }
    answer = WAYS[way](tiny_server, fields).checked()
    total = 0.0
    for response in answer.responses:
        entries = json.loads(response["logprobs"][0])
        assert len(entries) == len(response["token_ids"]) == response["num_output_tokens"][0]
        for token_id, entry in zip(response["token_ids"], entries, strict=True):
            chosen = entry[str(token_id)]
            assert all(value.keys() == {"logprob", "rank", "decoded_token"} for value in entry.values())
            assert 2 <= len(entry) <= 3
            by_rank = sorted(entry.values(), key=lambda value: value["rank"])
            assert [value["rank"] for value in by_rank[:2]] == [1, 2]
            assert by_rank[0]["logprob"] >= by_rank[1]["logprob"] >= by_rank[-1]["logprob"]
            assert chosen["decoded_token"] == tokenizer.decode([token_id], skip_special_tokens=False)
            total += chosen["logprob"]
        assert response["cumulative_logprob"][0] == pytest.approx(total, rel=1e-5)
    assert sum(len(json.loads(text)) for text in answer.joined("logprobs")) == 12


@pytest.mark.parametrize("way", ["generate", "generate_stream", "gRPC, streaming"])
def test_prompt_logprobs(tiny_server, tokenizer, way):
    text = "Hello there"
    fields = {"text_input": text, "max_tokens": 12, "ignore_eos": True, "seed": 11, "prompt_logprobs": 2}
    answer = WAYS[way](tiny_server, fields).checked()
    first, *others = answer.responses
    assert not any("prompt_logprobs" in response for response in others)
    unknown, *entries = json.loads(first["prompt_logprobs"][0])
    assert unknown is None
    for token_id, entry in zip(tokenizer.encode(text).ids[1:], entries, strict=True):
        assert 2 <= len(entry) <= 3
        assert entry[str(token_id)]["decoded_token"] == tokenizer.decode([token_id])
        assert {1, 2} <= {value["rank"] for value in entry.values()}


def test_a_truncated_prompt_is_its_last_tokens(tiny_server, tokenizer):
    fields = {"max_tokens": 8, "temperature": 0, "return_num_input_tokens": True}
    token_ids = tokenizer.encode("Hello there, how is it going?").ids
    expected = generate(tiny_server, {**fields, "input_ids": token_ids[-5:]}).checked()
    for prompt in ({"text_input": "Hello there, how is it going?"}, {"input_ids": token_ids}):
        answer = generate(tiny_server, {**fields, **prompt, "truncate_prompt_tokens": 5}).checked()
        assert answer.responses == expected.responses


def test_logprobs_that_were_not_computed_are_null(tiny_server):
    answer = generate(tiny_server, {"text_input": "Hello", "max_tokens": 3, "return_logprobs": True})
    assert answer.checked().joined("logprobs") == ["null"]


@pytest.mark.parametrize("name", ["n", "num_return_sequences"])
def test_several_sequences(tiny_server, name):
    fields = {"text_input": "Hello", name: 3, "max_tokens": 10, "ignore_eos": True, "seed": 7, **EVERYTHING}
    whole = generate(tiny_server, fields).checked()
    assert len(set(whole.texts)) == 3, "sequences of one prompt differ"
    assert whole.joined("finish_reason") == ["length"] * 3
    assert whole.joined("num_output_tokens") == [10] * 3
    assert len(whole.joined("token_ids")) == 30
    for way in ("generate_stream", "gRPC, streaming"):
        streamed = WAYS[way](tiny_server, fields).checked()
        assert streamed.texts == whole.texts
        token_ids: list[list[int]] = [[], [], []]
        for response in streamed.responses:
            rest = list(response["token_ids"])
            for sequence, count in enumerate(response["num_output_tokens"]):
                token_ids[sequence] += rest[:count]
                del rest[:count]
            assert not rest
        assert sum(token_ids, []) == whole.joined("token_ids")


def test_prompt_as_token_ids(tiny_server, tokenizer):
    prompt = "Hello there, you"
    token_ids = tokenizer.encode(prompt).ids
    for way in WAYS.values():
        as_text = way(tiny_server, {"text_input": prompt, "max_tokens": 6, **GREEDY}).checked()
        as_ids = way(tiny_server, {"input_ids": token_ids, "max_tokens": 6, **GREEDY}).checked()
        assert as_ids.text == as_text.text
    single = generate(tiny_server, {"input_ids": token_ids[0], "max_tokens": 6, **GREEDY}).checked()
    assert single.text == generate(tiny_server, {"text_input": "Hello", "max_tokens": 6, **GREEDY}).text


def test_prompt_in_front_of_the_text(tiny_server, tokenizer):
    prompt = "Hello there"
    fields = {"max_tokens": 6, **GREEDY}
    text = generate(tiny_server, {"text_input": prompt, **fields}).checked().text
    for source in ({"text_input": prompt}, {"input_ids": tokenizer.encode(prompt).ids}):
        for send in (generate, grpc_infer):
            repeated = send(tiny_server, {**source, "exclude_input_in_output": False, **fields}).checked()
            assert repeated.text == prompt + text
            excluded = send(tiny_server, {**source, "exclude_input_in_output": True, **fields}).checked()
            assert excluded.text == text
    twice = generate(
        tiny_server, {"text_input": prompt, "exclude_input_in_output": False, "n": 2, **fields}
    ).checked()
    assert twice.texts == [prompt + text] * 2


def test_seed_fixes_the_text_and_without_one_it_differs(tiny_server):
    fields = {"text_input": "Hello", "max_tokens": 12, "ignore_eos": True}
    seeded = [
        send(tiny_server, {**fields, name: 42}).checked().text
        for name in ("seed", "random_seed")
        for send in (generate, grpc_infer)
    ]
    assert len(set(seeded)) == 1
    unseeded = at_once([lambda: generate(tiny_server, fields).checked().text for _ in range(8)])
    assert len(set(unseeded)) == 8


def test_largest_seed(tiny_server):
    fields = {"text_input": "Hello", "max_tokens": 6, "seed": 2**64 - 1}
    assert grpc_infer(tiny_server, fields).checked().text == grpc_infer(tiny_server, fields).checked().text
