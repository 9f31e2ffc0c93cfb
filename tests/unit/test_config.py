"""EngineConfig: what an operator may write in config.pbtxt, and what is refused in which words."""

import subprocess
import sys

import pytest

from paged_engine.config import EngineConfig
from paged_engine.errors import ConfigurationError


def parameters(**overrides: str) -> dict[str, str]:
    return {"model": "some/folder", **overrides}


@pytest.mark.parametrize("value", ["True", "true", "1", "TRUE", " true "])
def test_true_is_written_in_several_ways(value: str) -> None:
    assert EngineConfig.from_parameters(parameters(trust_remote_code=value)).trust_remote_code is True


@pytest.mark.parametrize("value", ["False", "false", "0"])
def test_false_is_written_in_several_ways(value: str) -> None:
    assert (
        EngineConfig.from_parameters(parameters(enable_chunked_prefill=value)).enable_chunked_prefill is False
    )


@pytest.mark.parametrize("value", ["yes", "maybe", "2", "on", "1.0"])
def test_other_words_are_no_booleans(value: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"enable_chunked_prefill must be true or false, got {value}"
    ):
        EngineConfig.from_parameters(parameters(enable_chunked_prefill=value))


@pytest.mark.parametrize("value", ["", "   ", "${PAGE_SIZE}"])
def test_empty_and_unexpanded_values_mean_unset(value: str) -> None:
    assert EngineConfig.from_parameters(parameters(page_size=value)).page_size == 16


@pytest.mark.parametrize(
    "value", ["0", "-1", "16.0", "1e3", "sixteen", "0x10", "1_000", "99999999999999999999999"]
)
def test_a_bad_page_size_names_key_value_and_range(value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_parameters(parameters(page_size=value))
    assert str(caught.value) == f"page_size must be a whole number from 1 to 1024, got {value}"


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("page_sze", "page_size"),
        ("max_tokens", "max_num_tokens"),
        ("max_num_batched_tokens", "max_num_tokens"),
        ("max_model_len", "max_seq_len"),
        ("batch_size", "max_batch_size"),
        ("enable_chunked_context", "enable_chunked_prefill"),
        ("kv_cache_free_gpu_mem_fraction", "kv_cache_memory_fraction"),
        ("num-pages", "num_pages"),
        ("ENABLE_CHUNKED_PREFILL", "enable_chunked_prefill"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, suggestion: str) -> None:
    with pytest.raises(ConfigurationError, match=f"unknown parameter '{key}'; did you mean '{suggestion}'"):
        EngineConfig.from_parameters(parameters(**{key: "1"}))


@pytest.mark.parametrize(
    "key",
    ["chunk_sze", "swap_space", "decoupled_mode", "log_level", "lora", "port", "quantization"],
)
def test_a_key_that_is_like_no_other_gets_no_suggestion(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_parameters(parameters(**{key: "1"}))
    assert str(caught.value) == f"unknown parameter '{key}'"


def test_an_unknown_key_is_refused_even_when_unset() -> None:
    with pytest.raises(ConfigurationError, match="chunk_sze"):
        EngineConfig.from_parameters(parameters(chunk_sze=""))


@pytest.mark.parametrize(
    ("overrides", "floor"),
    [
        ({"page_size": "512", "max_num_tokens": "512"}, "max(512, 64) = 512, got 512"),
        ({"max_batch_size": "64", "max_num_tokens": "64"}, "max(16, 64) = 64, got 64"),
        ({"max_batch_size": "4096", "max_num_tokens": "2048"}, "max(16, 4096) = 4096, got 2048"),
    ],
)
def test_a_step_must_hold_more_than_a_page_and_a_token_per_sequence(
    overrides: dict[str, str], floor: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_parameters(parameters(**overrides))
    assert "max_num_tokens must be greater than max(page_size, max_batch_size)" in str(caught.value)
    assert floor in str(caught.value)


def test_one_token_more_than_the_floor_is_enough() -> None:
    config = EngineConfig.from_parameters(
        parameters(page_size="16", max_batch_size="32", max_num_tokens="33")
    )
    assert config.max_num_tokens == 33


def test_a_sequence_must_have_room_for_an_answer() -> None:
    with pytest.raises(ConfigurationError, match=r"max_seq_len must be at least 2, .*, got 1"):
        EngineConfig.from_parameters(parameters(max_seq_len="1"))
    assert EngineConfig.from_parameters(parameters(max_seq_len="2")).max_seq_len == 2


def test_a_model_is_required() -> None:
    with pytest.raises(ConfigurationError, match="model must be the path of a checkpoint"):
        EngineConfig.from_parameters({"model": "${MODEL}"})


@pytest.mark.parametrize("value", ["0", "1.5", "nan", "inf", "-0.1", "half"])
def test_a_memory_fraction_lies_between_nought_and_one(value: str) -> None:
    with pytest.raises(ConfigurationError, match="kv_cache_memory_fraction must be a number in"):
        EngineConfig.from_parameters(parameters(kv_cache_memory_fraction=value))


def test_tensor_parallelism_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel_size must be 1"):
        EngineConfig.from_parameters(parameters(tensor_parallel_size="2"))


@pytest.mark.parametrize("device", ["cuda:", "gpu", "cuda:x", "cpu:0"])
def test_a_device_has_a_known_form(device: str) -> None:
    with pytest.raises(ConfigurationError, match="device must be auto, cpu, cuda or cuda:N"):
        EngineConfig.from_parameters(parameters(device=device))


def test_every_field_says_what_it_accepts() -> None:
    assert [name for name, field in EngineConfig.model_fields.items() if not field.description] == []


def test_the_layers_below_execution_import_no_torch() -> None:
    modules = (
        "paged_engine.config, paged_engine.request, paged_engine.admission, paged_engine.scheduling.scheduler"
    )
    code = f"import sys; sys.path[:] = {sys.path!r}; import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("overrides", "device_type", "expected"),
    [
        ({}, "cpu", 512),
        ({}, "cuda", 2048),
        ({"enable_chunked_prefill": "false"}, "cpu", 2048),
        ({"max_batch_size": "1000"}, "cpu", 2000),
        ({"page_size": "512"}, "cpu", 1024),
        ({"max_num_tokens": "300"}, "cpu", 300),
        ({"max_num_tokens": "300"}, "cuda", 300),
    ],
)
def test_tokens_in_a_step_fit_the_device_where_none_are_given(
    overrides: dict[str, str], device_type: str, expected: int
) -> None:
    config = EngineConfig.from_parameters(parameters(**overrides)).fitted_to(device_type)
    assert config.max_num_tokens == expected
    assert EngineConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("value", "device_type", "expected"),
    [
        ("", "cuda", True),
        ("auto", "cuda", True),
        ("auto", "cpu", False),
        ("true", "cpu", True),
        ("False", "cuda", False),
    ],
)
def test_looking_ahead_is_for_gpus_where_nobody_says_otherwise(
    value: str, device_type: str, expected: bool
) -> None:
    config = EngineConfig.from_parameters(parameters(look_ahead=value)).fitted_to(device_type)
    assert config.look_ahead is expected
    assert EngineConfig.model_validate(config.model_dump()) == config


def test_looking_ahead_is_a_matter_of_three_words() -> None:
    with pytest.raises(ConfigurationError, match=r"^look_ahead must be auto, true or false, got 2$"):
        EngineConfig.from_parameters(parameters(look_ahead="2"))
