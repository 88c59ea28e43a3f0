"""Small plain messages over a socket, none of which is ever waited for."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

_MOST = 1 << 20
"""Bytes of a message at most."""


class Wire:
    """One end of a connection; a message is a line of JSON.

    Attributes:
        closed: the other end is gone, or has sent what is no message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.closed = False
        self._received = self._unsent = b""
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's file descriptor, for a selector."""
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; one for which there is no room, since nobody reads at the other end, is dropped."""
        try:
            self._flush()
            if not self._unsent:
                self._unsent = json.dumps(message).encode() + b"\n"
                self._flush()
        except OSError:
            self._unsent = b""  # what is still to be read may say why; then comes the end

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:  # half a message would spoil the next
                self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def read(self) -> list[dict[str, Any]]:
        """Return the messages that have come."""
        try:
            while part := self.connection.recv(1 << 16):
                self._received += part
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._received = self._received.split(b"\n")
        if len(self._received) > _MOST:
            self.closed = True
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.closed = True
            return []

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self.connection.close()
