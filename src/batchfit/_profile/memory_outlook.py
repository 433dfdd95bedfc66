"""The largest size that fits, estimated from the peaks of the sizes timed so far."""

from __future__ import annotations

from typing import final

from batchfit._find.pure.memory_curve import Curve, MemoryReading, cache_is_releasable
from batchfit._profile.timing import TimedRun


@final
class MemoryOutlook:
    """The readings of one profile."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._readings: list[MemoryReading] = []
        self._held_bytes: int | None = None  # the least that any size has held between steps

    def learn(self, run: TimedRun) -> None:
        """Take the readings of one more run, where it has any."""
        if not run.fits or run.peaks is None:
            return
        reading = MemoryReading.of(
            run.size,
            run.peaks.allocated_bytes,
            reserved_bytes=run.peaks.reserved_bytes,
            split_bytes=run.peaks.split_bytes,
            releases=cache_is_releasable(run.peaks.allocated_bytes, retries=run.alloc_retries),
        )
        if run.held_bytes is not None:
            known = (run.held_bytes, self._held_bytes)
            self._held_bytes = min(one for one in known if one is not None)
        if reading is not None:
            self._readings = [one for one in self._readings if one.size != run.size]
            self._readings = sorted([*self._readings, reading], key=lambda one: one.size)

    def limit(self) -> int | None:
        """The largest size that memory allows, as the readings have it; None where they say nothing."""
        if not self._readings:
            return None
        outlook = Curve.through(
            self._readings, budget_bytes=self.budget_bytes, floor_bytes=self._held_bytes
        ).outlook()
        most = max(outlook.safe, outlook.low, float(self._readings[-1].size))
        return None if most == float("inf") or most > 2**40 else int(most)
