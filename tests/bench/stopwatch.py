"""Tells where the time of a step goes, without a hook in the engine."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any


class Stopwatch:
    """Adds up the time that methods take while it runs, in a `with` block.

    The methods are replaced on their classes for that long, so every instance is timed. `seconds` has the sums.
    """

    def __init__(self, methods: Mapping[str, Sequence[tuple[type, str]]]) -> None:
        """
        Args:
            methods: by the name of the sum, the methods that go into it as (class, name of the method). A method that is
                called by another one of these is counted in both.
        """
        self.seconds = dict.fromkeys(methods, 0.0)
        self._methods = [(key, owner, name) for key, pairs in methods.items() for owner, name in pairs]
        self._originals: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Stopwatch:
        for key, owner, name in self._methods:
            original = owner.__dict__[name]
            self._originals.append((owner, name, original))
            setattr(owner, name, self._timed(key, original))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._originals:
            setattr(*self._originals.pop())

    def _timed(self, key: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds[key] += time.perf_counter() - began

        return timed
