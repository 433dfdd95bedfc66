"""The allocations, frees and OOMs of a virtual memory with their stacks, in PyTorch's snapshot format.

Rules: recorded only where it was asked for (`recording`); bounded, the oldest entries are forgotten; a stack
is what Python had, without our own frames. A storage gets an address of its own that is never given again.
There are no segments here: each live storage is written as a segment of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, final

import batchfit

_OURS: Final = os.path.dirname(batchfit.__file__) + os.sep
_DEEPEST: Final = 64
_Stack = tuple[tuple[CodeType, int], ...]
_FIRST_ADDRESS: Final = 1 << 32
_active: list[StorageHistory] = []


def active_history() -> StorageHistory | None:
    """The history that is being recorded, if any."""
    return _active[-1] if _active else None


@contextmanager
def recording(max_entries: int) -> Iterator[StorageHistory]:
    """Inside, each virtual memory that is entered records what it allocates, with stacks."""
    history = StorageHistory(max_entries)
    _active.append(history)
    try:
        yield history
    finally:
        _active.remove(history)


@final
class StorageHistory:
    """Entries of one or more virtual memories, the last `max_entries` of them."""

    def __init__(self, max_entries: int) -> None:
        self._entries: deque[tuple[str, int, int, _Stack, int]] = deque(maxlen=max_entries)
        self._live: dict[int, tuple[int, int, _Stack]] = {}  # by the address of the StorageImpl
        self._next = _FIRST_ADDRESS

    def held(self, storage: int, size: int) -> None:
        """A storage that is now on the count."""
        stack = _stack()
        address, self._next = self._next, self._next + max(size, 512)
        self._live[storage] = address, size, stack
        self._entries.append(("alloc", address, size, stack, time.time_ns() // 1000))

    def held_before(self, storage: int, size: int) -> None:
        """A storage that was on the count when the recording began."""
        self._live[storage] = self._next, size, ()
        self._next += max(size, 512)

    def freed(self, storage: int) -> None:
        """A storage that is off the count."""
        known = self._live.pop(storage, None)
        if known is None:
            return
        address, size, _ = known
        now = time.time_ns() // 1000
        self._entries.append(("free_requested", address, size, (), now))
        self._entries.append(("free_completed", address, size, (), now))

    def refused(self, wanted: int, free: int) -> None:
        """A request that did not fit."""
        self._entries.append(("oom", free, wanted, _stack(), time.time_ns() // 1000))

    def snapshot(self) -> dict[str, Any]:
        """What `torch.cuda.memory._snapshot()` gives for a GPU."""
        frames: dict[tuple[CodeType, int], dict[str, Any]] = {}

        def listed(stack: _Stack) -> list[dict[str, Any]]:
            return [frames.setdefault(one, _frame(*one)) for one in stack]

        trace = []
        for action, address, size, stack, now in self._entries:
            where = "device_free" if action == "oom" else "addr"
            entry: dict[str, Any] = {"action": action, where: address, "size": size, "stream": 0}
            trace.append({**entry, "time_us": now, "frames": listed(stack)})
        segments = []
        for address, size, stack in sorted(self._live.values(), key=lambda one: one[0]):
            if not size:
                continue
            block: dict[str, Any] = {"address": address, "size": size, "requested_size": size}
            block |= {"state": "active_allocated", "frames": listed(stack)}
            sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
            segments.append({"device": 0, "address": address, "stream": 0, **sizes, "blocks": [block]})
        return {"segments": segments, "device_traces": [trace]}


def _stack() -> _Stack:
    """The functions that called us, the innermost first, without our own."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and len(found) < _DEEPEST:
        if not frame.f_code.co_filename.startswith(_OURS):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _frame(code: CodeType, line: int) -> dict[str, Any]:
    return {"filename": code.co_filename, "line": line, "name": code.co_name}
