"""The peak as a function of the size, estimated from measured peaks, with how sure it is.

Rules:
- The peak of a step is `max over t of (A_t + B_t * size)`, with `A_t` at least what is held between
  steps: convex, piecewise linear, flat at small sizes where the optimizer step is the peak.
- So a ray from the floor through a reading is an upper bound beyond it (`safe`: sizes below its crossing
  fit), and a chord through two readings is a lower bound beyond them (`likely`: about where it ends).
  Sizes 1 and 2 alone prove nothing: what has not grown yet may grow at the next size.
- A reading is wrong by up to `NOISE` until three readings on one line show that they are better.
- Gaps in an allocator's memory are as large as its blocks. A program of small blocks fills `LIVE_SHARE` of
  the budget with live tensors; one with a few large blocks (a language model's logits) leaves
  inactive split blocks that nobody can use, and what the allocator took (`reserved`) counts.
- Nothing here knows about trials: the model proposes, the bracket of the search disposes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Readings wobble with the size (rounding, workspaces chosen by what is free, fragmentation).
NOISE = 0.03
# Live tensors alone wobble less: 0.3 % on eight models on an H200.
LIVE_NOISE = 0.01
# What was taken, of a program that is known to have large blocks.
COARSE_NOISE = 0.02
FINEST = 0.003
# Three readings that an error of x puts on one line may well hide one of several x: at 1, 0.3 OOMs more.
_HIDDEN_ERROR_FACTOR = 8.0
# A growth counts as seen when it is this many times what the errors of its two readings can feign: at 1,
# trials of noisy curves +1.6 %.
_CLEAR_GROWTH_FACTOR = 2.5
# The share of the budget that live tensors fill where inactive split blocks do not stand in the way. Measured
# on an H200 under a cap: convolutional nets and ViT run at 96 to 98.9 %, and fail at 98.1 to 98.9 %.
LIVE_SHARE = 0.972
# Blocks are small if the largest is at most this share of the live tensors. 28 models and precisions under 3
# budgets, replayed: up to 0.059 they run at 96.9 to 99.6 %, from 0.076 on at 85 to 96 %.
_SMALL_BLOCK_SHARE = 0.065
# Inactive split blocks grow with large blocks: far from the budget, below this share of it, they count as
# at least what keeps live tensors from filling more than the other. Without it 0.05 OOMs more in 84 replays.
_NEAR_BUDGET_SHARE = 0.9
_LARGE_BLOCK_LIVE_SHARE = 0.95
# With nothing known of the blocks: inactive split blocks up to this share of the live tensors do not
# stand in the way (ConvNeXt, ViT); 7 % do (GPT-2).
_SMALL_SPLIT_SHARE = 0.05
# One reading cannot separate fixed from growing memory: a quarter of what is above the floor counts as fixed.
_FIRST_READING_FIXED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The bytes of the budget that one size needs, and how far off they may be.

    Not `firm`: the allocator took more than that, and a larger size will show whether it hands it back.
    """

    size: int
    need_bytes: float
    noise: float = NOISE
    firm: bool = True

    @classmethod
    def of(
        cls,
        size: int,
        allocated_bytes: int | None,
        *,
        reserved_bytes: int | None = None,
        split_bytes: int | None = None,
        releases: bool | None = None,
        budget_bytes: int | None = None,
    ) -> MemoryReading | None:
        """What the peaks of a trial that ran say it needs; None where they say nothing.

        Live tensors (`allocated_bytes`) are a lower bound. What a caching allocator took (`reserved_bytes`)
        is an upper bound, since it hands back unsplit segments before it gives up; live tensors plus the
        inactive split blocks (`split_bytes`), which it cannot release, are another. The lower of the
        two decides, unless they can be released (`releases`): then live tensors decide, as they do
        where nothing is known of that (None) and they are small. Where they cannot, they grow on the way
        to `budget_bytes`.
        """
        if not allocated_bytes or allocated_bytes < 0:
            return cls(size, float(reserved_bytes)) if reserved_bytes and reserved_bytes > 0 else None
        if reserved_bytes is None or reserved_bytes < allocated_bytes:
            return cls(size, float(allocated_bytes))
        upper = min(
            reserved_bytes, allocated_bytes + (reserved_bytes if split_bytes is None else split_bytes)
        )
        firm = upper == reserved_bytes
        if releases or (releases is None and upper <= (1 + _SMALL_SPLIT_SHARE) * allocated_bytes):
            return cls(size, allocated_bytes / LIVE_SHARE, LIVE_NOISE)
        if releases is None:
            return cls(size, float(upper), firm=firm)
        far = budget_bytes is not None and upper < _NEAR_BUDGET_SHARE * budget_bytes
        return cls(
            size, max(upper, allocated_bytes / _LARGE_BLOCK_LIVE_SHARE if far else 0.0), COARSE_NOISE, firm
        )


def cache_is_releasable(
    allocated_bytes: int | None, *, largest_bytes: int | None = None, retries: int = 0
) -> bool | None:
    """Whether what lies idle in the allocator can be used, from the peaks of a trial that ran; None: unknown.

    It can where the largest block is small. Without that reading a trial that had to retry an allocation, and
    went on, has shown that something was released.
    """
    if allocated_bytes and largest_bytes:
        return largest_bytes <= _SMALL_BLOCK_SHARE * allocated_bytes
    return True if retries else None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where the memory ends, seen from the readings so far; sizes as real numbers."""

    safe: float  # fits, if the readings are no worse than NOISE (the ray)
    careful: float  # the chord with the steepest slope that the error allows
    low: float  # the memory ends between low ...
    high: float  # ... and high, if the last readings lie on one line
    likely: float  # in the middle
    aim: float  # from low to likely, the better what was read is known
    error: float  # what the readings are granted
    straight: bool  # three readings are seen to lie on one line


@dataclass(frozen=True, slots=True)
class Curve:
    """The readings of sizes that ran, ascending, under one budget.

    >>> readings = [MemoryReading(1, 300.0), MemoryReading(8, 1000.0), MemoryReading(20, 2200.0)]
    >>> round(Curve.through(readings, budget_bytes=4100).outlook().likely)
    39
    """

    readings: tuple[MemoryReading, ...]
    budget_bytes: int
    floor_bytes: float

    @classmethod
    def through(
        cls, readings: Sequence[MemoryReading], *, budget_bytes: int, floor_bytes: float | None = None
    ) -> Curve:
        """The curve through `readings` of sizes that ran, over the floor of what is held between steps."""
        if not readings:
            raise ValueError("readings must hold at least one reading, not []")
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes must be positive, not {budget_bytes!r}")
        # One size has one reading, the highest; a size that ran needed no more than there is.
        by_size = {one.size: one for one in sorted(readings, key=lambda one: one.need_bytes)}
        points = tuple(
            replace(by_size[size], need_bytes=min(by_size[size].need_bytes, float(budget_bytes)))
            for size in sorted(by_size)
        )
        # A floor above a peak is no floor.
        floor = min(max(0.0, floor_bytes or 0.0), *(one.need_bytes for one in points), math.inf)
        return cls(points, budget_bytes, floor)

    def safe(self) -> float:
        """The largest size that fits for sure if no reading is low by more than its noise (the ray)."""
        room, floor = self.budget_bytes - self.floor_bytes, self.floor_bytes
        return max(one.size * _over(room, one.need_bytes * (1 + one.noise) - floor) for one in self.readings)

    def outlook(self, *, failed: int | None = None, setbacks: int = 0) -> Outlook:
        """What to expect, given the smallest size that failed and the number of failures in a row."""
        if len(self.readings) == 1:
            return self._first_outlook()
        anchor, error, straight = self._line()
        base, last = self.readings[anchor], self.readings[-1]
        near = self.readings[anchor + 1 :]
        granted = error
        if failed is not None and failed <= min(self._crossing(base, one, 0.0) for one in near):
            granted = NOISE  # the line promised a size that failed
        rise = last.need_bytes - base.need_bytes + granted * (last.need_bytes + base.need_bytes)
        careful = last.size + _over((self.budget_bytes - last.need_bytes) * (last.size - base.size), rise)
        low, high = self._between(base, near, granted * 2 ** max(0, setbacks - 1), failed)
        likely = 2 / (1 / low + 1 / high) if math.isfinite(low) else math.inf
        trust = (NOISE - last.noise) / (NOISE - LIVE_NOISE)
        aim = low + trust * (likely - low) if math.isfinite(likely) else low
        return Outlook(self.safe(), careful, low, high, likely, aim, error, straight)

    def _first_outlook(self) -> Outlook:
        """One reading: a ray, and a guess at what is fixed."""
        one, safe = self.readings[0], self.safe()
        fixed = self.floor_bytes + _FIRST_READING_FIXED_SHARE * (one.need_bytes - self.floor_bytes)
        likely = one.size * _over(self.budget_bytes - fixed, one.need_bytes - fixed)
        return Outlook(safe, safe, safe, likely, likely, safe, one.noise, False)

    def _line(self) -> tuple[int, float, bool]:
        """Which reading the line to the last ones starts from, its error, and whether a line is seen."""
        last = len(self.readings) - 1
        end = self.readings[last]
        # Exact readings: the nearest three on one line say most, however close they are.
        for middle in range(last - 1, 0, -1):
            error = self._line_error(middle, last)
            if (
                error <= FINEST
                and self._grows(middle - 1, middle, error)
                and self._grows(middle, last, error)
            ):
                return middle, error, True
        # Noisy ones: start far enough away that the growth outweighs the noise.
        anchor = max(
            (i for i in range(last) if 2 * self.readings[i].size <= self.readings[last].size), default=0
        )
        if anchor > 0:
            error = min(end.noise, max(self._line_error(anchor, i) for i in range(anchor + 1, last + 1)))
            if self._grows(anchor - 1, anchor, error):
                return anchor, error, True
        return anchor, end.noise, False

    def _line_error(self, middle: int, last: int) -> float:
        """The error that lets the readings before `middle`, at it and at `last` lie on one line."""
        first, base, end = self.readings[middle - 1], self.readings[middle], self.readings[last]
        reach = (end.size - base.size) / (base.size - first.size)
        expected = (1 + reach) * base.need_bytes - reach * first.need_bytes
        weight = end.need_bytes + (1 + reach) * base.need_bytes + reach * first.need_bytes
        return max(FINEST, _HIDDEN_ERROR_FACTOR * abs(end.need_bytes - expected) / weight)

    def _grows(self, first: int, second: int, error: float) -> bool:
        """The growth between two readings stands out from their error."""
        low, high = self.readings[first].need_bytes, self.readings[second].need_bytes
        return high - low > _CLEAR_GROWTH_FACTOR * error * (high + low)

    def _crossing(self, base: MemoryReading, one: MemoryReading, error: float) -> float:
        """Where the line from `base` through `one`, read wrong by `error`, meets the budget."""
        rise = one.need_bytes * (1 + error) - base.need_bytes
        return base.size + (one.size - base.size) * _over(self.budget_bytes - base.need_bytes, rise)

    def _between(
        self, base: MemoryReading, near: Sequence[MemoryReading], error: float, failed: int | None
    ) -> tuple[float, float]:
        """What all readings after `base` allow; the error grows until that agrees with all outcomes."""
        largest = near[-1].size
        while error < 0.5:
            low = max(self._crossing(base, one, error) for one in near)
            high = min(self._crossing(base, one, -error) for one in near)
            if low <= high and high > largest and (failed is None or low < failed):
                return low, high
            error *= 1.5
        return float(largest), math.inf


def _over(value: float, by: float) -> float:
    """`value / by`, and infinity where there is no growth to divide by."""
    return value / by if by > 0 else math.inf
