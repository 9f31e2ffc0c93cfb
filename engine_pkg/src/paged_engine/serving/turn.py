"""Turn: something that only one instance in a Triton server may have at a time."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from pathlib import Path


class Turn:
    """The right to something, among all processes that one server has started.

    It is an address in Linux' abstract socket namespace: the kernel gives it to one process, and takes it back when that
    ends, however it does. No file is left behind.
    """

    def __init__(self, name: str) -> None:
        """
        Args:
            name: what it is the right to; the same text in each process that wants it.
        """
        # Servers in several containers may share the socket namespace, and process ids repeat between them.
        pid_namespace = Path("/proc/self/ns/pid").stat().st_ino
        scope = f"{pid_namespace}/{os.getppid()}/{name}"
        self._address = "\0paged_engine/" + hashlib.sha256(scope.encode()).hexdigest()
        self._socket: socket.socket | None = None

    def take(self) -> bool:
        """Whether it is this process's turn now; then it stays so until `give_back`."""
        if self._socket is None:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(self._address)
            except OSError as error:
                claim.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                return False
            self._socket = claim
        return True

    def give_back(self) -> None:
        """Let the next one have it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
