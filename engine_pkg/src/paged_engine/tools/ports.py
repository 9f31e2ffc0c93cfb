"""The ports a server listens on: chosen by a person and checked, or free ones for a test."""

from __future__ import annotations

import random
import socket
from dataclasses import asdict, dataclass


class ServerError(RuntimeError):
    """The server cannot be started, or has ended before it was told to; the message says why."""


@dataclass(frozen=True)
class Ports:
    """The three ports of a server."""

    http: int
    grpc: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nobody listens on, outside the range that outgoing connections are given."""
        ports: list[int] = []
        while len(ports) < 3:
            port = random.randrange(20_000, 32_000)
            if port not in ports and _why_not_free("127.0.0.1", port) is None:
                ports.append(port)
        return cls(*ports)

    def check_free(self, address: str) -> None:
        """Raise ServerError, naming the port and the variable that changes it, if one cannot be listened on."""
        named = asdict(self)
        for name, port in named.items():
            variable = f"{name.upper()}_PORT"
            if not 1 <= port <= 65535:
                raise ServerError(f"{variable} must be a port from 1 to 65535, got {port}")
            reason = _why_not_free(address, port)
            if reason is not None:
                raise ServerError(
                    f"port {port} ({name}) cannot be used: {reason}. Stop the program that has it, or choose "
                    f"another port: {variable}={port + 1000 if port < 64000 else port - 1000}"
                )
        if len(set(named.values())) < len(named):
            raise ServerError(
                f"HTTP_PORT, GRPC_PORT and METRICS_PORT must differ, got {list(named.values())}"
            )


def _why_not_free(address: str, port: int) -> str | None:
    """Why nobody can listen on the port, or None if that is possible."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None
