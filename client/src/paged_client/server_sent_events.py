"""Reading server-sent events (WHATWG HTML, section 9.2), as Triton's `generate_stream` writes them."""

from __future__ import annotations


class EventDecoder:
    """Turns the chunks of a body into the data of its events, wherever the chunks are cut.

    Lines end at a line feed only: JSON strings may contain other characters that Python's text functions take
    for line ends, such as U+2028. An event that no empty line has completed yet is not reported.
    """

    def __init__(self) -> None:
        self._incomplete_line = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of the events that this chunk completes. Raises UnicodeDecodeError if it is not UTF-8."""
        *lines, self._incomplete_line = (self._incomplete_line + chunk).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[len(b"data:") :].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode())
                self._data = []
        return events
