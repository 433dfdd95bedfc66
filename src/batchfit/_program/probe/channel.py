"""The probe's end of the socket to the parent: lines of JSON, and waiting for an answer.

Rules: whoever is forked off has none of it, and connects again if it takes steps itself. A parent that has
gone ends the process, whose steps would count for nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any, final

ORPHANED = 70  # the exit code of a rank whose parent has gone


@final
class ProbeChannel:
    """One process' connection."""

    def __init__(self, path: str, token: str) -> None:
        self._path = path
        self._token = token
        self._socket: socket.socket | None = None
        self._hello: dict[str, Any] = {}
        self._buffer = b""
        self._lock = threading.RLock()  # an OOM of a backward pass may be reported from autograd's thread
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()  # or the parent would never see that the forking process has ended
        self._socket, self._buffer = None, b""
        self._lock = threading.RLock()

    def open(self, **hello: Any) -> None:
        """Connect, and say who this is."""
        self._hello = hello
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(self._path)
        self._send({"kind": "hello", "token": self._token, "pid": os.getpid(), **hello})

    @property
    def is_open(self) -> bool:
        """Whether this process, and not one that it was forked from, is connected."""
        return self._socket is not None

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message; without a parent the process ends."""
        with self._lock:
            try:
                if self._socket is None:
                    self.open(**self._hello)
                self._send({"kind": kind, **fields})
            except OSError:
                os._exit(ORPHANED)

    def receive(self) -> dict[str, Any]:
        """The parent's next message."""
        assert self._socket is not None
        while b"\n" not in self._buffer:
            try:
                part = self._socket.recv(65536)
            except OSError:
                part = b""
            if not part:
                os._exit(ORPHANED)
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        self._socket.sendall(json.dumps(message).encode() + b"\n")
