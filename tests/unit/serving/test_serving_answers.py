"""The service between Triton and the engine: which responses a request gets."""

from __future__ import annotations

from typing import Any

import pytest
from serving_harness import ALPHABET, Serve, wait_until

from paged_engine.serving.sources import RawRequest


def test_without_streaming_there_is_exactly_one_response(serve: Serve) -> None:
    answer = serve().ask(return_finish_reason=True).wait()
    assert len(answer.responses) == 1
    assert answer.text == ALPHABET
    assert answer.finish_reason == "stop"


def test_streaming_sends_a_response_for_each_step_that_has_text_and_final_rides_on_the_last(
    serve: Serve,
) -> None:
    answer = serve().ask(stream=True, max_tokens=5, return_finish_reason=True).wait()
    assert answer.texts == ["a", "b", "c", "d", "e"]
    assert [response.is_final for response in answer.responses] == [False] * 4 + [True]
    assert answer.finish_reason == "length"


def test_steps_that_show_no_text_send_nothing(serve: Serve) -> None:
    answer = serve().ask(stream=True, max_tokens=6, stop=[b"cdx"]).wait()
    assert answer.texts == ["a", "b", "cde", "f"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_at_the_first_token_is_one_empty_response(serve: Serve, stream: bool) -> None:
    answer = serve().ask(stream=stream, stop=[b"a"], return_finish_reason=True).wait()
    assert len(answer.responses) == 1
    assert answer.texts == [""]
    assert answer.finish_reason == "stop"


def test_sixteen_streams_at_once_each_equal_the_lone_one(serve: Serve) -> None:
    served = serve()
    answers = [served.ask(stream=True) for _ in range(16)]
    assert {answer.wait().text for answer in answers} == {ALPHABET}
    served.assert_clean()


@pytest.mark.parametrize("stream", [False, True])
def test_looking_ahead_changes_no_answer(serve: Serve, stream: bool) -> None:
    """Ends at a token, at a string and at the length, several sequences, one that is cancelled, and then an empty house."""
    ways = [{"max_tokens": 7}, {"stop": [b"cd"]}, {"n": 3, "max_tokens": 4}, {"max_tokens": 60}, {}]
    texts = []
    for look_ahead in (False, True):
        served = serve(look_ahead=look_ahead)
        answers = [served.ask(stream=stream, return_finish_reason=True, **way) for way in ways]
        texts.append([(answer.wait().text, answer.finish_reason) for answer in answers])
        wait_until(lambda served=served: served.engine.statistics().num_running == 0)
        served.engine.check_integrity()
        assert served.engine.statistics().num_pages_used == 0
    assert texts[0] == texts[1]


def test_several_sequences_answer_together(serve: Serve) -> None:
    answer = serve().ask(n=3, max_tokens=2, return_num_output_tokens=True).wait()
    tensors = answer.responses[0].tensors
    assert list(tensors["text_output"]) == [b"ab"] * 3
    assert tensors["num_output_tokens"].tolist() == [2, 2, 2]


def test_the_prompt_stands_in_front_of_the_text_where_it_is_wanted(serve: Serve) -> None:
    served = serve()
    assert served.ask("hi ", exclude_input_in_output=False, max_tokens=1).wait().text == "hi a"
    ids = RawRequest(
        {"input_ids": [104, 105], "exclude_input_in_output": [False], "max_tokens": [1], "n": [2]}
    )
    assert list(served.ask_raw(ids).wait().responses[0].tensors["text_output"]) == [b"hia", b"hia"]
    messages: dict[str, Any] = {
        "messages": [b'[{"role": "user", "content": "yo"}]'],
        "exclude_input_in_output": [False],
    }
    assert served.ask_raw(RawRequest(messages)).wait().text == "<user>yo" + ALPHABET


def test_a_parameter_of_the_model_decides_where_a_request_does_not(serve: Serve) -> None:
    served = serve(exclude_input_in_output=False)
    assert served.ask("hi ", max_tokens=1).wait().text == "hi a"
    assert served.ask("hi ", max_tokens=1, stream=True).wait().text == "a"
    assert served.ask("hi ", max_tokens=1, exclude_input_in_output=True).wait().text == "a"
