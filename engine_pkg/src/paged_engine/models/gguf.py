"""Turns a .gguf file into a checkpoint folder, once.

transformers takes many seconds to read and de-quantize a GGUF file; the safetensors folder it becomes is mapped
into memory in well under one. So the conversion is done a single time into a cache folder, and everything else in
the engine knows checkpoint folders only.

``python -m paged_engine.models.gguf FILE CACHE_DIR [DTYPE]`` prints the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from paged_engine.errors import ConfigurationError

logger = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_DTYPES = ("bfloat16", "float16", "float32")
_one_at_a_time = threading.Lock()
"""Within this process, because stderr is redirected meanwhile. Between processes the rename decides."""
_LAYOUT_VERSION = 1
"""Part of the cache key: raise it when the folder's content changes for the same file."""


def convert_gguf(gguf_path: str | Path, cache_dir: str | Path, dtype: str = "bfloat16") -> Path:
    """Return the checkpoint folder that holds the de-quantized weights and the tokenizer of a GGUF file.

    The folder's name comes from the file's path, size and modification time and from ``dtype``, so a changed file
    is converted anew. It is written beside its final place and renamed into it: an interrupted conversion leaves
    no half-written checkpoint, and of two processes that convert the same file one simply wins.

    Args:
        gguf_path: the file to convert.
        cache_dir: where the folders of converted checkpoints live; created if missing.
        dtype: the weights' dtype: bfloat16, float16 or float32.

    Raises:
        ConfigurationError: there is no such file, it is no GGUF file, it is truncated, its architecture is one
            that transformers cannot read from GGUF, or ``dtype`` is none of the three.
    """
    if dtype not in _DTYPES:
        raise ConfigurationError(f"a GGUF file can be loaded as {', '.join(_DTYPES)}, not as '{dtype}'")
    source = Path(gguf_path).expanduser().resolve()
    _check_is_gguf(source)
    target = Path(cache_dir).expanduser().resolve() / _folder_name(source, dtype)
    with _one_at_a_time:
        if not (target / "config.json").is_file():
            logger.info("converting %s to a checkpoint folder, once; this can take a minute", source.name)
            _convert(source, target, dtype)
    return target


def _check_is_gguf(source: Path) -> None:
    """Refuse at once what is not a readable GGUF file."""
    try:
        with source.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise ConfigurationError(f"cannot read the GGUF file {source}: {error.strerror}") from error
    if magic != _MAGIC:
        raise ConfigurationError(
            f"{source} is not a GGUF file: it begins with {magic!r}, not with {_MAGIC!r}"
        )


def _convert(source: Path, target: Path, dtype: str) -> None:
    """Write the folder beside its place and put it there whole."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to the cache folder {target.parent}: {error.strerror}"
        ) from error
    try:
        _write_checkpoint(source, scratch, dtype)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first, and its folder is as good as this one
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _folder_name(source: Path, dtype: str) -> str:
    """``STEM-DTYPE-KEY``: readable for people, and different for every version of the file."""
    stat = source.stat()
    identity = f"{_LAYOUT_VERSION}|{source}|{stat.st_size}|{stat.st_mtime_ns}|{dtype}"
    return f"{source.stem}-{dtype}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _write_checkpoint(source: Path, folder: Path, dtype: str) -> None:
    """De-quantize ``source`` into ``folder`` (safetensors, config, generation config, tokenizer, chat template)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        with _quiet_transformers():
            # Left to itself transformers keeps the weights in their GGUF blocks, which cannot be saved.
            model = AutoModelForCausalLM.from_pretrained(
                **place, dtype=getattr(torch, dtype), quantization_config=GgufConfig(dequantize=True)
            )
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    except Exception as error:  # whatever the readers trip over, the file is what is wrong
        raise ConfigurationError(
            f"cannot load the GGUF file {source} (truncated, damaged, or of an architecture that transformers "
            f"does not read from GGUF): {type(error).__name__}: {error}"
        ) from error
    for file in folder.iterdir():
        file.chmod(0o644)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' warnings and progress bars about GGUF off stderr, and put its settings back."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def main(arguments: list[str]) -> int:
    """``FILE CACHE_DIR [DTYPE]``: convert and print the folder; 1 and the reason on stderr when that fails."""
    if not 2 <= len(arguments) <= 3:
        print("usage: python -m paged_engine.models.gguf FILE CACHE_DIR [DTYPE]", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(convert_gguf(*arguments))
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
