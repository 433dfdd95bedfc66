"""How far a run has come, and what a loader asks about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: all counts are of what was dealt before the batch in question."""

    epoch: int = 0
    step: int = 0  # optimizer steps (= batches) so far, over all epochs
    samples: int = 0  # over all epochs and all ranks
    tokens: int | None = None  # None where nobody counts them


class Plan(Protocol):
    """What `ResizableLoader(schedule=)` takes."""

    def size_at(self, progress: Progress) -> int:
        """The global batch size of the batch that comes next; pure, and cheap (microseconds)."""
        ...
