"""Readings that lie on one line, up to what an allocator rounds up: between which sizes memory ends.

Rules:
- Errors are bytes, not shares: a reading is above the line by at most what the allocator adds to it. So
  weights that fill most of the budget make no reading worse.
- Nothing is fitted. All lines that agree with every reading and every failure are kept, and the answer is the
  lowest and the highest size at which one of them ends. Where no line is left there is no answer: the curve
  has turned up, and `memory_curve` decides.
- Three readings are needed, and they must grow by more than what is rounded: two lie on a line always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Segments of a caching allocator are multiples of this (kRoundLarge in CUDACachingAllocator.cpp).
SEGMENT_BYTES = 2 * 2**20
# A block takes the rest of its segment up to this (kSmallSize there, and what rounds it to 512 bytes): what
# may come on top of a line.
UNSPLIT_BYTES = 2**20 + 512
# What readings may be multiples of: segments, blocks (kMinBlockSize there), bytes.
_GRAINS = (SEGMENT_BYTES, 512, 1)
# From 10 MiB on a block is a segment by itself and rounded up (kMinLargeAlloc there). How large it is is
# estimated: so a little below.
_LARGE_BLOCK_BYTES = 9 * 2**20
# What is open is worth another reading if it is more than so many times what rounding leaves open anyway:
# without it lines take 0.03 more OOMs (of 0.1).
_WIDE_RATIO = 2.0
# The readings show a line if they grow by at least so many times what they may be off it. Where any growth
# will do, lines of 80 % fixed take 8 sizes.
_GROWTH_PER_ERROR = 4.0

Point = tuple[int, int]  # size, bytes


@dataclass(frozen=True, slots=True)
class LineEnd:
    """Where memory ends if the readings lie on a line; sizes as real numbers."""

    sure: float  # fits by every line that agrees with the readings
    low: float  # the lowest end of such a line, if nothing is rounded up there
    high: float  # the highest
    rounding: float  # how many sizes what is rounded up leaves open, however many are read
    clear: bool  # the readings grow by much more than they may be off
    flat: bool  # they do not grow at all

    @property
    def wide(self) -> bool:
        """A reading at `sure` would say more: the readings leave more open than what is rounded up."""
        return not self.clear or self.high - self.sure > _WIDE_RATIO * self.rounding + 1


def line_end(
    points: Sequence[Point], *, budget_bytes: int, floor_bytes: int = 0, failed: int | None = None
) -> LineEnd | None:
    """The end of the line through the last readings, ascending in size; None where they lie on none."""
    for first in range(len(points) - 2):
        end = _end_through(points[first:], budget_bytes, floor_bytes, failed)
        if end is not None:
            return end
    return None


def _end_through(points: Sequence[Point], budget: int, floor: int, failed: int | None) -> LineEnd | None:
    least, growth = points[0][1], points[-1][1] - points[0][1]
    # Equal readings are as far apart as anything: only their own bytes say what they are multiples of.
    from_bytes = least if growth else 0
    grain = next(one for one in _GRAINS if all((read - from_bytes) % one == 0 for _, read in points))
    if grain == SEGMENT_BYTES:
        # Every reading is so many segments above the others: the last that is within the budget is one, too.
        errors, above = [float(grain)] * len(points), 0.0
        budget -= (budget - least) % grain
    else:
        errors = _errors(points, grain)
        above = float(UNSPLIT_BYTES if budget - least >= _LARGE_BLOCK_BYTES else grain)
    lines = _lines(points, errors, floor, None if failed is None else (failed, budget - above))
    slopes = [slope for _, slope in lines if slope > 0]
    if not slopes:
        return None
    ends = [(budget - at_zero) / slope if slope > 0 else math.inf for at_zero, slope in lines]
    return LineEnd(
        sure=min((budget - above - at_zero) / slope for at_zero, slope in lines if slope > 0),
        low=min(ends),
        high=max(ends),
        rounding=(above or grain) * len(slopes) / sum(slopes),
        clear=growth >= _GROWTH_PER_ERROR * max(errors),
        flat=growth == 0,
    )


def _errors(points: Sequence[Point], grain: int) -> list[float]:
    """How far above the line each reading may be: a large block takes the rest of its segment."""
    (first, least), (last, most) = points[0], points[-1]
    grown = [(most - least) * size / (last - first) for size, _ in points]
    return [float(UNSPLIT_BYTES if one >= _LARGE_BLOCK_BYTES else grain) for one in grown]


def _lines(
    points: Sequence[Point], errors: Sequence[float], floor: int, failed: tuple[int, float] | None
) -> list[tuple[float, float]]:
    """The lines (value at 0, slope) at the corners of all that are within its error below each point.

    They are not below the floor at 0, and above what is left at a size that failed. Empty where none is left.
    """
    # at_zero + slope * size <= value, as (weight of at_zero, of slope, bound)
    limits = [(1.0, float(size), float(read)) for size, read in points]
    limits += [(-1.0, -float(size), error - read) for (size, read), error in zip(points, errors, strict=True)]
    limits += [(-1.0, 0.0, -float(floor)), (0.0, -1.0, 0.0)]
    if failed is not None:
        limits.append((-1.0, -float(failed[0]), -failed[1]))
    slack, corners = 1.0, []
    for i, (a, b, c) in enumerate(limits):
        for d, e, f in limits[i + 1 :]:
            area = a * e - b * d
            if not area:
                continue
            at_zero, slope = (c * e - b * f) / area, (a * f - c * d) / area
            if all(x * at_zero + y * slope <= z + slack for x, y, z in limits):
                corners.append((at_zero, slope))
    return corners
