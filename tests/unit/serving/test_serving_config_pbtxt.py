"""model_repository/llm/config.pbtxt declares what the engine reads, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from paged_engine.config import EngineConfig
from paged_engine.serving.inputs import INPUTS, OUTPUTS

CONFIG_FILE = Path(__file__).parents[3] / "model_repository" / "llm" / "config.pbtxt"


@pytest.fixture(scope="module")
def declared() -> ModelConfig:
    return text_format.Parse(CONFIG_FILE.read_text(encoding="utf-8"), ModelConfig())


def test_inputs_are_those_the_contract_knows(declared: ModelConfig) -> None:
    have = [
        (item.name, DataType.Name(item.data_type), list(item.dims), item.optional) for item in declared.input
    ]
    want = [(item.name, item.datatype, [-1 if item.is_list else 1], True) for item in INPUTS]
    assert sorted(have) == sorted(want)


def test_outputs_are_those_that_responses_are_made_of(declared: ModelConfig) -> None:
    have = [(item.name, DataType.Name(item.data_type), list(item.dims)) for item in declared.output]
    want = [(item.name, item.datatype, [-1 if item.is_list else 1]) for item in OUTPUTS]
    assert sorted(have) == sorted(want)


def test_parameters_are_those_of_the_engine_at_their_defaults(declared: ModelConfig) -> None:
    written = {key: value.string_value for key, value in declared.parameters.items()}
    assert written.keys() == EngineConfig.model_fields.keys()
    assert EngineConfig.from_parameters({**written, "model": "x"}) == EngineConfig(model="x")


def test_every_parameter_has_a_comment() -> None:
    lines = CONFIG_FILE.read_text(encoding="utf-8").splitlines()
    for before, line in itertools.pairwise(lines):
        if line.startswith("parameters {"):
            assert before.startswith("# "), line


def test_triton_makes_no_batches(declared: ModelConfig) -> None:
    assert declared.backend == "python"
    assert declared.max_batch_size == 0
    assert declared.model_transaction_policy.decoupled
    assert not declared.HasField("dynamic_batching")
