"""The one exception a request can end with, so that every layer reports a fault in the words a client sees."""

from __future__ import annotations

from enum import Enum


class ErrorCode(str, Enum):
    """What kind of fault a request met; the name leads the message on the wire."""

    INVALID_ARG = "INVALID_ARG"
    """The client sent something wrong: it names the field, the value and the allowed range."""
    UNAVAILABLE = "UNAVAILABLE"
    """The server cannot take the request now: queue full, deadline passed in the queue, engine down."""
    CANCELLED = "CANCELLED"
    """The client cancelled the request or went away."""
    INTERNAL = "INTERNAL"
    """The server's own fault."""


class RequestError(Exception):
    """Ends one request, and no other, with a code and a message written for the person who sent it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message

    @classmethod
    def invalid(cls, message: str) -> RequestError:
        """The client's mistake (INVALID_ARG)."""
        return cls(ErrorCode.INVALID_ARG, message)

    @classmethod
    def unavailable(cls, message: str) -> RequestError:
        """Not now (UNAVAILABLE)."""
        return cls(ErrorCode.UNAVAILABLE, message)

    @classmethod
    def cancelled(cls, message: str = "the request was cancelled") -> RequestError:
        """The client no longer wants the answer (CANCELLED)."""
        return cls(ErrorCode.CANCELLED, message)

    @classmethod
    def internal(cls, message: str) -> RequestError:
        """Our mistake (INTERNAL)."""
        return cls(ErrorCode.INTERNAL, message)


class ConfigurationError(ValueError):
    """The model cannot be loaded as configured; the message names the key, its value and the allowed range."""
