"""A stand-in for CUDA graphs that needs no GPU: it records operators instead of launches, and repeats them likewise.

As with a graph, a replay runs none of the recorded function's Python: every operator is called again with the very
tensors and numbers of the recording, and its results go into the memory of the recorded ones. So whatever a step reads
from anywhere but a fixed buffer stays as it was when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Keeps every operator that is called, with its arguments and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result


class OperatorRecorder:
    """Records operators (cuda_graphs.Recorder)."""

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        with Recording() as recording:
            function()
        assert recording.calls

        def replay() -> None:
            for operator, args, kwargs, recorded in recording.calls:
                for old, new in zip(
                    tree_leaves(recorded), tree_leaves(operator(*args, **kwargs)), strict=True
                ):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
