"""One run of the program as a probe: started through the guardian, listened to, ended.

Rules:
- After `end` there is no process of it, and none of its files.
- What it prints is read all the time, and its last lines are kept; it has no terminal and no input.
- What its processes report comes out of `events`; how long it may say nothing, the caller knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from batchfit._engine.device.interrupts import Interrupts, safe_point
from batchfit._program.disk_room import room_for
from batchfit._program.pure.tail import Tail
from batchfit._program.pure.variables import INJECT
from batchfit._program.running.run_watch import processes_with

Event = dict[str, Any]
_END_S = 70.0  # the guardian gives up after 60 s on a process that is stuck in a device driver
_LONGEST_SOCKET = 90  # bytes of a path, of the 104 that macOS allows
_TICK_S = 0.2
_PYTHONS = ("python", "python3", *(f"python3.{minor}" for minor in range(11, 16)))
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
_SHIM = """#!/bin/sh
# Of a batchfit probe: the real one, with the probe in PYTHONPATH.
inject={inject}
case ":$PYTHONPATH:" in
*":$inject:"*) ;;
*) PYTHONPATH="$inject${{PYTHONPATH:+:$PYTHONPATH}}"; export PYTHONPATH ;;
esac
exec {real} "$@"
"""


@final
class ProbeFolder:
    """What a probe has for itself: its socket, temporary files, copies of configs, and `{out}`.

    Making it raises an `OSError` where there is no room, and leaves nothing.
    """

    def __init__(self) -> None:
        place = None if len(tempfile.gettempdir()) < _LONGEST_SOCKET - 30 else "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix="batchfit-", dir=place))
        try:
            for name in ("t", "out", "b"):
                (self.path / name).mkdir()
            self._write_shims(self.path / "b")
        except BaseException:
            self.remove()
            raise

    def _write_shims(self, place: Path) -> None:
        """Commands that start Python, for shells that set PYTHONPATH themselves: the probe stays in it."""
        for name in (*_PYTHONS, *_LAUNCHERS):
            real = shutil.which(name)
            if real is not None:
                (place / name).write_text(_SHIM.format(inject=shlex.quote(INJECT), real=shlex.quote(real)))
                (place / name).chmod(0o700)

    def remove(self) -> None:
        """Delete it."""
        shutil.rmtree(self.path, ignore_errors=True)


@final
class CommandRun:
    """One run, from its start to its end."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: ProbeFolder, token: str
    ) -> None:
        self.tail = Tail()
        self.begun_s = time.monotonic()
        self.silent_since_s = self.begun_s
        self._folder = folder
        self._token = token
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[int, bytes] = {}
        self._peers: dict[int, socket.socket] = {}
        self._known: set[int] = set()  # peers that have shown the token
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._guardian: subprocess.Popen[bytes] | None = None
        self._orders = self._answers = -1
        try:
            with Interrupts():  # in the middle of a start nothing would end the program
                self._start(list(command), dict(environment))
        except BaseException:
            self.end()
            raise

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        with room_for("a probe"):
            self._listener.bind(str(self._folder.path / "s"))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        script = Path(__file__).with_name("guardian.py")
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(orders), str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=(orders, answers),
                start_new_session=True,
            )
        finally:
            os.close(orders)
            os.close(answers)
        assert self._guardian.stdout is not None
        self._selector.register(self._answers, selectors.EVENT_READ, "guardian")
        self._selector.register(self._guardian.stdout, selectors.EVENT_READ, "output")
        order = {
            "command": command,
            "environment": environment,
            "folder": os.getcwd(),
            "probe_folder": str(self._folder.path),
        }
        whole = json.dumps(order).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while whole:
                whole = whole[os.write(self._orders, whole) :]

    def events(self) -> Iterator[Event]:
        """What the program's processes report, and `ended`; `tick` where nothing has come for a moment.

        A signal that was noted meanwhile is handed over here.
        """
        while True:
            safe_point()
            yield from list(self._read()) or [{"kind": "tick"}]

    def drain(self, pause_s: float = 0.3) -> Iterator[Event]:
        """What is still on its way once the program has ended."""
        deadline = time.monotonic() + pause_s
        while time.monotonic() < deadline:
            found = list(self._read(0.05))
            yield from found
            if not found and not self._peers:
                return

    def answer(self, peers: Sequence[int], **message: Any) -> None:
        """Answer processes that wait."""
        for peer in peers:
            with contextlib.suppress(OSError, KeyError):
                self._peers[peer].sendall(json.dumps(message).encode() + b"\n")

    def _read(self, pause_s: float = _TICK_S) -> Iterator[Event]:
        for key, _ in self._selector.select(pause_s):
            if key.data == "listener":
                peer, _ = self._listener.accept()
                self._peers[peer.fileno()] = peer
                self._buffers[peer.fileno()] = b""
                self._selector.register(peer, selectors.EVENT_READ, "peer")
                continue
            number = key.fd
            try:
                part = os.read(number, 65536)
            except OSError:
                part = b""
            if key.data == "output":
                self._printed(key.fileobj, part)
                continue
            yield from self._messages(number, part, is_peer=key.data == "peer")

    def _printed(self, stream: Any, part: bytes) -> None:
        if not part:
            self._selector.unregister(stream)
            return
        self.silent_since_s = time.monotonic()
        self.tail.take(part.decode(errors="replace"))

    def _messages(self, number: int, part: bytes, *, is_peer: bool) -> Iterator[Event]:
        if not part:
            self._selector.unregister(number)
            if is_peer:
                self._peers.pop(number).close()
                self._buffers.pop(number)
                if number in self._known:
                    self._known.remove(number)
                    yield {"kind": "left", "peer": number}
            else:  # it ends after us: somebody has killed it
                yield {"kind": "ended", "code": -signal.SIGKILL}
            return
        *lines, self._buffers[number] = (self._buffers.get(number, b"") + part).split(b"\n")
        for line in lines:
            try:
                message: Event = json.loads(line)
            except ValueError:
                continue
            if is_peer and number not in self._known:
                if message.get("token") != self._token:
                    continue
                self._known.add(number)
            self.silent_since_s = time.monotonic()
            yield {**message, "peer": number}

    def found(self, name: str) -> str | None:
        """What a Python of the program has left in the probe's folder, such as `python`."""
        try:
            return (self._folder.path / name).read_text(errors="replace")
        except OSError:
            return None

    def end(self) -> None:
        """Kill all of it, and wait until it is gone; more than once is fine."""
        with Interrupts():
            if self._orders >= 0:
                os.close(self._orders)
                self._orders = -1
            if self._guardian is not None:
                self._await_end()
            for peer in self._peers.values():
                peer.close()
            self._peers = {}
            self._listener.close()
            self._selector.close()
            if self._answers >= 0:
                os.close(self._answers)
                self._answers = -1
            self._folder.remove()

    def _await_end(self) -> None:
        guardian, self._guardian = self._guardian, None
        assert guardian is not None
        assert guardian.stdout is not None
        deadline = time.monotonic() + _END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its pipes are read meanwhile: a program whose output nobody reads does not end.
            while guardian.poll() is None and time.monotonic() < deadline:
                for _ in self._read(0.02):
                    pass
            guardian.wait(0.1)
        if guardian.poll() is None:
            guardian.kill()
            guardian.wait()
        guardian.stdout.close()
        if guardian.returncode:
            self._kill_leftovers()

    def _kill_leftovers(self) -> None:
        """Without the guardian: whoever has this run's folder in its environment is the program's."""
        for one in processes_with("BATCHFIT_PROBE_FOLDER", str(self._folder.path)):
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)


def new_token() -> str:
    """What the program's own processes know, and no others."""
    return secrets.token_hex(16)
