"""What happened to a microbatch size, for a log or a dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

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
            return f"microbatch sizes are learned anew: {self.why}"
        change = f"{self.size_before} -> {self.size_after}"
        return f"microbatch {change if self.size_after != self.size_before else self.size_after}: {self.why}"
