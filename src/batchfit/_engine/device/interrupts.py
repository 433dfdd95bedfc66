"""Delays Ctrl-C while state is half changed.

A KeyboardInterrupt may be raised between any two instructions: while state is being restored, or in Python
that torch's C++ has called and where an exception ends the process. While state is replaced or being
restored, signals that a Python handler would get (SIGINT, and SIGTERM where the program has one) are noted,
and handed to that handler later: at once where `open`, else in `check` or at a `safe_point`, at the latest at
the end.

Rules: in the main thread only, which alone gets signals; the handlers of the program are back afterwards. One
KeyboardInterrupt is enough: further signals, while it is on its way out, are not raised on top of it.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_ACTIVE: list[Interrupts] = []  # of the main thread, the outermost first


def safe_point() -> None:
    """Hand a signal that any `Interrupts` around has noted to the program's handler: harmless here."""
    if _ACTIVE and threading.current_thread() is threading.main_thread():
        for one in _ACTIVE:
            if one._held:
                number, frame = one._held.pop(0)
                # The outermost that has it: a handler may have been set in between.
                next(each for each in _ACTIVE if number in each._before)._before[number](number, frame)


class Interrupts:
    """Inside, signals are noted. `open`: handed over at once, but for those that come on top of one.

    with Interrupts() as interrupts:
        ...                            # what must not be left half done
        with interrupts.opened(): ...  # what may be
    """

    def __init__(self, *, is_open: bool = False) -> None:
        self._open = is_open
        self._held: list[tuple[int, FrameType | None]] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in _NUMBERS}
            self._before = {number: handler for number, handler in found.items() if callable(handler)}
            _ACTIVE.append(self)
            for number in self._before:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._open = False
        self._give_back(list(self._before.items()))
        if self in _ACTIVE:
            _ACTIVE.remove(self)
        if self._held and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            number, frame = self._held[0]
            self._before[number](number, frame)

    def _give_back(self, handlers: list[tuple[int, Any]]) -> None:
        """All of them, even if one that is back already raises meanwhile."""
        if not handlers:
            return
        try:
            signal.signal(*handlers[0])
        finally:
            self._give_back(handlers[1:])

    def opened(self) -> _Opened:
        """Inside, a signal is handed over at once."""
        return _Opened(self)

    def check(self) -> None:
        """Hand over a signal that has been noted, if there is one."""
        if self._held:
            number, frame = self._held.pop(0)
            self._before[number](number, frame)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
        if self._is_harmless(frame):
            self.check()

    def _is_harmless(self, frame: FrameType | None) -> bool:
        return self._open and not is_on_its_way()


class _Opened:
    """Plain, so that nothing runs between its end and the end of what it opens."""

    __slots__ = ("_interrupts",)

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __enter__(self) -> None:
        self._interrupts._open = True
        self._interrupts.check()

    def __exit__(self, *_: object) -> None:
        self._interrupts._open = False


class TraceInterrupts(Interrupts):
    """Inside, a signal is handed over where an operation begins, or in plain code of the program.

    Plain: between `outside`, which calls the step, and the line that is running there is nothing of `ours`
    but the files in `plain` (`nn.Module.__call__`): then no C++ of torch's is there either.
    """

    def __init__(self, outside: Any, ours: tuple[str, ...], plain: frozenset[str]) -> None:
        super().__init__()
        self._outside = outside
        self._ours = ours
        self._plain = plain

    def _is_harmless(self, frame: FrameType | None) -> bool:
        if is_on_its_way():
            return False
        while frame is not None and frame.f_code is not self._outside:
            file = frame.f_code.co_filename
            if file.startswith(self._ours) and file not in self._plain:
                return False
            frame = frame.f_back
        return frame is not None


def is_on_its_way() -> bool:
    """Whether a KeyboardInterrupt is being handled already: somebody cleans up after it."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
