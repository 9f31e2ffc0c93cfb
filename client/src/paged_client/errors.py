"""The exceptions of this package, and how a server's error text becomes one of them.

The model writes its errors as `CODE: text`, since what carries them differs: over HTTP some Triton versions
answer 400 for every one of them, and a gRPC stream delivers them inside a response without any status. So the
code at the front decides, and the status only where there is none.
"""

from __future__ import annotations

import re

_CODED = re.compile(
    r"(INVALID_ARG|UNAVAILABLE|CANCELLED|INTERNAL|NOT_FOUND|UNSUPPORTED|ALREADY_EXISTS|UNKNOWN): (.*)",
    re.DOTALL,
)
"""Triton's error codes (TRITONSERVER_Error_Code) in front of a message."""

_CODE_OF_STATUS: dict[int | str, str] = {
    400: "INVALID_ARG",
    404: "NOT_FOUND",
    499: "CANCELLED",
    500: "INTERNAL",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "UNAVAILABLE",
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "INTERNAL",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNIMPLEMENTED": "UNSUPPORTED",
}


class PagedClientError(Exception):
    """Base of everything this package raises about a server or a connection."""


class ServerError(PagedClientError):
    """The server answered with an error.

    `code` is Triton's word for the kind (`INVALID_ARG`, `UNAVAILABLE`, …; `UNKNOWN` where the server gave
    none), `message` the text without it, `status` the HTTP status number or gRPC status name where there was
    one.
    """

    def __init__(self, code: str, message: str, status: int | str | None = None) -> None:
        super().__init__(code, message, status)
        self.code = code
        self.message = message
        self.status = status

    def __str__(self) -> str:
        return self.message if self.code == "UNKNOWN" else f"{self.code}: {self.message}"


class InvalidRequest(ServerError, ValueError):
    """The request is wrong (`INVALID_ARG`): the server says so, or this client before sending it."""

    @classmethod
    def local(cls, message: str) -> InvalidRequest:
        """The error for a value that this client can see is wrong: no status, since nothing was sent."""
        return cls("INVALID_ARG", message)


class Unavailable(ServerError):
    """The server cannot take the request now (`UNAVAILABLE`): queue full, shutting down. Trying later may help."""


class Cancelled(ServerError):
    """The request was cancelled (`CANCELLED`), by the server or by another thread of this program."""


class InternalError(ServerError):
    """The server failed (`INTERNAL`)."""


class ConnectionFailed(PagedClientError, ConnectionError):
    """The server could not be reached, or went away before it had answered completely."""


class TimedOut(PagedClientError, TimeoutError):
    """The client's own time limit, `timeout_s`, has passed."""


_CLASS_OF_CODE: dict[str, type[ServerError]] = {
    "INVALID_ARG": InvalidRequest,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "INTERNAL": InternalError,
}


def server_error(text: str, status: int | str | None = None) -> ServerError:
    """The exception for a server's error text; `status` is the HTTP status or gRPC status name, if there was one.

    A code at the front of the text decides the class, else the status, else it is a plain `ServerError`.
    """
    coded = _CODED.fullmatch(text)
    if coded:
        code, message = coded.groups()
    else:
        code, message = ("UNKNOWN" if status is None else _CODE_OF_STATUS.get(status, "UNKNOWN")), text
    return _CLASS_OF_CODE.get(code, ServerError)(code, message, status)


def is_coded(text: str) -> bool:
    """Whether a message begins with a code, and so was written by Triton or the model, not by a transport."""
    return _CODED.match(text) is not None


def cancelled_here() -> Cancelled:
    """The error for a request that this program itself cancelled."""
    return Cancelled("CANCELLED", "the request was cancelled by this client")


def unreadable(error: Exception) -> InternalError:
    """The error for an answer that does not follow the model's contract."""
    return InternalError("INTERNAL", f"the server's answer cannot be read: {type(error).__name__}: {error}")
