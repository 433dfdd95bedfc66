"""The next size where measured peaks lie on one line, up to the allocator's rounding.

Rules of the line (`line_end`):
- Errors are bytes, not shares: a reading is above the line by at most what the allocator adds to it. So
  weights that fill most of the budget make no reading worse.
- Nothing is fitted. All lines that agree with every reading and every failure are kept, and the answer is the
  lowest and the highest size at which one of them ends. Where no line is left there is no answer: the curve
  has turned up, and `by_curve` decides.
- Three readings are needed, and they must grow by more than what is rounded: two lie on a line always.

Rules of the sizes (`by_line`):
- At most `_MOST_SIZES` sizes, one OOM, and one stability check more than needed.
- What is `sure` is tried for its reading while that says more, and as the answer once an OOM was met.
- One OOM is risked where what is rounded up leaves more open than the tolerance.
- A size that a line promised, and that fails, says that the curve turns up before it (a knee).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchfit._find.pure.bracket import EXACT_SOAK_SHARE, Bracket, Request, State, enough, settle

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
# Evidence for what follows: benchmarks/search_ablation.py; "lines" and "knees" are those of
# benchmarks/search_crowded.py.
# A line may turn up beyond what was read: no further than so many times the largest size that ran. Without it
# a knee costs 0.17 OOMs more; at 4 a line takes up to 8 sizes.
_LARGEST_LEAP_RATIO = 10.0
# So many sizes are enough for a line: then what is sure is the answer, also if that is so much less than what
# may be had, where rounding leaves more open than the tolerance. Without it lines take 1.8 % more trials and
# 0.04 more OOMs, for 0.2 % of the answer.
_MOST_SIZES = 6
_LATE_SHORTFALL_SHARE = 0.15
# While readings do not grow: how far beyond what is sure, since a slope that steep would be chance. At 1.0
# and 1.8 two lines of 80 % fixed take 8 sizes.
_FLAT_RATIO = 1.6

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


def line_of(state: State, bracket: Bracket, *, failed: int | None) -> LineEnd | None:
    """Where the line through the readings ends; None where they lie on none or show an allocator's cache."""
    ran = [one for one in state.observations if one.fits and (bracket.bad is None or one.size < bracket.bad)]
    if state.budget_bytes is None or any(one.reserved_bytes for one in ran):
        return None
    highest: dict[int, int] = {}
    for one in ran:
        if one.allocated_bytes:
            highest[one.size] = max(highest.get(one.size, 0), one.allocated_bytes)
    floor = min((one.held_bytes for one in ran if one.held_bytes), default=0)
    points = sorted(highest.items())
    end = line_end(points, budget_bytes=state.budget_bytes, floor_bytes=floor, failed=failed)
    return end if end is not None and end.high >= (bracket.good or 0) else None


def at_knee(state: State, bracket: Bracket) -> Request | None:
    """The next size where the readings lie on a line that promised a size which failed.

    No error explains that: the curve turns up between the two, nobody knows where.
    """
    end = None if bracket.bad is None else line_of(state, bracket, failed=None)
    if end is None or bracket.bad is None or not end.clear or end.sure < bracket.bad:
        return None
    if bracket.setbacks == 1 and state.observations[-1].soak:
        return None  # it may have run for a few steps, and a little less may last
    size = bracket.place(math.sqrt((bracket.good or 1) * bracket.bad))
    return Request(size, state.soak and enough(size, bracket.largest, state.tolerance))


def by_line(state: State, bracket: Bracket, end: LineEnd) -> Request | str | None:
    """The next size, or the end; None where the line says too little."""
    good = bracket.good or bracket.sizes.first
    most = bracket.sizes.at(max(0, bracket.sizes.index(min(end.high, bracket.largest))))
    sure = bracket.sizes.at(max(0, bracket.sizes.index(min(end.sure, bracket.largest))))
    leap = _LARGEST_LEAP_RATIO * good
    if state.tolerance == 0:
        return _exactly(state, bracket, end, good=good, most=most)
    if enough(good, most, state.tolerance):
        return settle(state, bracket, "within_tolerance")
    soaks = sum(one.soak for one in state.observations)
    if soaks > 1 and bracket.sustained == good and enough(good, most, 2 * state.tolerance):
        return settle(state, bracket, "within_tolerance")
    tried = len({one.size for one in state.observations})
    sure_is_more = not enough(good, sure, state.tolerance)
    if most > leap or (bracket.bad is None and end.wide and sure_is_more):
        if sure <= good:
            return None
        size = bracket.place(min(sure, leap))
        return Request(size, state.soak and enough(size, most, state.tolerance))
    if bracket.bad is not None or tried + 1 + sure_is_more > _MOST_SIZES:
        late = tried >= _MOST_SIZES and end.rounding > state.tolerance * good
        late = late and enough(good, sure, _LATE_SHORTFALL_SHARE)
        if late or not sure_is_more:
            return settle(state, bracket, "within_tolerance")
        return Request(bracket.place(sure), state.soak)
    if enough(sure, most, state.tolerance) and sure > good:
        return Request(bracket.place(sure), state.soak)
    if soaks > 1:
        return settle(state, bracket, "within_tolerance")
    low = max(end.low, good)
    target = low if enough(low, most, state.tolerance) else (low + most) / 2
    return Request(bracket.place(target), state.soak and not soaks)


def within_rounding(state: State, bracket: Bracket, end: LineEnd, step: Request) -> Request:
    """The step, no further than readings allow that are rounded up by more than they have grown."""
    good = bracket.good or bracket.sizes.first
    if bracket.bad is not None:
        between = good < end.sure < bracket.bad and state.tolerance > 0
        return Request(bracket.place(end.sure), False) if between else step
    most = min((_FLAT_RATIO if end.flat else 1.0) * end.sure, end.high)
    return step if step.size <= most or most < good else Request(bracket.place(most), False)


def _exactly(state: State, bracket: Bracket, end: LineEnd, *, good: int, most: int) -> Request:
    """Halves what the line leaves open; what it promises is tried first."""
    # What is likely is that nothing is rounded up at the end; only then what rounding leaves open.
    low = math.floor(end.low) if most >= math.floor(end.low) else end.sure
    size = bracket.place((max(good, low) + most) / 2 + bracket.sizes.step / 2)
    return Request(size, state.soak and enough(size, most, EXACT_SOAK_SHARE))
