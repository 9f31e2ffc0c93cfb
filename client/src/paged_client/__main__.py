"""Where `paged-client` and `python -m paged_client` begin: checks that the command line's packages are there."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; says what to install where its packages are missing."""
    try:
        from paged_client.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"error: the command line needs the package {error.name!r}; install it with: "
            "pip install 'paged-client[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    app()


if __name__ == "__main__":
    main()
