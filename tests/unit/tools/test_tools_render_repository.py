"""The temporary copy of a model repository: what is set in it, what is left alone, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from paged_engine.tools.render_repository import (
    RepositoryError,
    parse_parameters,
    render_repository,
    server_arguments,
    set_parameters,
)

CONFIG = """
# a comment with "quotes" and { braces
name: "llm"
backend: "python"
model_transaction_policy { decoupled: true }
parameters { key: "model" value { string_value: "${MODEL}" } }  # after the value
parameters: { key: "page_size" value: { string_value: "16" } }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_model(tmp_path / "repository", "llm")


def make_model(repository: Path, name: str, config: str = CONFIG) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("# the model\n")
    (repository / name / "config.pbtxt").write_text(config)
    return repository


def parameters_in(repository: Path, name: str = "llm") -> dict[str, str]:
    config = text_format.Parse((repository / name / "config.pbtxt").read_text(), ModelConfig())
    return {key: value.string_value for key, value in config.parameters.items()}


def test_parameters_are_set_in_the_copy_and_the_original_stays(repository: Path, tmp_path: Path) -> None:
    awkward = 'a "quoted" \\ value\nwith ü'
    name = render_repository(repository, tmp_path / "copy", {"page_size": "32", "dtype": awkward}, "/default")

    assert name == "llm"
    assert parameters_in(tmp_path / "copy") == {"model": "/default", "page_size": "32", "dtype": awkward}
    assert (repository / "llm" / "config.pbtxt").read_text() == CONFIG
    assert (tmp_path / "copy" / "llm" / "1" / "model.py").read_text() == "# the model\n"


@pytest.mark.parametrize(
    ("configured", "given", "expected"),
    [
        ("", {}, "/default"),
        ("${MODEL}", {}, "/default"),
        ("/configured", {}, "/configured"),
        ("/configured", {"model": "/given"}, "/given"),
        ("${MODEL}", {"model": "/given"}, "/given"),
    ],
)
def test_which_model_is_served(tmp_path: Path, configured: str, given: dict[str, str], expected: str) -> None:
    repository = make_model(tmp_path / "repository", "llm", CONFIG.replace("${MODEL}", configured))
    render_repository(repository, tmp_path / "copy", given, "/default")
    assert parameters_in(tmp_path / "copy")["model"] == expected


def test_the_rest_of_the_config_survives(repository: Path, tmp_path: Path) -> None:
    render_repository(repository, tmp_path / "copy", {"page_size": "32"})
    config = text_format.Parse((tmp_path / "copy" / "llm" / "config.pbtxt").read_text(), ModelConfig())
    assert config.model_transaction_policy.decoupled
    assert config.backend == "python"


def test_the_repository_of_this_project_can_be_rendered(tmp_path: Path) -> None:
    render_repository(
        Path(__file__).parents[3] / "model_repository", tmp_path / "copy", {"page_size": "8"}, "/model"
    )
    parameters = parameters_in(tmp_path / "copy")
    assert (parameters["model"], parameters["page_size"]) == ("/model", "8")


def test_parameters_of_a_copy_can_be_changed_again(repository: Path, tmp_path: Path) -> None:
    render_repository(repository, tmp_path / "copy", {"page_size": "32"})
    set_parameters(tmp_path / "copy" / "llm", {"page_size": "64"})
    assert parameters_in(tmp_path / "copy")["page_size"] == "64"
    assert (repository / "llm" / "config.pbtxt").read_text() == CONFIG


def test_compiled_files_are_not_copied(repository: Path, tmp_path: Path) -> None:
    cache = repository / "llm" / "1" / "__pycache__"
    cache.mkdir()
    render_repository(repository, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy" / "llm" / "1").iterdir()] == ["model.py"]


def test_the_only_model_is_taken_whatever_its_name(tmp_path: Path) -> None:
    repository = make_model(tmp_path / "repository", "mine", CONFIG.replace('"llm"', '"mine"'))
    assert render_repository(repository, tmp_path / "copy", {"page_size": "8"}) == "mine"
    assert parameters_in(tmp_path / "copy", "mine")["page_size"] == "8"


def test_of_several_models_llm_is_taken(repository: Path, tmp_path: Path) -> None:
    make_model(repository, "another")
    assert render_repository(repository, tmp_path / "copy", {"page_size": "8"}) == "llm"
    assert parameters_in(tmp_path / "copy", "another")["page_size"] == "16"


def test_no_repository(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"no model repository at .*nowhere"):
        render_repository(tmp_path / "nowhere", tmp_path / "copy")


def test_a_folder_without_models(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RepositoryError, match=r"config\.pbtxt"):
        render_repository(tmp_path / "empty", tmp_path / "copy")


def test_several_models_without_llm(tmp_path: Path) -> None:
    make_model(tmp_path / "repository", "one")
    make_model(tmp_path / "repository", "two")
    with pytest.raises(RepositoryError, match="one, two"):
        render_repository(tmp_path / "repository", tmp_path / "copy")


def test_a_config_that_does_not_parse(tmp_path: Path) -> None:
    repository = make_model(tmp_path / "repository", "llm", 'name: "llm"\nno_such_field: 1\n')
    with pytest.raises(RepositoryError, match=r"repository/llm/config\.pbtxt.*no_such_field"):
        render_repository(repository, tmp_path / "copy")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  page_size=32   max_num_tokens=512 ", {"page_size": "32", "max_num_tokens": "512"}),
        ("model='/with a space/model' tokenizer=", {"model": "/with a space/model", "tokenizer": ""}),
        ("a=b=c", {"a": "b=c"}),
    ],
)
def test_parameters_are_read_like_words_of_a_shell(text: str, expected: dict[str, str]) -> None:
    assert parse_parameters(text) == expected


@pytest.mark.parametrize("text", ["page_size", "=3", "page_size = 3", "a='b", json.dumps({"a": 1})])
def test_parameters_that_are_not_key_value(text: str) -> None:
    with pytest.raises(RepositoryError, match="parameters"):
        parse_parameters(text)


def test_the_server_is_tuned_to_the_model_only_where_it_is_alone(repository: Path) -> None:
    assert server_arguments(repository) == ["--backend-config=python,thread-pool-size=1"]
    make_model(repository, "another")
    assert server_arguments(repository) == []


def test_a_model_without_a_configuration_is_no_less_a_model(repository: Path) -> None:
    make_model(repository, "another")
    (repository / "another/config.pbtxt").unlink()
    assert server_arguments(repository) == []
