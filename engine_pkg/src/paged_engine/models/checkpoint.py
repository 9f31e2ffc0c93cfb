"""Looks a checkpoint folder over before anything is loaded from it.

transformers' own readers notice a damaged checkpoint, too, but late and without naming the file. What is checked here
costs a few small reads: that the JSON files can be read, that every file with weights is there, and that each is as
long as its own header says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_engine.errors import ConfigurationError

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""
_AGAIN = "copy or download it again"


def check_configuration_file(folder: Path) -> None:
    """Check that the config.json of a checkpoint folder can be read.

    Raises:
        ConfigurationError: it holds no JSON object.
    """
    _read_json(folder / "config.json")


def check_weight_files(folder: Path) -> None:
    """Check that the files with weights are all in a checkpoint folder, and whole; the weights are not read.

    Those of the older kind, in pytorch_model.bin, are left to their reader.

    Raises:
        ConfigurationError: there are none, the index is no JSON, or a file is missing, cut off or of another kind.
            Names the file and says what to do.
    """
    if (folder / _WHOLE).is_file():
        _check_weights(folder / _WHOLE)
    elif (folder / _INDEX).is_file():
        for file in _indexed_files(folder):
            _check_weights(file)
    elif not any(folder.glob("pytorch_model*.bin*")):
        raise ConfigurationError(
            f"the checkpoint {folder} has no weights: there is no {_WHOLE}, {_INDEX} or pytorch_model.bin in it; "
            "copy or download the rest of it"
        )


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of the checkpoint."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # no JSON, or not even UTF-8
        raise ConfigurationError(f"{file} is not valid JSON ({error}): correct it, or {_AGAIN}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{file} must hold a JSON object, but holds a {type(content).__name__}: {_AGAIN}"
        )
    return content


def _indexed_files(folder: Path) -> list[Path]:
    """The files that the index of a sharded checkpoint names, each of which must be there."""
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigurationError(
            f"{folder / _INDEX} has no weight_map, so nobody knows where the weights are: {_AGAIN}"
        )
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError(
            f"the checkpoint is incomplete: {_INDEX} names {missing[0]}, which is not there "
            f"({len(missing)} of {len(files)} files are missing): copy or download the rest of it"
        )
    return files


def _check_weights(file: Path) -> None:
    """Compare a safetensors file's length with its header: 8 bytes of length, the header as JSON, then the tensors."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header_size = int.from_bytes(opened.read(8), "little")
            header = opened.read(header_size) if header_size <= min(size, _LARGEST_HEADER) else b""
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    if size < 8 or (header and len(header) < header_size):
        raise ConfigurationError(f"{file} is cut off after {size} bytes, within its header: {_AGAIN}")
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(
            f"{file} is not a safetensors file, or cut off within its header, or a pointer that Git LFS left in the "
            f"place of the file: {_AGAIN}"
        ) from error
    expected = 8 + header_size + max(ends, default=0)
    if size != expected:
        problem = "is cut off" if size < expected else "has something behind its last tensor"
        raise ConfigurationError(
            f"{file} {problem}: by its header it has {expected} bytes, the file has {size}: {_AGAIN}"
        )
