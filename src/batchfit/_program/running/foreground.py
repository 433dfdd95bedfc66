"""A program run as a shell runs one: in the foreground, with the terminal, its signals and its stops.

Rules:
- It has the standard streams of this process, and a process group of its own, which has the terminal where
  this process had it: keys such as Ctrl-C and Ctrl-Z reach the program alone, and only once.
- A signal that is sent to this process goes to the program's first process, which decides what it means.
- Ctrl-Z stops both, and `fg` goes on with both.
- The terminal is this process's again when the program has ended, with the settings that it had.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

_PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ)  # Python ignores them; a program expects them as they are


@final
class ForegroundProgram:
    """One program, from its start to its end; `stopped_by` is the last signal passed on to it, or 0."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.stopped_by = 0
        self.pid = 0  # while there is none to pass a signal to
        self._terminal = _terminal()
        self._settings = self._terminal_settings()
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            stack.enter_context(self._signals())  # first: a signal during the start is for the program
            self.pid = os.posix_spawnp(
                command[0], list(command), dict(environment), setpgroup=0, setsigdef=_TO_DEFAULT
            )
            if self.stopped_by:
                os.kill(self.pid, self.stopped_by)
            self._give_terminal()
            self._stack = stack.pop_all()

    def wait(self) -> int:
        """Its exit code, or minus the number of the signal that ended it."""
        with self._stack:
            while True:
                _, status = os.waitpid(self.pid, os.WUNTRACED)
                if not os.WIFSTOPPED(status):
                    return os.waitstatus_to_exitcode(status)
                self._suspend(os.WSTOPSIG(status))

    def _close(self) -> None:
        if self._terminal >= 0:
            self._take_terminal(restore=True)
            os.close(self._terminal)

    def _suspend(self, number: int) -> None:
        """The program was stopped: so is this process, until someone goes on with it."""
        if number in (signal.SIGTTIN, signal.SIGTTOU) and self._give_terminal():
            os.killpg(self.pid, signal.SIGCONT)  # it asked for the terminal before it was given
            return
        self._take_terminal()
        # Not SIGSTOP: where no shell could go on with us the kernel drops this one, and we go on ourselves.
        with _handled(signal.SIG_DFL, signal.SIGTSTP):
            os.killpg(os.getpgrp(), signal.SIGTSTP)
        self._go_on()

    def _go_on(self) -> None:
        self._give_terminal()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def passed_on(number: int, frame: FrameType | None) -> None:
            self.stopped_by = number
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

        ignored = [one for one in _PASSED_ON if signal.getsignal(one) == signal.SIG_IGN]  # nohup
        passed = [one for one in _PASSED_ON if one not in ignored]
        with _handled(passed_on, *passed), _handled(lambda *_: self._go_on(), signal.SIGCONT):
            yield

    # --- the terminal

    def _give_terminal(self) -> bool:
        """Make the program's group the foreground one, where this process's group is it."""
        if self._terminal < 0:
            return False
        try:
            if os.tcgetpgrp(self._terminal) not in (os.getpgrp(), self.pid):
                return False
            self._set_foreground(self.pid)
        except OSError:
            return False
        return True

    def _take_terminal(self, *, restore: bool = False) -> None:
        """Make this process's group the foreground one again, where the program's is it."""
        if self._terminal < 0:
            return
        with contextlib.suppress(OSError, termios.error):
            if os.tcgetpgrp(self._terminal) != self.pid:
                return
            self._set_foreground(os.getpgrp())
            if restore and self._settings is not None:
                with _handled(signal.SIG_IGN, signal.SIGTTOU):
                    termios.tcsetattr(self._terminal, termios.TCSADRAIN, self._settings)

    def _set_foreground(self, group: int) -> None:
        with _handled(signal.SIG_IGN, signal.SIGTTOU):  # which stops a background process that does this
            os.tcsetpgrp(self._terminal, group)

    def _terminal_settings(self) -> Any:
        with contextlib.suppress(OSError, termios.error):
            return None if self._terminal < 0 else termios.tcgetattr(self._terminal)
        return None


def _terminal() -> int:
    """The controlling terminal; -1 where there is none."""
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return -1


@contextmanager
def _handled(handler: Callable[..., object] | signal.Handlers, *numbers: int) -> Iterator[None]:
    before = {one: signal.signal(one, handler) for one in numbers}
    try:
        yield
    finally:
        for one, action in before.items():
            signal.signal(one, action if action is not None else signal.SIG_DFL)


def flush_own_streams() -> None:
    """Write out what this process still holds, so that it stands before the program's output."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
