"""Chooses the attention backend: the one place that knows which there are and which is preferred."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paged_engine.attention.interface import AttentionBackend, AttentionSetup, BackendUnsupported
from paged_engine.errors import ConfigurationError

_log = logging.getLogger(__name__)


def _flashinfer(setup: AttentionSetup) -> AttentionBackend:
    from paged_engine.attention.flashinfer import load_flashinfer

    return load_flashinfer(setup)


def _cpu(setup: AttentionSetup) -> AttentionBackend:
    from paged_engine.attention.cpu_native import load_cpu_attention

    return load_cpu_attention(setup)


def _torch(setup: AttentionSetup) -> AttentionBackend:
    from paged_engine.attention.torch_reference import TorchAttention

    return TorchAttention(setup.specs, setup.page_size)


_BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    "flashinfer": _flashinfer,
    "cpu": _cpu,
    "torch": _torch,
}
"""By the name in the configuration, the fastest first. Each raises BackendUnsupported for a setup that it cannot take;
plain torch is the last and takes any."""


def select_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """Make the backend `name`, or for "auto" the first that can take `setup`.

    A named backend that cannot take this model or device is replaced as well, with a warning that says why: a model
    is served more slowly rather than not at all.

    Raises:
        ConfigurationError: there is no backend of this name.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigurationError(f"attention_backend must be one of auto, {', '.join(_BACKENDS)}, got {name}")
    candidates = [candidate for candidate in _BACKENDS if name in ("auto", candidate)]
    for candidate in [*candidates, "torch"]:
        try:
            return _BACKENDS[candidate](setup)
        except BackendUnsupported as reason:
            level = logging.INFO if name == "auto" else logging.WARNING
            _log.log(level, "the attention backend %s cannot be used: %s", candidate, reason)
    raise AssertionError("plain torch takes any setup")
