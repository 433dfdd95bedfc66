"""The next size where peaks are not on one line: between an estimate that is surely safe and a likely one.

Rules of the curve (`curve_of`; what it says is in `memory_curve`):
- A size has one reading, the highest. Sizes at or above one that failed are not read.
- What readings are granted is a share of them. Where weights fill the budget (LoRA, inference, a plain step
  that loads its own), that share would outweigh the room that is left: then so much is set aside of all
  figures that the rest of the budget looks like that of any other program.

Rules of the sizes (`by_curve`):
- One reading gives a ray only. Two give a chord, which a curve that turns up ends below. Three on one line,
  within their errors, are believed.
- A step that cannot reach what is worth a trial is not taken: then the search ends, with a stability check of
  the size at which memory is expected to end.
- After a failure the next size lies between what ran and what failed, the nearer the better the readings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from batchfit._find.pure.bracket import (
    EXACT_SOAK_SHARE,
    Bracket,
    Observation,
    Request,
    State,
    enough,
    settle,
)
from batchfit._find.pure.by_line import SEGMENT_BYTES
from batchfit._find.pure.memory_curve import COARSE_NOISE, FINEST, NOISE, Curve, Outlook

# Evidence: benchmarks/search_ablation.py, the largest move of any group where the constant does nothing.
# Held bytes unknown: part of any peak is fixed, so the first step may go so many times beyond the ray.
# Without it noisy curves take 4.5 % more trials; where nothing is fixed, 15 % fewer.
_FIRST_STEP_PER_RAY = 1.5
# How far from the ray (0) to the chord (1), by ratio, while no straight line has been seen: trials of
# unusual curves +26 %.
_CHORD_EXPONENT = 0.55
# Up to so many times what ran the end is near: steps below half of what is left are not worth a trial:
# trials +4.3 %.
_NEAR_END_RATIO = 2.0
# A size is worth a trial if the chord, shortened by this share of the readings' error, reaches it:
# trials of noisy curves +11 %.
_DOUBTED_ERROR_SHARE = 0.85
# The ray of the first reading ends within so many times its size: the next size may well be the last
# (trials +1.8 %). Not where that reading is more than a share of the budget: then weights fill it (+1.4 %).
_LAST_STEP_RATIO = 2.5
_LAST_STEP_BUDGET_SHARE = 0.65
# Whatever the readings say: a step that allocates elsewhere than where they are taken has none to show. Where
# nothing is fixed, 0.3 OOMs more without the first; 0.01 on unusual curves without the second.
_LARGEST_STEP_RATIO = 512
_LARGEST_STEP_PER_RAY = 8
# With a known floor no size is tried further beyond the ray than this: 0.04 OOMs at knees.
_STEP_PER_RAY = 1.1
# Where much is set aside, a failure so many times above what ran may be far above the end: 0.37 OOMs
# at crowded knees.
_FAR_FAILURE_RATIO = 6.0
# Beyond this share of the budget what is held is set aside, until it looks like the other share: trials of
# exact searches on crowded lines +6.6 %; of crowded knees +12 %.
_CROWDED_SHARE = 0.6
_USUAL_SHARE = 0.2
# The same for what the line through the readings says is fixed. Not where a floor of that share of it is
# known, which says as much and is not read off noisy readings. Trials of crowded knees +16 %; of unusual
# curves +1.3 %, and 0.06 OOMs.
_CROWDED_LINE_SHARE = 0.4
_FLOOR_SHARE = 0.8


def by_curve(state: State, bracket: Bracket, curve: Curve) -> Request | str:
    """The next size from the memory model; or the end, where what is left is not worth a trial."""
    good, exact, single = bracket.good or 0, state.tolerance == 0, len(curve.readings) == 1
    outlook = curve.outlook(failed=bracket.bad, setbacks=bracket.setbacks)
    # The smallest size may hide all growth: nothing ends there.
    likely = math.inf if single and good == bracket.sizes.first else outlook.likely
    worth = _worth(state, bracket, curve, outlook, likely=likely)
    if not exact and enough(
        good, worth, state.tolerance * (1.5 if _soaked(state, bracket, curve, outlook) else 1)
    ):
        return _last_soak(state, bracket, curve, outlook) or settle(state, bracket, "within_tolerance")
    target = _upwards(state, bracket, curve, outlook, worth=worth)
    if bracket.bad is not None:
        target = _below_failure(state, bracket, curve, outlook, target=target, bad=bracket.bad)
    size = bracket.place(target)
    # A soak now saves a trial if the size turns out to be the answer.
    if exact:
        final = enough(size, min(likely, bracket.largest), EXACT_SOAK_SHARE)
    else:
        full = curve.readings[0].need_bytes > _LAST_STEP_BUDGET_SHARE * curve.budget_bytes
        few = single and outlook.safe < _LAST_STEP_RATIO * good and not full
        final = few or (curve.readings[-1].firm and enough(size, worth, state.tolerance + outlook.error / 2))
    return Request(size, state.soak and (final or size == bracket.sizes.last))


def _worth(state: State, bracket: Bracket, curve: Curve, outlook: Outlook, *, likely: float) -> int:
    """The largest size that the readings make worth a trial."""
    # Where one sample more is worth a trial by itself, or two readings are all there is, no doubt counts.
    fine = enough(bracket.good or 0, bracket.place(0), state.tolerance) and len(curve.readings) > 2
    end = likely * (1 - _DOUBTED_ERROR_SHARE * (outlook.error - FINEST)) if fine else likely
    return bracket.sizes.at(max(0, bracket.sizes.index(min(end, bracket.largest))))


def _crowded(state: State, curve: Curve) -> bool:
    """So much is fixed that it was set aside."""
    return curve.budget_bytes != state.budget_bytes


def _soaked(state: State, bracket: Bracket, curve: Curve, outlook: Outlook) -> bool:
    """Where much is set aside, a second soak may be worth the last per cent of a line, a third is not."""
    on_line = _crowded(state, curve) and outlook.error <= FINEST
    return on_line and bracket.sustained == bracket.good and sum(one.soak for one in state.observations) > 1


def _last_soak(state: State, bracket: Bracket, curve: Curve, outlook: Outlook) -> Request | None:
    """The answer needs a soak yet: of where the memory is expected to end, if the readings are good enough.

    It costs no further trial, and a tolerance is for what nobody knows.
    """
    if not state.soak or bracket.sustained == bracket.good or bracket.bad is not None:
        return None
    size = bracket.place(min(outlook.aim, bracket.largest))
    return Request(size, True) if curve.readings[-1].noise < NOISE and size <= outlook.aim else None


def _upwards(state: State, bracket: Bracket, curve: Curve, outlook: Outlook, *, worth: int) -> float:
    """Where the readings lead, as a real number."""
    good, exact = float(bracket.good or 0), state.tolerance == 0
    base = max(outlook.safe, good)
    if len(curve.readings) == 1:
        target = outlook.safe * (1 if curve.floor_bytes else _FIRST_STEP_PER_RAY)
    elif outlook.straight or (exact and outlook.likely < _NEAR_END_RATIO * good):
        low, high = max(outlook.low, good), min(outlook.high, bracket.bad or math.inf)
        target = (low + high) / 2 if exact and low < high < math.inf else max(outlook.aim, good)
    else:
        target = _towards_chord(state, bracket, curve, outlook)
    if not exact and worth < _NEAR_END_RATIO * good:
        target = max(target, (good + worth) / 2)  # a smaller step is not worth a trial
    target = min(target, _LARGEST_STEP_PER_RAY * base, _LARGEST_STEP_RATIO * good)
    if curve.floor_bytes and not exact:
        # Readings may lie on one line and still be the flat part, before the curve turns up.
        target = min(target, max(_STEP_PER_RAY * outlook.safe, good + bracket.sizes.step))
    return target


def _towards_chord(state: State, bracket: Bracket, curve: Curve, outlook: Outlook) -> float:
    """No straight line is seen: part of the way from the ray to the chord."""
    good, exact = float(bracket.good or 0), state.tolerance == 0
    base = max(outlook.safe, good)
    # With a known floor the ray leads near the end by itself, and a chord over the flat part beyond it.
    by_ray = curve.floor_bytes > 0 and outlook.likely >= _NEAR_END_RATIO * good
    exponent = 0.0 if by_ray and not exact else _CHORD_EXPONENT
    # To the nearest size; downwards where a block of one sample more may find no gap.
    half = 0.0 if curve.readings[-1].noise == COARSE_NOISE else bracket.sizes.step / 2
    return base * float((max(outlook.careful, base) / base) ** exponent) + half


def _below_failure(
    state: State, bracket: Bracket, curve: Curve, outlook: Outlook, *, target: float, bad: int
) -> float:
    """Where to try below a size that failed, if the readings lead to `target`."""
    good, exact = float(bracket.good or 0), state.tolerance == 0
    base = max(outlook.safe, good)
    if target >= bad:
        # Good readings that promised a size which then failed are a little off, and once only.
        near = bracket.setbacks == 1 and not exact and curve.readings[-1].noise < NOISE
        target = math.sqrt(base * bad) if base < bad else float(bad) if near else good
        if len(curve.readings) == 1 and not curve.floor_bytes and not exact and base < bad:
            target = base  # nothing is fixed: what was bold was too bold
    if bracket.setbacks and not exact:
        target = min(target, bad * (1 - max(state.tolerance, NOISE / 2) * 2 ** (bracket.setbacks - 1)))
        if _crowded(state, curve) and bad > _FAR_FAILURE_RATIO * good:
            target = min(target, math.sqrt(good * bad))  # a leap that failed says little of what is between
    return target if target > good else float(bracket.middle())


def curve_of(state: State, bracket: Bracket) -> Curve | None:
    """The readings of what ran below the bracket's end; None where they say nothing."""
    ran = _ran_below(state, bracket)
    if state.budget_bytes is None or not ran:
        return None
    floor = min((one.held_bytes for one in ran if one.held_bytes), default=0)
    aside = aside_bytes(state.budget_bytes, min([floor, *(one.least_bytes for one in ran)]))
    # An exact search has failures to go by, and three noisy readings may lie on a line by chance.
    crowded = _CROWDED_LINE_SHARE if state.tolerance else _CROWDED_SHARE
    fixed = _fixed_bytes(ran, state.budget_bytes)
    if floor < _FLOOR_SHARE * fixed:
        aside = max(aside, aside_bytes(state.budget_bytes, fixed, beyond=crowded))
    return _curve_through(ran, state.budget_bytes, aside, floor)


def plain_curve_of(state: State, bracket: Bracket) -> Curve | None:
    """The same with nothing set aside, and over what is held without a batch."""
    ran = _ran_below(state, bracket)
    if state.budget_bytes is None or not ran:
        return None
    return _curve_through(ran, state.budget_bytes, 0, _held_without_batch(ran))


def _held_without_batch(ran: Sequence[Observation]) -> int:
    """What is held at size 0, by the line through what was held: a program may keep its last batch."""
    held = sorted((one.size, one.held_bytes) for one in ran if one.held_bytes)
    if not held:
        return 0
    (first, low), (last, high) = held[0], held[-1]
    each = max(0.0, (high - low) / (last - first)) if last > first else 0.0
    return max(0, int(low - each * first))


def _ran_below(state: State, bracket: Bracket) -> list[Observation]:
    return [one for one in state.observations if one.fits and (bracket.bad is None or one.size < bracket.bad)]


def _curve_through(ran: Sequence[Observation], budget_bytes: int, aside: int, floor: int) -> Curve | None:
    budget = budget_bytes - aside
    # The largest size says most about the blocks; where none has shown them, any size that had to retry.
    shown = [one for one in ran if one.largest_bytes] or [one for one in ran if one.retries] or ran
    releases = max(shown, key=lambda one: one.size).cache_is_releasable(aside_bytes=aside)
    # A large block among small ones (a kernel's workspace) does not keep those from being released.
    if any(one.cache_released for one in ran):
        releases = True
    readings = [
        reading
        for one in ran
        if (reading := one.reading(releases=releases, budget_bytes=budget, aside_bytes=aside)) is not None
    ]
    # A reading at the budget while twice the size runs: a pool taken beforehand, not what the step needs.
    largest = max(one.size for one in ran)
    full = (1 - NOISE) * budget
    if not readings or any(one.need_bytes >= full and 2 * one.size <= largest for one in readings):
        return None
    return Curve.through(readings, budget_bytes=budget, floor_bytes=max(0, floor - aside))


def _fixed_bytes(ran: Sequence[Observation], budget_bytes: int) -> int:
    """What does not grow with the size, by the line that the last readings lie on; 0 where they lie on none.

    The floor of what is held between steps leaves out what every step takes again (gradients, workspaces,
    weights that it loads itself), and the readings' errors count as a share of that too.
    """
    highest: dict[int, int] = {}
    for one in ran:
        highest[one.size] = max(highest.get(one.size, 0), one.least_bytes)
    points = sorted(highest.items())
    while len(points) > 1:
        (first, low), (middle, between), (last, high) = [points[0], *points][-3:]
        growth = (high - low) / (last - first)
        above = between - low - growth * (middle - first)
        if growth <= 0 and high >= (1 - FINEST) * budget_bytes:
            points.pop()  # a kernel that tries algorithms takes all that there is, at any size
            continue
        if abs(above) <= SEGMENT_BYTES:
            return max(0, int(low - growth * first))
        if above < 0:
            return 0  # it turns up: how steeply is not seen yet
        points.pop()  # no peak grows ever more slowly: a reading is wrong, and those before it say more
    return 0


def aside_bytes(budget_bytes: int, fixed_bytes: int, *, beyond: float | None = None) -> int:
    """What to leave out of all figures, so that what is fixed is a usual share of what remains."""
    if fixed_bytes <= (_CROWDED_SHARE if beyond is None else beyond) * budget_bytes:
        return 0
    fixed_bytes = min(fixed_bytes, budget_bytes - 1)
    return max(0, int((fixed_bytes - _USUAL_SHARE * budget_bytes) / (1 - _USUAL_SHARE)))
