"""The course of one generation, without any waiting: time limit, retries, adding up, and how it ended.

The synchronous and the asyncio client both drive a `Session`; what differs between them is only how they
wait.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from paged_client.cancellation import Cancellation
from paged_client.errors import (
    ConnectionFailed,
    InternalError,
    PagedClientError,
    TimedOut,
    Unavailable,
    cancelled_here,
    unreadable,
)
from paged_client.request import GenerationOptions, Prompt, Request, build_request
from paged_client.response import GenerationBuilder, Response
from paged_client.types import Delta, Generation

_MAX_RETRY_DELAY_S = 8.0
READINESS_PAUSE_S = 0.2
"""Seconds between two questions whether the model is ready."""


@dataclass(frozen=True)
class Settings:
    """What holds for every generation of a client. Times in seconds; `timeout_s` None is no limit."""

    timeout_s: float | None
    retries: int
    retry_delay_s: float

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, or None for no limit, got {self.timeout_s}")
        if self.retries < 0:
            raise ValueError(f"retries must be 0 or more, got {self.retries}")
        if not self.retry_delay_s >= 0:
            raise ValueError(f"retry_delay_s must be 0 or more, got {self.retry_delay_s}")

    def begin(
        self,
        prompt: Prompt,
        options: GenerationOptions,
        *,
        stream: bool,
        timeout_s: float | None,
        request_id: str,
    ) -> Session:
        """A session for one call; `timeout_s` None takes the client's limit."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        if limit_s is None:
            limit_s = math.inf
        if not limit_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        request = build_request(prompt, options, stream=stream, request_id=request_id)
        return Session(request, limit_s, self.retries, self.retry_delay_s)


class Session:
    """One generation from its request to its result or failure."""

    def __init__(self, request: Request, timeout_s: float, retries: int, retry_delay_s: float) -> None:
        self.request = request
        self.cancellation = Cancellation()
        self._timeout_s = timeout_s
        self._retries_left = retries
        self._retry_delay_s = retry_delay_s
        self._builder = GenerationBuilder()
        self._started_at = 0.0
        self._first_token_at: float | None = None
        self._last: Response | None = None
        self._result: Generation | None = None
        self._failure: PagedClientError | None = None

    def start(self) -> None:
        """Starts the clock."""
        self._started_at = time.monotonic()

    def remaining_s(self) -> float | None:
        """Seconds left of the time limit, None if there is none. Raises TimedOut when they are used up."""
        if math.isinf(self._timeout_s):
            return None
        remaining_s = self._started_at + self._timeout_s - time.monotonic()
        if remaining_s <= 0:
            raise TimedOut
        return remaining_s

    def receive(self, response: Response) -> list[Delta]:
        """Takes a response in and returns its deltas."""
        self._last = response
        try:
            deltas = self._builder.add(response)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise unreadable(error) from error
        if deltas and self._first_token_at is None:
            self._first_token_at = time.monotonic()
        return deltas

    def finish(self) -> None:
        """To be called when the responses have ended without an error: makes the result.

        Raises ConnectionFailed if they ended before the final one: a text cut short must not pass for a whole
        one.
        """
        is_complete = self._last is not None and (
            self._builder.is_finished if self._last.is_final is None else self._last.is_final
        )
        if not is_complete:
            raise ConnectionFailed(
                "the answer ended before its final response; the text so far is incomplete"
            )
        if self._builder.is_empty:
            raise InternalError("INTERNAL", "the server ended the request without a text_output")
        first_token_at = self._first_token_at if self.request.stream else None
        self._result = self._builder.build(
            duration_s=time.monotonic() - self._started_at,
            time_to_first_token_s=None if first_token_at is None else first_token_at - self._started_at,
        )

    def recover(self, error: PagedClientError) -> float | None:
        """What to do after a failed attempt: returns the seconds to pause before the next one.

        Returns None if the failure is only that this program cancelled the request. Raises the error where
        there is nothing to retry: text has already been delivered, no attempts are left, or another try
        cannot help.
        """
        if self.cancellation.is_requested():
            return None
        if isinstance(error, TimedOut):
            error = TimedOut(f"no complete answer within timeout_s = {self._timeout_s:g} seconds")
        is_retryable = isinstance(error, (Unavailable, ConnectionFailed)) and self._first_token_at is None
        if not is_retryable or self._retries_left == 0:
            self._failure = error
            raise error
        self._retries_left -= 1
        pause_s = min(self._retry_delay_s, _MAX_RETRY_DELAY_S) * random.uniform(0.75, 1.25)
        self._retry_delay_s *= 2
        return min(pause_s, max(0.0, self._started_at + self._timeout_s - time.monotonic()))

    @property
    def result(self) -> Generation:
        """The complete generation. Raises what ended it early, or RuntimeError while it goes on."""
        if self._result is not None:
            return self._result
        if self._failure is not None:
            raise self._failure
        if self.cancellation.is_requested():
            raise cancelled_here()
        raise RuntimeError(
            "the generation is not complete yet: iterate to the end before asking for its result"
        )
