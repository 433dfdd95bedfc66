"""The next size of a command's search, where each trial starts a whole program, whether it fits or not.

Rules:
- The peak is convex in the size, and no part of it begins below what is held between steps. So the ray from
  there through a reading meets the budget at or below the end, and the chord through two readings at or above
  it: the end is between the two, or below a size that failed.
- While they are far apart the next size is between them by ratio: readings of the flat part of a curve, where
  the optimizer step is the peak, say nothing of where the rest begins. One OOM is worth a start or two.
- Once they are near, the size at the chord is tried: the search ends if it fits.
- A failure at or below the ray is none that readings explain (a block that finds no gap): then it bisects.
- Each start beyond `_FULL_STARTS` must gain more than the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from batchfit._find.pure.bracket import Bracket, Request, State, enough, settle
from batchfit._find.pure.by_curve import plain_curve_of
from batchfit._find.pure.memory_curve import Curve

# Of two sizes that cost the same, the one whose peak hides less: 5 % fewer starts than from 1.
FIRST_SIZE = 2
# Evidence for what follows: benchmarks/search_programs.py. From the ray (0) to the chord (1), by ratio.
_CHORD_EXPONENT = 0.4
_LARGEST_LEAP_RATIO = 16.0  # however flat the readings are, so many times the largest size that ran
_NEAR_RATIO = 1.2  # from the ray to the chord: near enough to try the chord
_NEAR_FAILURE_RATIO = 2.0  # from the ray to a size that failed: near enough to try the ray
_BASE_RATIO = 0.97  # a chord begins at a reading so much below the last: nearer ones have the same errors
_FULL_STARTS = 7


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Where the end is: sizes as real numbers."""

    good: int  # ran
    ray: float  # fits, by the readings; at least `good`
    chord: float  # does not, by the readings or by a failure
    upper: int  # the largest size that may fit
    failed: bool  # a size has failed
    by_readings: bool  # `chord` is that of readings, and not a size that failed
    readings: int


def by_starts(state: State, bracket: Bracket) -> Request | str | None:
    """The next size, or the end; None where there are no readings, or the answer is to be exact."""
    curve = plain_curve_of(state, bracket)
    if curve is None or not state.tolerance or bracket.good is None:
        return None
    starts = len({one.size for one in state.observations})
    tolerance = state.tolerance * max(1, starts - _FULL_STARTS + 1)
    most = bracket.largest
    chord = _chord(curve)
    ray = _ray(curve)
    explained = bracket.bad is None or min(ray, chord) < bracket.bad
    upper = bracket.sizes.at(max(0, bracket.sizes.index(min(chord, most)))) if explained else most
    if enough(bracket.good, upper, tolerance):
        return settle(state, bracket, "within_tolerance")
    outlook = _Outlook(
        good=bracket.good,
        ray=max(min(ray, chord, float(most)), float(bracket.good)),
        chord=min(chord, float(most)),
        upper=upper,
        failed=bracket.bad is not None,
        by_readings=len(curve.readings) > 1 and chord < most,
        readings=len(curve.readings),
    )
    target = _target(outlook) if explained else float(bracket.middle())
    size = bracket.place(target)
    return Request(size, state.soak and enough(size, upper, tolerance))


def _target(at: _Outlook) -> float:
    """The next size, as a real number."""
    if at.readings == 1 and not at.failed:
        return at.ray
    if (at.by_readings or not at.failed) and at.chord <= _NEAR_RATIO * at.ray:
        return max(at.ray, float(at.upper))
    if not at.failed:
        between = float(at.ray ** (1 - _CHORD_EXPONENT) * at.chord**_CHORD_EXPONENT)
        return max(at.ray, min(between, _LARGEST_LEAP_RATIO * at.good))
    if at.chord > _NEAR_FAILURE_RATIO * at.ray:
        return math.sqrt(at.ray * at.chord)
    return at.ray if at.ray >= at.good + 1 else (at.good + at.upper + 1) / 2


def _ray(curve: Curve) -> float:
    """Up to here the program fits if no part of its peak begins below what is held."""
    if len(curve.readings) == 1:
        return curve.safe()  # what is held has a part of this batch in it, and nothing says how much
    room, floor = curve.budget_bytes - curve.floor_bytes, curve.floor_bytes
    return max(_over(one.size * room, one.need_bytes - floor) for one in curve.readings)


def _chord(curve: Curve) -> float:
    """Beyond here it does not fit; infinity where the readings do not grow."""
    if len(curve.readings) == 1:
        return math.inf
    last = curve.readings[-1]
    below = [one for one in curve.readings[:-1] if one.size <= _BASE_RATIO * last.size]
    base = below[-1] if below else curve.readings[0]
    rise = last.need_bytes - base.need_bytes
    return last.size + _over((curve.budget_bytes - last.need_bytes) * (last.size - base.size), rise)


def _over(value: float, by: float) -> float:
    return value / by if by > 0 else math.inf
