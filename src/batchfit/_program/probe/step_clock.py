"""How long the steps take: by the host's clock, and on a GPU by events that are read once, at the end.

Rules: the clock adds no CUDA synchronization to a step. The host's seconds are those that it took to launch a
step; what the GPU took is known when somebody waits anyway.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple, final

import torch

_KEPT = 200  # steps


class _Mark(NamedTuple):
    host_s: float
    event: Any  # torch.cuda.Event, or None


@final
class StepClock:
    """The marks between steps."""

    def __init__(self) -> None:
        self.on_gpu = False
        self._mark = _Mark(time.perf_counter(), None)
        self._steps: deque[tuple[_Mark, _Mark]] = deque(maxlen=_KEPT)

    def begin(self) -> None:
        """A step begins now."""
        self._mark = self._now()

    def end(self) -> float:
        """A step has ended, and the next one begins; the host's seconds of it."""
        before, self._mark = self._mark, self._now()
        self._steps.append((before, self._mark))
        return self._mark.host_s - before.host_s

    def seconds(self) -> list[float]:
        """The seconds of the steps that are kept; forces a CUDA synchronization."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return [_between(before, after) for before, after in self._steps]

    def forget(self) -> None:
        """Keep none of the steps so far."""
        self._steps.clear()

    def _now(self) -> _Mark:
        event: Any = None
        if self.on_gpu and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return _Mark(time.perf_counter(), event)


def _between(before: _Mark, after: _Mark) -> float:
    if before.event is None or after.event is None:
        return after.host_s - before.host_s
    return float(before.event.elapsed_time(after.event)) / 1000
