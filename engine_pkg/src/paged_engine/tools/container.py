"""What the production image runs: Triton over the mounted model repository.

    MODEL=/checkpoint PARAMETERS="max_batch_size=256" python -m paged_engine.tools.container [TRITON ARGUMENTS]

The repository ($MODEL_REPOSITORY) may be mounted read-only: $MODEL and $PARAMETERS are set in a copy. This process then
becomes tritonserver, so that its signals and its output are the container's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paged_engine.tools.render_repository import (
    RepositoryError,
    parse_parameters,
    render_repository,
    server_arguments,
)


def main(arguments: Sequence[str]) -> None:
    """Render the repository and become tritonserver; what is wrong with the repository ends the program with a message."""
    repository = Path(tempfile.mkdtemp(prefix="triton-")) / "model_repository"
    try:
        parameters = parse_parameters(os.environ.get("PARAMETERS", ""))
        if model := os.environ.get("MODEL"):
            parameters.setdefault("model", model)
        render_repository(Path(os.environ["MODEL_REPOSITORY"]), repository, parameters)
    except RepositoryError as error:
        sys.exit(f"error: {error}")
    os.execvp(
        "tritonserver",
        ["tritonserver", f"--model-repository={repository}", *arguments, *server_arguments(repository)],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
