"""A device that is as late as a device may be, for engines that look ahead: it computes nothing before somebody waits for it.

Its tensors are torch's meta tensors, which have shapes and no values. Every operation on them, and every step of the model as
a whole, is only noted down; waiting for an event runs what was noted before it, in order, on CPU tensors, and no more. So a
copy that the host reads too early holds nonsense, memory that is reused too early spoils what was to be computed, and
whatever makes the host wait half-way is seen, as on a GPU. Pages that come back are filled with NaN at that point of the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from paged_engine.attention.cpu_native import CpuAttention
from paged_engine.engine import Engine
from paged_engine.execution.batch import Batch
from paged_engine.execution.runner import ModelRunner
from paged_engine.execution.transfer import HostCopies
from paged_engine.generation import Output

META, CPU = torch.device("meta"), torch.device("cpu")
_COPY = torch.ops.aten._to_copy.default
_PUT = torch.ops.aten.index_put_.default


@dataclass
class Memory:
    """What a tensor of the device will be."""

    value: Any = None


class DeferredDevice(TorchDispatchMode):
    """While it is entered, tensors on `meta` are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: deque[Callable[[], None]] = deque()
        self.num_noted = self.num_done = 0
        self.has_failed = False
        self.waits: list[str] = []
        """What has made the host wait, events aside."""
        self._memory: Any = WeakIdKeyDictionary()
        self._numbers: Any = WeakIdKeyDictionary()
        """Tensors that stand for numbers of Python, as in `tensor[index] = 0`: on a GPU these would lie on the host."""

    def note(self, work: Callable[[], None]) -> None:
        """Do it after all that was noted before."""
        self.noted.append(work)
        self.num_noted += 1

    def run_until(self, number: int) -> None:
        """Do what is noted, up to the given number of pieces since the beginning."""
        with _disable_current_modes(), torch.inference_mode():
            while self.num_done < number:
                self.num_done += 1
                work = self.noted.popleft()
                self.has_failed = True
                work()
                self.has_failed = False

    def recover(self) -> None:
        """After a fault, what is noted behind it is lost. Otherwise it stays to be done, as late as before."""
        if self.has_failed:
            self.noted.clear()
            self.num_done = self.num_noted
            self.has_failed = False

    def new_tensor(self, like: torch.Tensor, memory: Memory) -> torch.Tensor:
        """A tensor of the device, of the shape and dtype of `like`."""
        with _disable_current_modes():
            tensor = torch.empty(like.shape, dtype=like.dtype, device=META)
        self._memory[tensor] = memory
        return tensor

    def memory_of(self, value: Any) -> Any:
        """Tensors of the device as their memory, everything else as it is."""
        return self._memory[value] if isinstance(value, torch.Tensor) and value.device == META else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if kwargs.get("device") != META and not any(tensor.device == META for tensor in tensors):
            return func(*args, **kwargs)
        if _consists_of_others(func):  # in inference mode such operations come as one
            with self:
                return func.decompose(*args, **kwargs)
        if func is _COPY and kwargs.get("device") == CPU:
            return self._copy_to_host(args[0], kwargs)
        inputs = _mapped(self.memory_of, (args, kwargs))
        is_upload = func is _COPY and kwargs.get("non_blocking")
        if not is_upload and any(tensor.device == CPU and tensor.dim() for tensor in tensors):
            self._wait(f"{func} with memory of the host")
        if func is _PUT and args[2] in self._numbers:
            self._wait(f"{func} of a number, which is copied to the device")
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):  # it depends on values
            self._wait(str(func))
            with torch.inference_mode():
                return _mapped(self._known, self._compute(func, inputs))
        made = [self._memory.setdefault(tensor, Memory()) for tensor in _tensors(result)]
        if func is torch.ops.aten.scalar_tensor.default:
            self._numbers[result] = True

        def work() -> None:
            for memory, value in zip(made, _tensors(self._compute(func, inputs)), strict=True):
                memory.value = value

        self.note(work)
        return result

    def _compute(self, func: Any, inputs: Any) -> Any:
        args, kwargs = _mapped(lambda value: value.value if isinstance(value, Memory) else value, inputs)
        if kwargs.get("device") == META:
            kwargs["device"] = CPU
        return func(*args, **kwargs)

    def _known(self, value: Any) -> Any:
        return self.new_tensor(value, Memory(value)) if isinstance(value, torch.Tensor) else value

    def _copy_to_host(self, tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        memory = self.memory_of(tensor)
        if not kwargs.get("non_blocking"):
            self._wait("a copy to the host")
            copied: torch.Tensor = memory.value.to(kwargs.get("dtype") or tensor.dtype)
            return copied.clone()
        dtype = tensor.dtype
        nonsense = (
            float("nan")
            if dtype.is_floating_point
            else torch.iinfo(dtype).min
            if dtype != torch.bool
            else True
        )
        host = torch.full(tensor.shape, nonsense, dtype=dtype)
        self.note(lambda: host.copy_(memory.value))
        return host

    def _wait(self, reason: str) -> None:
        self.waits.append(reason)
        self.run_until(self.num_noted)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf of nested lists, tuples and dictionaries."""
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those among the leaves."""
    found: list[torch.Tensor] = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None, value)
    return found


@lru_cache
def _consists_of_others(func: Any) -> bool:
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
    return has_kernel


class DeferredRunner:
    """Notes the model's steps down for a device."""

    device = META

    def __init__(self, runner: ModelRunner, device: DeferredDevice) -> None:
        self.runner = runner
        self._device = device

    def execute(self, batch: Batch) -> torch.Tensor:
        """The logits that there will be."""
        logits, names = Memory(), ("token_ids", "positions", "slots", "logit_rows")
        inputs = {name: self._device.memory_of(getattr(batch, name)) for name in names}

        def work() -> None:
            values = {name: memory.value for name, memory in inputs.items()}
            logits.value = self.runner.execute(replace(batch, **values))

        self._device.note(work)
        shape = len(batch.logit_rows), self.runner._model.vocab_size
        return self._device.new_tensor(torch.empty(shape, device=META), logits)

    def recover(self) -> None:
        """See DeferredDevice.recover."""
        self._device.recover()
        self.runner.recover()


class _Event:
    def __init__(self, device: DeferredDevice) -> None:
        self._device, self._number = device, device.num_noted

    def synchronize(self) -> None:
        self._device.run_until(self._number)


def defer(engine: Engine) -> DeferredDevice:
    """Let an engine that is on a CPU compute on a device that is late."""
    device = DeferredDevice()
    runner = engine._runner
    engine._runner = DeferredRunner(runner, device)  # type: ignore[assignment]
    step, start = engine.step, HostCopies.__init__

    def start_copies(copies: HostCopies, *tensors: torch.Tensor) -> None:
        start(copies, *tensors)
        copies._done = _Event(device)  # type: ignore[assignment]

    def deferred_step() -> list[Output]:
        with patch.object(HostCopies, "__init__", start_copies), device:
            return step()

    engine.step = deferred_step  # type: ignore[method-assign]
    _poison_what_is_released(engine, device)
    return device


def _poison_what_is_released(engine: Engine, device: DeferredDevice) -> None:
    backend, pool = engine._runner.runner._backend, engine.scheduler.pages  # type: ignore[attr-defined]
    caches = backend.caches if isinstance(backend, CpuAttention) else backend._caches
    set_free, evict = pool._set_free, pool._evict

    def poison(page: int) -> None:
        def work() -> None:
            for cache in caches.values():
                cache[page] = torch.nan

        device.note(work)

    def set_free_and_poison(page: int) -> None:
        set_free(page)
        if page not in pool.index:
            poison(page)

    def evict_and_poison() -> int:
        page = evict()
        poison(page)
        return page

    pool._set_free, pool._evict = set_free_and_poison, evict_and_poison  # type: ignore[method-assign]
