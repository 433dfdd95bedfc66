"""SIGINT and SIGTERM of a command: noted from its first line to its last, raised where that harms nothing.

Rules:
- One handler, from `main` to the end of the process. Where the command is `opened` it raises, at once, a
  KeyboardInterrupt (SIGTERM: `Terminated`). Elsewhere it notes the signal: while the command line is read,
  and while an answer is delivered. While the interpreter ends, signals are ignored.
- What is noted is raised where the command opens next, and where `closed` ends in an open one. While modules
  are loaded nothing has begun: there the process ends at once, since torch may take a minute on a slow disk.
- One is enough: while an interrupt is on its way out, further signals are noted.
- An interrupt may come out as another error (that of a module half loaded, which is asked for something while
  it is cleaned up after): `came_out` still knows it.
- A signal that this process ignores (`nohup`) stays ignored. A process that was forked off has none of this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from batchfit._engine.device.interrupts import is_on_its_way

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised in the main thread where Ctrl-C would be."""


@final
class CommandSignals:
    """The signals of the command that this process is."""

    def __init__(self) -> None:
        self._open = False
        self._loading = False
        self._noted: list[int] = []
        self._raised = 0  # its number
        self._before: dict[int, Any] = {}
        self._owner = 0
        self._is_process = False

    def install_for_process(self) -> None:
        """Note signals from now on to the end of the process, which is this command and nothing else."""
        self.install()
        self._is_process = True

    def install(self) -> None:
        """Note signals from now on, to `uninstall`."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._open, self._noted, self._raised, self._owner = False, [], 0, os.getpid()
        found = {number: signal.getsignal(number) for number in _NUMBERS}
        self._before = {number: handler for number, handler in found.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._on_signal)

    def ignore_to_the_end(self) -> None:
        """From here on nothing is left to do: signals change neither the answer nor the exit code.

        The interpreter takes Python's handlers away before its end, and a signal would end the process.
        """
        if self._is_process and os.getpid() == self._owner:
            for number in self._before:
                signal.signal(number, signal.SIG_IGN)

    def uninstall(self) -> None:
        """Give the signals back."""
        before, self._before, self._is_process = self._before, {}, False
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, signals raise at once, and one that was noted before raises first."""
        mine, before = not self._before, self._open
        self.install()
        try:
            self._open = True
            self.check()
            yield
        finally:
            self._open = before
            if mine:
                self.uninstall()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Inside, signals are noted; they raise at the end, where it is open."""
        mine, before = not self._before, self._open
        self.install()
        self._open = False
        try:
            yield
        finally:
            self._open = before
            if mine:
                self.uninstall()
        if before or mine:
            self.check()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, modules are loaded, and nothing has begun: a signal ends the process."""
        with self.closed():
            self._loading = os.getpid() == self._owner and self._is_process
            try:
                yield
            finally:
                self._loading = False

    def check(self) -> None:
        """Raise what was noted, if anything was."""
        if self._noted:
            self._raised, self._noted = self._noted[0], []
            raise _interrupt(self._raised)

    def forget(self) -> None:
        """What was noted comes too late to change anything."""
        self._noted = []

    def came_out(self, error: BaseException) -> KeyboardInterrupt | None:
        """The interrupt that `error` is, or that became `error`; a later error is none of it."""
        raised, self._raised = self._raised, 0
        if isinstance(error, KeyboardInterrupt):
            return error
        return _interrupt(raised) if raised else None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            self._as_before(number, frame)
            return
        if self._loading:
            _end_now(number)
        self._noted.append(number)
        if self._open and not is_on_its_way():
            self.check()

    def _as_before(self, number: int, frame: FrameType | None) -> None:
        """What a process that was forked off does with it."""
        handler = self._before.get(number)
        if callable(handler):
            handler(number, frame)
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_now(number: int) -> None:
    """End the process as an interrupt does; what is half loaded is asked nothing more."""
    with contextlib.suppress(OSError):
        shown = b"\x1b[?25h\n" if os.isatty(2) else b""  # a progress display hides the cursor
        os.write(2, shown + b"error: interrupted before anything ran\n")
    os._exit(128 + number)


def _interrupt(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


SIGNALS = CommandSignals()
