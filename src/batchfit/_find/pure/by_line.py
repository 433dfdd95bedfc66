"""What to try where the readings lie on a line (`line.py`).

Rules:
- At most `_MOST_SIZES` sizes, one OOM, and one stability check more than needed.
- What is `sure` is tried for its reading while that says more, and as the answer once an OOM was met.
- One OOM is risked where what is rounded up leaves more open than the tolerance.
- A size that a line promised, and that fails, says that the curve turns up before it (a knee).
"""

from __future__ import annotations

import math

from batchfit._find.pure.bracket import EXACT_SOAK_SHARE, Bracket, Request, State, enough, settle
from batchfit._find.pure.line import LineEnd, line_end

# Evidence: benchmarks/search_ablation.py; "lines" and "knees" are those of benchmarks/search_crowded.py.
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
