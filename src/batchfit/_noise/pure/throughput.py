"""Samples per second at any batch size, from step times that were measured at some.

Rules
- Between two measured sizes the time of a step is a line. Below the smallest it stays what it is there: a
  smaller batch is never thought faster than it was seen to be. Above the largest samples/s stay.
- A batch is over all ranks, a measured size is of one process. A process that cuts its part into microbatches
  is as fast as one microbatch: accumulation adds no samples/s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Speed:
    """`speed(batch_size)` in samples/s over all ranks; `points` are (size, seconds per step), by size.

    >>> speed = Speed.of([(8, 0.5), (32, 1.0)])
    >>> speed(4), speed(8), speed(20), speed(64)
    (8.0, 16.0, 26.666666666666668, 32.0)
    """

    points: tuple[tuple[int, float], ...]
    world_size: int = 1
    microbatch_size: int | None = None

    @classmethod
    def of(
        cls, points: Iterable[tuple[int, float]], *, world_size: int = 1, microbatch_size: int | None = None
    ) -> Speed:
        """From points in any order."""
        return cls(tuple(sorted(points)), world_size, microbatch_size)

    def __call__(self, batch_size: int) -> float:
        local = -(-batch_size // self.world_size)
        if self.microbatch_size is not None:
            local = min(local, self.microbatch_size)
        return self.world_size * local / self._step_s(local)

    def _step_s(self, size: int) -> float:
        (first, first_s), (last, last_s) = self.points[0], self.points[-1]
        if size <= first:
            return first_s
        if size >= last:
            return last_s * size / last
        for (low, low_s), (high, high_s) in pairwise(self.points):
            if size <= high:
                return low_s + (high_s - low_s) * (size - low) / (high - low)
        raise AssertionError("a size between the first and the last point")
