"""Makes the temporary copy of a model repository that a server is started on.

The repository a person edits is never written to: parameters for one run are set in the copy's config.pbtxt. It is
read and written as the protobuf message Triton defines (`ModelConfig`), so any legal config.pbtxt will do. The other
files are links to the originals.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf import text_format

if TYPE_CHECKING:
    from tritonclient.grpc.model_config_pb2 import ModelConfig

MODEL_NAME = "llm"
"""The model that parameters are for, in a repository of several."""

_CONFIG_FILE = "config.pbtxt"


class RepositoryError(ValueError):
    """The model repository, or what it should be changed to, is wrong; the message says how."""


def render_repository(
    repository: Path,
    target: Path,
    parameters: Mapping[str, str] | None = None,
    default_model: str | None = None,
) -> str:
    """Copy ``repository`` to ``target`` with ``parameters`` set in its model's config.pbtxt.

    Args:
        repository: a Triton model repository: ``MODEL/config.pbtxt``, ``MODEL/1/model.py``, ….
        target: the folder to make the copy in; must not exist.
        parameters: parameters to set or replace. Which ones there are is the engine's business, not checked here.
        default_model: value of the parameter ``model`` where neither the config nor ``parameters`` has one.

    Returns:
        The name of the model whose parameters were set: ``llm``, or the only one in the repository.

    Raises:
        RepositoryError: no such repository, no model to configure in it, or a config.pbtxt that does not parse.
    """
    repository = repository.resolve()
    name = _model_to_configure(repository)
    shutil.copytree(
        repository, target, copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    set_parameters(target / name, parameters or {}, default_model)
    return name


def server_arguments(repository: Path) -> list[str]:
    """What makes tritonserver faster for this repository; it takes a setting's first value, so these come after a user's.

    Triton's Python backend has 32 threads that pass responses on, in turn, each time one whose caches are cold. Our model
    sends one response after another, so one thread does. Other models may need more, to be called by Python models.
    """
    num_models = sum(folder.is_dir() for folder in repository.iterdir())  # not all need a config.pbtxt
    return ["--backend-config=python,thread-pool-size=1"] if num_models == 1 else []


def set_parameters(
    model_folder: Path, parameters: Mapping[str, str], default_model: str | None = None
) -> None:
    """Set ``parameters`` in ``model_folder/config.pbtxt``, a file of a rendered repository, leaving the others alone.

    Raises:
        RepositoryError: the file does not parse.
    """
    file = model_folder / _CONFIG_FILE
    config = _read_config(file)
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    if default_model is not None and _is_unset(config.parameters["model"].string_value):
        config.parameters["model"].string_value = default_model
    file.unlink()  # a link to the original, which must stay as it is
    file.write_text(text_format.MessageToString(config), encoding="utf-8")


def parse_parameters(text: str) -> dict[str, str]:
    """Read ``"page_size=32 max_num_tokens=512"``; a value with spaces is quoted as in a shell.

    Raises:
        RepositoryError: a word is not of the form key=value.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RepositoryError(f"cannot read the parameters {text!r}: {error}") from error
    parameters = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise RepositoryError(
                f"cannot read {word!r} among the parameters: write key=value, several separated by spaces, "
                f'as in "page_size=32 max_num_tokens=512"'
            )
        parameters[key] = value
    return parameters


def _model_to_configure(repository: Path) -> str:
    """The model ``llm``, or the only model there is."""
    if not repository.is_dir():
        raise RepositoryError(f"there is no model repository at {repository}")
    names = sorted(file.parent.name for file in repository.glob(f"*/{_CONFIG_FILE}"))
    if MODEL_NAME in names:
        return MODEL_NAME
    if len(names) == 1:
        return names[0]
    if not names:
        raise RepositoryError(f"{repository} is no model repository: it has no MODEL/{_CONFIG_FILE}")
    raise RepositoryError(f"{repository} has the models {', '.join(names)}, but none called {MODEL_NAME}")


def _read_config(file: Path) -> ModelConfig:
    """Parse a config.pbtxt, comments and all."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig  # slow to import, and only needed here

    try:
        return text_format.Parse(file.read_text(encoding="utf-8"), ModelConfig())
    except text_format.ParseError as error:
        raise RepositoryError(f"cannot read {file.resolve()}: {error}") from error


def _is_unset(value: str) -> bool:
    """Whether a parameter's value means "not given": empty, or a placeholder such as ``${MODEL}``."""
    return not value.strip() or (value.startswith("${") and value.endswith("}"))
