"""truncate_prompt_tokens: what is left of a prompt of each kind, and how much `-1` leaves."""

from __future__ import annotations

from typing import Any

import pytest
from sample_tokenizers import SampleTokenizer

from paged_engine.admission import Admission
from paged_engine.config import EngineConfig
from paged_engine.errors import ErrorCode, RequestError
from paged_engine.guided import GrammarCompiler
from paged_engine.request import Chat, GenerateRequest, Prompt, SamplingParams

TEXT = "The quick brown fox jumps over the lazy dog."
CHAT = Chat([{"role": "user", "content": TEXT}])


def kept(
    tokenizer: SampleTokenizer, prompt: Prompt, config: dict[str, Any] | None = None, **controls: Any
) -> list[int]:
    """The prompt that would be computed."""
    limits = EngineConfig(model="none", num_pages=100, **{"max_seq_len": 128, **(config or {})})
    admission = Admission(
        limits,
        tokenizer,
        vocab_size=1000,
        eos_token_ids=frozenset(),
        grammars=GrammarCompiler(tokenizer.hf_tokenizer, 1000, frozenset()),
        sampling_defaults={},
    )
    prepared = admission.prepare(GenerateRequest("r", prompt, SamplingParams.parse(controls)))
    return prepared.sequences[0].token_ids.tolist()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_last_tokens_are_kept(byte_level: SampleTokenizer, count: int) -> None:
    whole = byte_level.encode(TEXT)
    assert kept(byte_level, TEXT, truncate_prompt_tokens=count) == whole[-count:]
    assert kept(byte_level, whole, truncate_prompt_tokens=count) == whole[-count:]


def test_a_shorter_prompt_is_kept_whole(byte_level: SampleTokenizer) -> None:
    whole = byte_level.encode(TEXT)
    for count in (len(whole), len(whole) + 1, 2**63 - 1, -1):
        assert kept(byte_level, TEXT, truncate_prompt_tokens=count) == whole
    assert kept(byte_level, TEXT) == whole


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_text_and_a_conversation_keep_their_bos_and_ids_are_cut_as_they_are(
    llama: SampleTokenizer, count: int
) -> None:
    text, chat = llama.encode(TEXT), llama.render_chat(CHAT.messages)
    bos = llama.bos_token_id
    assert text[0] == chat[0] == bos
    for prompt, whole in ((TEXT, text), (CHAT, chat)):
        assert kept(llama, prompt, truncate_prompt_tokens=count) == [bos, *whole[len(whole) - count + 1 :]]
    assert kept(llama, text, truncate_prompt_tokens=count) == text[-count:]


@pytest.mark.parametrize(
    ("config", "controls", "expected"),
    [
        ({}, {"max_tokens": 100}, 28),
        ({}, {"max_tokens": 1}, 127),
        ({}, {}, 64),  # the default of 256 is more than half of what there is
        ({"default_max_tokens": 20}, {}, 108),
        ({"enable_chunked_prefill": False, "max_num_tokens": 70}, {"max_tokens": 1}, 70),
    ],
)
def test_minus_one_leaves_room_for_the_answer(
    byte_level: SampleTokenizer, config: dict[str, Any], controls: dict[str, Any], expected: int
) -> None:
    token_ids = list(range(5, 305))
    assert kept(byte_level, token_ids, config, truncate_prompt_tokens=-1, **controls) == token_ids[-expected:]


def test_a_prompt_that_is_too_long_for_all_that_is_refused(byte_level: SampleTokenizer) -> None:
    for controls, message in (
        ({"truncate_prompt_tokens": 128}, "prompt too long: it has 128 tokens, at most 127"),
        (
            {"truncate_prompt_tokens": -1, "max_tokens": 128},
            "truncate_prompt_tokens must be a whole number >= 1 where max_tokens = 128 leaves nothing of "
            "max_seq_len = 128 for a prompt, got -1",
        ),
    ):
        with pytest.raises(RequestError, match=message) as caught:
            kept(byte_level, list(range(5, 305)), **controls)
        assert caught.value.code is ErrorCode.INVALID_ARG
