"""How the process ends, reported: an uncaught error, and one that was caught and became an exit code.

Rules: every error is reported once, as text. Programs put hooks of their own in the place of
`sys.excepthook`, or print the traceback and call `sys.exit(1)` (Hydra, `torch.multiprocessing.spawn`): both
are seen. A process that was forked off reports nothing here.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, final

from batchfit._program.probe.channel import ProbeChannel

_LINES = 30  # of a traceback
Fields = dict[str, Any]


@final
class Endings:
    """The hooks of one process; `state` says where it is, `ends` what to add where it exits by itself.

    `on_error` sees each error before it is reported.
    """

    def __init__(
        self,
        channel: ProbeChannel,
        state: Callable[[], Fields],
        ends: Callable[[], Fields],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._channel, self._state, self._ends = channel, state, ends
        self._on_error = on_error
        self._owner = os.getpid()
        self._reported = 0  # the id of the error: the error itself would hold the tensors of its frames
        self._handled: Fields | None = None
        self._plain_hook, self._plain_exit = sys.excepthook, sys.exit
        sys.excepthook = self._uncaught
        sys.exit = self._exit
        atexit.register(self._exits)

    def _uncaught(self, kind: Any, error: BaseException, trace: Any) -> None:
        try:
            self._report(error)
        finally:
            self._plain_hook(kind, error, trace)

    def _exit(self, status: Any = None, /) -> NoReturn:
        error = sys.exception()
        if error is not None and status not in (None, 0) and os.getpid() == self._owner:
            self._on_error(error)
            self._handled = self._fields(error)
        self._plain_exit(status)

    def _report(self, error: BaseException) -> None:
        if os.getpid() != self._owner or isinstance(error, KeyboardInterrupt) or self._reported == id(error):
            return
        self._reported = id(error)
        self._on_error(error)
        self._channel.send("raised", **self._fields(error))

    def _fields(self, error: BaseException) -> Fields:
        from batchfit._engine.device.oom import classify, describe

        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return {
            "verdict": classify(error),
            "text": describe(error),
            "type": type(error).__name__,
            "traceback": "".join(lines).splitlines()[-_LINES:],
            **self._state(),
        }

    def _exits(self) -> None:
        if os.getpid() != self._owner or not self._channel.is_open:
            return
        last = getattr(sys, "last_value", None)  # also where a hook of the program's took our place
        if isinstance(last, BaseException):
            self._report(last)
        ends = self._ends()
        if self._handled is not None and not self._reported:
            self._channel.send("handled", **self._handled)
        self._channel.send("exits", **{**self._state(), **ends})
