"""What measured peaks say about the sizes that were not tried.

Rules:
- The peak of a step is `max over t of (A_t + B_t * size)`, with `A_t` at least what is held between
  steps: convex, piecewise linear, flat at small sizes where the optimizer step is the peak.
- So a ray from the floor through a reading is an upper bound beyond it (`safe`: sizes below its crossing
  fit), and a chord through two readings is a lower bound beyond them (`likely`: about where it ends).
  Sizes 1 and 2 alone prove nothing: what has not grown yet may grow at the next size.
- A reading is wrong by up to `NOISE` until three readings on one line show that readings are exact, or
  better. A failure that no such error explains is a knee: the curve turns up beyond the last reading.
- Readings that are multiples of 2 MiB are rounded up to them, and wrong by up to that.
- Fragmentation grows with the size of blocks. A program of small blocks fills `LIVE_SHARE` of the budget with
  live tensors; one with a few large blocks (a language model's logits) leaves inactive split blocks that
  nobody can use, and the reserved bytes count.
- Nothing here knows about trials: the memory model proposes sizes, the bracket of the search limits them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Readings vary with the size (rounding, workspaces chosen by what is free, fragmentation).
NOISE = 0.03
# Live tensors alone vary less: 0.3 % on eight models on an H200.
LIVE_NOISE = 0.01
# Reserved bytes of a program that is known to have large blocks.
COARSE_NOISE = 0.02
# The least error that a line through readings is granted.
FINEST = 0.003
# Readings are exact if three of them are off one line by at most this share: with noise of 3 % that is chance
# in one case of 500. Their error is then a share of what they grow by.
_EXACT_READING_SHARE = 0.00002
# Segments of a caching allocator are multiples of this (kRoundLarge in CUDACachingAllocator.cpp).
_SEGMENT_BYTES = 2 * 2**20
# Three readings that an error of x puts on one line may well hide one of several x.
_HIDDEN_ERROR_FACTOR = 8.0
# A growth counts as seen when it is this many times what the errors of its two readings can feign.
_CLEAR_GROWTH_FACTOR = 2.0
# The share of the budget that live tensors fill where the cache can be released. Measured
# on an H200 under a cap: convolutional nets and ViT run at 96 to 98.9 %, and fail at 98.1 to 98.9 %.
LIVE_SHARE = 0.972
# Blocks are small if the largest is at most this share of the live tensors. 28 models and precisions under 3
# budgets, replayed: up to 0.059 they run at 96.9 to 99.6 %, from 0.076 on at 85 to 96 %.
_SMALL_BLOCK_SHARE = 0.065
# Fragmentation grows with large blocks: where less than the first share of the budget is reserved, live
# tensors are counted as if they could fill the second share at most.
_NEAR_BUDGET_SHARE = 0.9
_LARGE_BLOCK_LIVE_SHARE = 0.95
# With nothing known of the blocks: inactive split blocks up to this share of the live tensors leave all of
# the budget usable (ConvNeXt, ViT); 7 % do not (GPT-2).
_SMALL_SPLIT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The bytes of the budget that one size needs, and how far off they may be.

    Not `firm`: the allocator reserved more, and a larger size shows whether it releases that. Errors are a
    share of the need without `aside_bytes`, which weights take at any size.
    """

    size: int
    need_bytes: float
    noise: float = NOISE
    firm: bool = True
    aside_bytes: float = 0.0

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

        Live tensors (`allocated_bytes`) are a lower bound. Reserved bytes are an upper bound, since a caching
        allocator releases unsplit segments before it raises. Live tensors plus inactive split blocks
        (`split_bytes`), which it cannot release, are another. The lower upper bound decides, unless the cache
        is releasable (`releases`): then live tensors decide, as they do where that is unknown (None) and the
        inactive split blocks are small. Where it is not, fragmentation grows on the way to `budget_bytes`.
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
    """Whether cached memory can be released and used, from the peaks of a trial that ran; None: unknown.

    It can where the largest block is small. Without that reading, a trial that retried an allocation and
    went on has shown that some was released.
    """
    if allocated_bytes and largest_bytes:
        return largest_bytes <= _SMALL_BLOCK_SHARE * allocated_bytes
    return True if retries else None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where the memory ends, seen from the readings so far; sizes as real numbers."""

    safe: float  # fits, if the readings are no worse than their noise (the ray)
    careful: float  # the chord with the steepest slope that the error allows
    low: float  # the memory ends between low ...
    high: float  # ... and high, if the last readings lie on one line
    likely: float  # in the middle
    aim: float  # from low to likely, the better what was read is known
    error: float  # what the readings are granted
    straight: bool  # three readings are seen to lie on one line
    grows: bool  # the peak is seen to grow with the size
    chord: float = math.inf  # where the line through the first reading and the last ends


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
    precise: bool = False  # three readings on one line have shown that they are exact

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
        curve = cls(points, budget_bytes, floor)
        return replace(curve, precise=curve._is_precise())

    @property
    def noise(self) -> float:
        """The share of a reading that it may be wrong by."""
        return FINEST if self.precise else self.readings[-1].noise

    @property
    def rounding_bytes(self) -> float:
        """What the allocator rounds each reading up by, at most: all are multiples of that."""
        whole = all(one.need_bytes % _SEGMENT_BYTES == 0 for one in self.readings)
        return _SEGMENT_BYTES if whole else 0.0

    def _error(self, one: MemoryReading, noise: float | None = None) -> float:
        """How many bytes the reading may be off by."""
        if noise is None:
            noise = FINEST if self.precise else one.noise
        return noise * self._scale(one) + (self.rounding_bytes if self.precise else 0.0)

    def _scale(self, one: MemoryReading) -> float:
        """The bytes that errors are a share of: what grows, where readings are exact."""
        if self.precise:
            return one.need_bytes - self.readings[0].need_bytes
        return one.need_bytes - one.aside_bytes

    def _is_precise(self) -> bool:
        """Three readings on one line, rising or flat, show that they are exact."""
        if any(one.noise != NOISE for one in self.readings):
            return False
        last = len(self.readings) - 1
        return any(self._off_line(middle, middle + 1) <= _EXACT_READING_SHARE for middle in range(1, last))

    def safe(self) -> float:
        """The largest size that fits for sure if no reading is low by more than its noise (the ray)."""
        room, floor = self.budget_bytes - self.floor_bytes, self.floor_bytes
        return max(one.size * _over(room, one.need_bytes + self._error(one) - floor) for one in self.readings)

    def outlook(self, *, failed: int | None = None, setbacks: int = 0) -> Outlook:
        """What to expect, given the smallest size that failed and the number of failures in a row."""
        if len(self.readings) == 1:
            return self._first_outlook()
        noise = self.noise
        anchor, error, straight = self._line(noise)
        base, last = self.readings[anchor], self.readings[-1]
        near = self.readings[anchor + 1 :]
        safe = self.safe()
        granted = error
        if failed is not None and failed <= min(self._crossing(base, one, 0.0) for one in near):
            granted = noise  # the line promised a size that failed
        grows = self._grows(0, len(self.readings) - 1, noise)
        rise = last.need_bytes - base.need_bytes
        if grows:
            rise += self._error(last, granted) + self._error(base, granted)
        else:
            rise += sum(one.noise * (one.need_bytes - one.aside_bytes) for one in (base, last))
        careful = last.size + _over((self.budget_bytes - last.need_bytes) * (last.size - base.size), rise)
        low, high, needed = self._between(base, near, granted * 2 ** max(0, setbacks - 1), failed)
        if failed is not None and needed > granted and (straight or self.precise):
            # No error of the readings explains the failure: the curve has turned up since the last of them.
            safe = min(max(safe, last.size), failed)
            return Outlook(safe, safe, safe, failed, failed, safe, error, False, True)
        end = float(failed or math.inf)
        likely = 2 / (1 / low + 1 / high) if grows and math.isfinite(low) else math.inf
        low, high, likely = min(low, end), min(high, end) if grows else end, min(likely, end)
        trust = (NOISE - last.noise) / (NOISE - LIVE_NOISE)
        aim = low + trust * (likely - low) if math.isfinite(likely) else low
        chord = self._crossing(self.readings[0], last, 0.0)
        return Outlook(safe, careful, low, high, likely, aim, error, straight, grows, chord)

    def _first_outlook(self) -> Outlook:
        """One reading: a ray, with its error and without."""
        one, safe, floor = self.readings[0], self.safe(), self.floor_bytes
        likely = one.size * _over(self.budget_bytes - floor, one.need_bytes - floor)
        return Outlook(safe, safe, safe, likely, likely, safe, one.noise, False, True)

    def _line(self, noise: float) -> tuple[int, float, bool]:
        """Which reading the line to the last one starts from, its error, and whether a line is seen."""
        last = len(self.readings) - 1
        if noise <= FINEST:
            apart = (i for i in range(last) if self._grows(i, last, noise))
        else:
            apart = (i for i in range(last) if 2 * self.readings[i].size <= self.readings[last].size)
        anchor = max(apart, default=0)
        if anchor > 0:
            error = max(self._line_error(anchor, i) for i in range(anchor + 1, last + 1))
            if not (self.precise and error > noise) and self._grows(anchor - 1, anchor, min(error, noise)):
                return anchor, min(error, noise), True
        return anchor, noise, False

    def _line_error(self, middle: int, last: int) -> float:
        """The error that three readings so close to a line may hide."""
        return max(FINEST, _HIDDEN_ERROR_FACTOR * self._off_line(middle, last))

    def _off_line(self, middle: int, last: int) -> float:
        """The error that lets the readings before `middle`, at it and at `last` lie on one line."""
        first, base, end = self.readings[middle - 1], self.readings[middle], self.readings[last]
        reach = (end.size - base.size) / (base.size - first.size)
        expected = (1 + reach) * base.need_bytes - reach * first.need_bytes
        weight = self._scale(end) + (1 + reach) * self._scale(base) + reach * self._scale(first)
        off = max(0.0, abs(end.need_bytes - expected) - (1 + reach) * self.rounding_bytes)
        return off / weight

    def _grows(self, first: int, second: int, error: float) -> bool:
        """The growth between two readings stands out from their error."""
        low, high = self.readings[first], self.readings[second]
        feigned = (
            _CLEAR_GROWTH_FACTOR * error * (self._scale(high) + self._scale(low)) + 2 * self.rounding_bytes
        )
        return high.need_bytes - low.need_bytes > feigned

    def _crossing(self, base: MemoryReading, one: MemoryReading, error: float) -> float:
        """Where the line from `base` through `one`, read wrong by `error`, meets the budget."""
        wrong = math.copysign(self._error(one, abs(error)), error) if error else 0.0
        rise = one.need_bytes + wrong - base.need_bytes
        return base.size + (one.size - base.size) * _over(self.budget_bytes - base.need_bytes, rise)

    def _between(
        self, base: MemoryReading, near: Sequence[MemoryReading], error: float, failed: int | None
    ) -> tuple[float, float, float]:
        """What all readings after `base` allow; the error grows until that agrees with all outcomes."""
        largest = near[-1].size
        while error < 0.5:
            low = max(self._crossing(base, one, error) for one in near)
            high = min(self._crossing(base, one, -error) for one in near)
            if low <= high and high > largest and (failed is None or low < failed):
                return low, high, error
            error *= 1.5
        return float(largest), math.inf, error


def _over(value: float, by: float) -> float:
    """`value / by`, and infinity where there is no growth to divide by."""
    return value / by if by > 0 else math.inf
