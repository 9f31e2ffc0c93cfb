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

    return TorchAttention(setup)


_BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    "flashinfer": _flashinfer,
    "cpu": _cpu,
    "torch": _torch,
}
"""By the name in the configuration. Each raises BackendUnsupported for a setup that it cannot take; plain torch takes any."""
_FASTEST = {"cuda": "flashinfer", "cpu": "cpu"}
"""By device type, what "auto" takes if it can."""
_SLOWDOWN = {"cuda": ", many times slower", "cpu": ", several times slower"}


def select_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """Make the backend `name`, or for "auto" the one made for the device of `setup`.

    One that cannot take this model or device is replaced by plain torch, with one warning that says why: a model is
    served more slowly rather than not at all.

    Raises:
        ConfigurationError: there is no backend of this name, or no memory for it.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigurationError(f"attention_backend must be one of auto, {', '.join(_BACKENDS)}, got {name}")
    device_type = setup.device.type
    chosen = _FASTEST.get(device_type, "torch") if name == "auto" else name
    try:
        return _BACKENDS[chosen](setup)
    except BackendUnsupported as reason:
        _log.warning(
            "the attention backend %s cannot be used; plain torch takes its place%s: %s",
            chosen, _SLOWDOWN.get(device_type, ""), reason,
        )  # fmt: skip
        return _torch(setup)
