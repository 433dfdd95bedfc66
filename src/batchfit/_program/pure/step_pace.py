"""How long one run of a program is timed: which steps count, and when there are enough of them.

Rules:
- A start costs more than steps, so a run goes on until its time is known finely, as long as the steps take
  less than half of the start; beyond that, as long as what was asked for is not known.
- No more than `MOST_STEPS` steps: later ones may save or evaluate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from batchfit._profile.pure.steady import FINE, Timing, is_fine, warmup_of

MOST_STEPS = 30
MEMORY_STEPS = 3  # before the first look: an optimizer allocates its state in the first
_SHARE_OF_START = 0.5
_CHUNK = 4


@final
@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Seconds of the steps of one run, and which of them are warm-up."""

    times_s: tuple[float, ...]
    warmup: int

    @classmethod
    def of(cls, times_s: Sequence[float], timing: Timing) -> TimedSteps:
        """Drop the warm-up; a run that ended within it keeps its last step."""
        warmup = warmup_of(times_s, most=timing.most_warmup)
        return cls(tuple(times_s), min(warmup, max(len(times_s) - 1, 0)))

    @property
    def counted(self) -> tuple[float, ...]:
        """Those that count."""
        return self.times_s[self.warmup :]

    def more(self, timing: Timing, *, start_s: float) -> int:
        """How many steps more to take; 0 where this is enough."""
        left = MOST_STEPS - MEMORY_STEPS - len(self.times_s)
        if left <= 0:
            return 0
        still_warming = warmup_of(self.times_s, most=timing.most_warmup) >= len(self.times_s)
        if still_warming:
            return min(_CHUNK, left)
        known = timing.is_enough(self.counted)
        finely = is_fine(self.counted) or FINE.is_enough(self.counted)
        cheap = math.fsum(self.times_s) < _SHARE_OF_START * start_s
        if finely or (known and not cheap):
            return 0
        return min(max(_CHUNK, timing.least - len(self.counted)), left)
