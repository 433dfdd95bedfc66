"""What happened to a microbatch size, for the log and for a dashboard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

log = logging.getLogger("batchfit")

EventKind = Literal["shrunk", "grown", "lowered", "retry", "skipped", "relearned"]


@final
@dataclass(frozen=True, slots=True)
class MicrobatchEvent:
    """Something that happened to the microbatch size, for a log or a dashboard."""

    kind: EventKind
    size_before: int
    size_after: int
    why: str
    peak_bytes: int | None = None
    shape: str = ""

    def __str__(self) -> str:
        if self.kind == "relearned":  # of all sizes, so there is none to name
            return f"microbatch sizes are learned again: {self.why}"
        change = f"{self.size_before} -> {self.size_after}"
        return f"microbatch {change if self.size_after != self.size_before else self.size_after}: {self.why}"


@final
class EventLog:
    """Reports each change of a size: one line in the log, and a call of the user's `on_event`."""

    def __init__(self, on_event: Callable[[MicrobatchEvent], object] | None) -> None:
        self._on_event = on_event
        self._logged: set[str] = set()

    def report(
        self,
        kind: EventKind,
        before: int,
        after: int,
        why: str,
        *,
        shape: str = "",
        peak_bytes: int | None = None,
    ) -> None:
        """Log an event, and call `on_event` with it."""
        event = MicrobatchEvent(kind, before, after, why, peak_bytes, shape)
        log.log(logging.INFO if kind in ("grown", "lowered", "skipped") else logging.WARNING, "%s", event)
        if self._on_event is not None:
            self._on_event(event)

    def once(self, topic: str, text: str, level: int = logging.WARNING) -> None:
        """Log what holds for all batches, the first time only."""
        if topic not in self._logged:
            self._logged.add(topic)
            log.log(level, "%s", text)
