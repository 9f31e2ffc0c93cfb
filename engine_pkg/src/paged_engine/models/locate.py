"""What the parameter `model` means: a path, or the id of a model on a hub. Needs no torch, so that a command can ask at once."""

from __future__ import annotations

import re
from pathlib import Path

from paged_engine.errors import ConfigurationError
from paged_engine.validation import nearest

_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def locate_checkpoint(model: str) -> Path | None:
    """The checkpoint folder or .gguf file that `model` names, which exists; None where it is the id of a model on a hub.

    Raises:
        ConfigurationError: it can be no hub id, and there is nothing of this name, no checkpoint, or no permission to look.
    """
    path = Path(model).expanduser()
    try:
        return _locate(model, path)
    except OSError as error:
        raise ConfigurationError(
            f"model must be a path that can be read, but {path} cannot: {error}"
        ) from error


def _locate(model: str, path: Path) -> Path | None:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationError(
                f"model must be a checkpoint folder, a .gguf file or a hub id, got the file {path}"
            )
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model must be a checkpoint folder, but {path} has no config.json")
        return path
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(model):
        return None
    raise ConfigurationError(
        f"model must be a checkpoint folder, a .gguf file or a hub id, but {path} does not exist; {_advice(path)}"
    )


def _advice(path: Path) -> str:
    """What to do about a path that is not there: the name beside it that is probably meant, or where the path ends."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    folder = missing.parent
    if not folder.is_dir():
        return f"{folder} is a file"
    names = {
        item.name.lower(): item.name for item in folder.iterdir() if item.is_dir() or item.suffix == ".gguf"
    }
    similar = nearest(missing.name, names)
    if similar is not None:
        return f"did you mean {folder / names[similar]}?"
    return f"there is nothing like '{missing.name}' in {folder.resolve()}"
