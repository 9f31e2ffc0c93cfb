"""Progress of a long load as lines in the log, in the place of a bar on a terminal that a server does not have."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def logged_progress(log: logging.Logger) -> Iterator[None]:
    """While inside, transformers' progress bars become lines in `log`: none for what is quick, one every few seconds."""

    def make_bar(factory: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Collection):
            return _report(arguments[0], keywords.get("desc", "Working"), log)
        return factory(*arguments, **keywords)

    previous = set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _report(items: Collection[Any], title: str, log: logging.Logger) -> Iterator[Any]:
    """Pass `items` on, and say now and then how many of them are done."""
    next_line = time.monotonic() + SECONDS_BETWEEN_LINES
    for num_done, item in enumerate(items):
        now = time.monotonic()
        if now >= next_line:
            log.info("%s: %d %%", title, 100 * num_done // len(items))
            next_line = now + SECONDS_BETWEEN_LINES
        yield item
