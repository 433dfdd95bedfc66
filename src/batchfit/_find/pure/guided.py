"""The default strategy: measured memory proposes sizes, the bracket limits them.

Rules: a pure function of the state, as every strategy. Bisection can always still end the search within
`LIMIT` trials; a prediction is tried first, and believed as far as what it took says.
"""

from __future__ import annotations

import math
from dataclasses import replace

from batchfit._find.pure.bracket import (
    HORIZON,
    LIMIT,
    Bracket,
    Request,
    State,
    descend,
    enough,
    ran_short,
    settle,
)
from batchfit._find.pure.memory_curve import COARSE_NOISE, FINEST, NOISE, Curve, MemoryReading, Outlook

# Constants: benchmarks/search_ablation.py sets each to a neutral value; the largest move of a group's mean
# (trials; OOMs) stands beside it.
# Held bytes unknown: part of any peak is fixed, so the first step may go beyond the ray from zero.
_FIRST_STEP_BEYOND_RAY_RATIO = 1.5
# How far from the ray (0) to the chord (1), by ratio, while no straight line has been seen.
_CHORD_EXPONENT = 0.55
# How far from what ran to what failed, by ratio, where the curve has turned up between them.
_KNEE_EXPONENT = 0.4
# The end is near up to this many times what ran: steps below half of what is left are not worth a trial.
_NEAR_END_RATIO = 2.0
# A size is worth a trial if the chord, shortened by this share of the readings' error, reaches it.
_ERROR_SHARE_WORTH_NO_TRIAL = 0.85
# The ray of the first reading ends within so many times its size: the next size may well be the last. Not
# where that reading is more than a share of the budget: then weights fill it.
_LAST_STEP_RATIO = 2.5
_LAST_STEP_BUDGET_SHARE = 0.55
# Whatever the readings say: a step that allocates elsewhere than where they are taken has none to show.
_LARGEST_STEP_RATIO = 512
# With a known floor no size is tried further beyond the ray than this.
_RAY_MARGIN_RATIO = 1.1
# ... but for this many times what ran, where the peak does not grow yet, or readings are exact.
_FLAT_STEP_RATIO = 8.0
# With tolerance 0: where to begin, how close to the end every trial is a soak, and after how many failures in
# a row bisection goes on.
_EXACT_FIRST_SIZE = 8
_EXACT_SOAK_SHARE = 0.1
_EXACT_FAILURES_BEFORE_BISECTION = 2
# The errors of readings are a share of them, chosen on programs that hold up to _USUAL_BUDGET_SHARE of the
# budget. If more than _CROWDED_BUDGET_SHARE is held (frozen weights: LoRA, inference), that share would
# outweigh what is left; then so much is set aside that the rest of the budget looks like theirs.
_CROWDED_BUDGET_SHARE = 0.6
_USUAL_BUDGET_SHARE = 0.2


def guided(state: State) -> Request | str:
    """Measured memory proposes sizes, the bracket limits them; the default.

    Ends without a failure where the memory that is left is worth no further trial. With `tolerance` 0 it
    ends when the next larger size has failed. Without readings it doubles, then bisects.
    """
    bracket = Bracket.of(state)
    if bracket.soak_failed:
        return descend(state, bracket, tolerance=state.tolerance)
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if state.predicted is not None:
        step = _as_predicted(state, bracket, state.predicted)
        if step is not None:
            return step
    if bracket.good is None:
        return _first(state, bracket)
    if _settled(state) or enough(bracket.good, bracket.largest, state.tolerance):
        return settle(state, bracket, "within_tolerance")
    curve = curve_of(state, bracket)
    step = _without_readings(state, bracket) if curve is None else _by_memory(state, bracket, curve)
    if isinstance(step, Request) and step.size != bracket.good and not _affordable(state, bracket, step.size):
        return _bisected(state, bracket)
    return step


def _as_predicted(state: State, bracket: Bracket, predicted: int) -> Request | str | None:
    """What a prediction says is the end: tried at once, as a soak; the answer if it survives.

    A failure there or below says that the prediction is wrong, and the search goes on without it. So does an
    exact search, from there on. Where what it took leaves room for more beyond doubt, the room is used:
    fragmentation is foreseen less well than live tensors.
    """
    size = bracket.sizes.at(max(0, bracket.sizes.index(predicted)))
    if bracket.bad is not None and bracket.bad <= size:
        return None
    if (bracket.good or 0) < size:
        return Request(size, state.soak)
    if not state.tolerance:
        return None
    if bracket.bad is not None:
        return settle(state, bracket, "predicted")
    more = bracket.sizes.at(max(0, bracket.sizes.index(_reserved_end(state, bracket.good or 0))))
    if not enough(bracket.good or 0, more, state.tolerance):
        return Request(more, state.soak)
    return settle(state, bracket, "predicted")


def _reserved_end(state: State, good: int) -> float:
    """The size up to which what was reserved for `good` stays within the budget, if all of it grows."""
    at_good = [one for one in state.observations if one.size == good and one.fits]
    taken = max((one.reserved_bytes or one.allocated_bytes or 0 for one in at_good), default=0)
    if state.budget_bytes is None or not taken:
        return good
    held = min(one.held_bytes or 0 for one in at_good)
    aside = _aside_bytes(state.budget_bytes, min(held, *(one.least_bytes for one in at_good)))
    return Curve.through(
        [MemoryReading(good, taken, aside_bytes=aside)], budget_bytes=state.budget_bytes, floor_bytes=held
    ).safe()


def _settled(state: State) -> bool:
    """The last trial was the soak of what was to be the answer, and it survived: no second thoughts."""
    last = state.observations[-1]
    if not (state.tolerance and last.soak and last.fits and ran_short(state, last)):
        return False
    return guided(replace(state, observations=state.observations[:-1])) == Request(last.size, True)


def _first(state: State, bracket: Bracket) -> Request:
    """Nothing has run yet: the smallest size, which is never too bold, or the caller's estimate."""
    sizes, bad = bracket.sizes, bracket.bad
    if bad is None:
        # An exact answer costs failures anyway: begin where a reading says more.
        size = bracket.place(state.start or (1 if state.tolerance else _EXACT_FIRST_SIZE) * sizes.first)
    elif (state.start is not None or state.predicted is not None) and bracket.setbacks == 1:
        size = bracket.place(bad * 7 / 8)  # an estimate is rarely far off
    else:
        size = bracket.place(math.sqrt(sizes.first * bad))
    return Request(size, state.soak and sizes.first == bracket.largest)


def curve_of(state: State, bracket: Bracket) -> Curve | None:
    """The readings of what ran below the bracket's end; None where they say nothing."""
    ran = [one for one in state.observations if one.fits and (bracket.bad is None or one.size < bracket.bad)]
    if state.budget_bytes is None or not ran:
        return None
    floor = min((one.held_bytes for one in ran if one.held_bytes), default=0)
    aside = _aside_bytes(state.budget_bytes, min([floor, *(one.least_bytes for one in ran)]))
    # The largest size says most about the blocks; where none has shown them, any size that had to retry.
    shown = [one for one in ran if one.largest_bytes] or [one for one in ran if one.retries] or ran
    releases = max(shown, key=lambda one: one.size).cache_is_releasable(aside_bytes=aside)
    # A large block among small ones (a kernel's workspace) does not keep those from being released.
    if any(one.released_cache for one in ran):
        releases = True
    budget = state.budget_bytes
    needs = (one.reading(releases=releases, budget_bytes=budget, aside_bytes=aside) for one in ran)
    readings = [one for one in needs if one is not None]
    if not readings:
        return None
    # As much at the budget for half the size: a pool taken beforehand, not what the step needs.
    last = max(readings, key=lambda one: one.size)
    full = max((1 - NOISE) * budget, last.need_bytes)
    if any(one.need_bytes >= full and 2 * one.size <= last.size for one in readings):
        return None
    return Curve.through(readings, budget_bytes=budget, floor_bytes=floor)


def _aside_bytes(budget_bytes: int, floor_bytes: int) -> int:
    """What of the floor is left out of the readings' errors, where the floor fills most of the budget."""
    if floor_bytes <= _CROWDED_BUDGET_SHARE * budget_bytes:
        return 0
    beyond = min(floor_bytes, budget_bytes - 1) - _USUAL_BUDGET_SHARE * budget_bytes
    return max(0, int(beyond / (1 - _USUAL_BUDGET_SHARE)))


def _by_memory(state: State, bracket: Bracket, curve: Curve) -> Request | str:
    """The next size from the memory model; or the end, where what is left is not worth a trial."""
    good, exact, single = bracket.good or 0, state.tolerance == 0, len(curve.readings) == 1
    outlook = curve.outlook(failed=bracket.bad, setbacks=bracket.setbacks)
    # The smallest size may hide all growth: nothing ends there.
    likely = math.inf if single and good == bracket.sizes.first else outlook.likely
    # Where one sample more is worth a trial by itself, or two readings are all there is, no doubt counts.
    fine = enough(good, bracket.place(0), state.tolerance) and len(curve.readings) > 2
    end = likely * (1 - _ERROR_SHARE_WORTH_NO_TRIAL * (outlook.error - FINEST)) if fine else likely
    worth = bracket.sizes.at(max(0, bracket.sizes.index(min(end, bracket.largest))))
    # Where much is set aside, a second soak may be worth the last per cent of a line, a third is not.
    crowded = curve.readings[0].aside_bytes > 0 and outlook.error <= FINEST
    soaked = crowded and bracket.sustained == good and sum(one.soak for one in state.observations) > 1
    if not exact and enough(good, worth, state.tolerance * (1.5 if soaked else 1)):
        return _last_soak(state, bracket, curve, outlook) or settle(state, bracket, "within_tolerance")
    size = bracket.place(_target(state, bracket, curve, outlook, worth=worth))
    # A soak now saves a trial if the size turns out to be the answer.
    if exact:
        final = enough(size, min(likely, bracket.largest), _EXACT_SOAK_SHARE)
    else:
        full = curve.readings[0].need_bytes > _LAST_STEP_BUDGET_SHARE * curve.budget_bytes
        few = single and outlook.safe < _LAST_STEP_RATIO * good and not full
        final = few or (curve.readings[-1].firm and enough(size, worth, state.tolerance + outlook.error / 2))
    return Request(size, state.soak and (final or size == bracket.sizes.last))


def _last_soak(state: State, bracket: Bracket, curve: Curve, outlook: Outlook) -> Request | None:
    """The answer needs a soak yet: of where the memory is expected to end, if the readings are good enough.

    It costs no further trial, and a tolerance is for what nobody knows.
    """
    if not state.soak or bracket.sustained == bracket.good or bracket.bad is not None:
        return None
    size = bracket.place(min(outlook.aim, bracket.largest))
    return Request(size, True) if curve.readings[-1].noise < NOISE and size <= outlook.aim else None


def _target(state: State, bracket: Bracket, curve: Curve, outlook: Outlook, *, worth: int) -> float:
    """Where to try next, as a real number."""
    good = float(bracket.good or 0)
    if bracket.bad is None:
        target = min(_beyond(state, bracket, curve, outlook), _LARGEST_STEP_RATIO * good)
        if not state.tolerance:
            # Sizes run although their readings fill the budget: each step is twice the last.
            full = sum(one.need_bytes >= curve.budget_bytes for one in curve.readings)
            target = max(target, good + bracket.sizes.step * 2 ** (full - 1))
    else:
        target = _below_failure(state, bracket, curve, outlook, bad=bracket.bad)
    if state.tolerance and worth < _NEAR_END_RATIO * good:
        target = max(target, (good + worth) / 2)  # a smaller step is not worth a trial
    return target if bracket.bad is None or target > good else bracket.middle()


def _beyond(state: State, bracket: Bracket, curve: Curve, outlook: Outlook) -> float:
    """Where readings lead: between the ray, which is safe, and the chord, which is not."""
    good, exact, floor_known = float(bracket.good or 0), state.tolerance == 0, curve.floor_bytes > 0
    if len(curve.readings) == 1:
        return outlook.safe * (1 if floor_known else _FIRST_STEP_BEYOND_RAY_RATIO)
    if outlook.straight or (exact and outlook.likely < _NEAR_END_RATIO * good):
        if exact and outlook.high < math.inf:
            return (max(outlook.low, good) + outlook.high) / 2
        target = max(outlook.aim, good)
    else:
        target = _towards_chord(state, bracket, curve, outlook)
    if floor_known and not exact:
        # Readings may lie on one line and still be the flat part, before the curve turns up.
        most = max(_RAY_MARGIN_RATIO * outlook.safe, good + bracket.sizes.step)
        target = min(target, max(most, _step_ratio(curve, outlook) * good))
    return target


def _towards_chord(state: State, bracket: Bracket, curve: Curve, outlook: Outlook) -> float:
    """No straight line is seen: part of the way from the ray to the chord, or a step along the flat part."""
    good = float(bracket.good or 0)
    base = max(outlook.safe, good)
    between = base * (max(outlook.careful, base) / base) ** _CHORD_EXPONENT
    # With a known floor the ray leads near the end by itself, and a chord over the flat part beyond it.
    near = outlook.likely < _NEAR_END_RATIO * good and not curve.precise
    by_ray = curve.floor_bytes > 0 and not near and state.tolerance > 0
    # To the nearest size; downwards where a block of one sample more may find no free segment.
    half = 0.0 if curve.readings[-1].noise == COARSE_NOISE else bracket.sizes.step / 2
    target = (base if by_ray else between) + half
    # Where readings are rounded up, `careful` allows for that already.
    most = outlook.careful if curve.rounding_bytes else between
    return max(target, min(_step_ratio(curve, outlook) * good, most if outlook.grows else outlook.chord))


def _step_ratio(curve: Curve, outlook: Outlook) -> float:
    """How many times what ran may be tried, whatever the ray says."""
    return _FLAT_STEP_RATIO if curve.precise or not outlook.grows else 1.0


def _below_failure(state: State, bracket: Bracket, curve: Curve, outlook: Outlook, *, bad: int) -> float:
    """A size has failed: where the readings lead below it, or between it and what ran."""
    good, exact = float(bracket.good or 0), state.tolerance == 0
    if exact and bracket.setbacks > _EXACT_FAILURES_BEFORE_BISECTION:
        return float(bracket.middle())
    near = exact and outlook.likely < _NEAR_END_RATIO * good
    near = near or len(curve.readings) == 1 or enough(good, bad, _EXACT_SOAK_SHARE)
    turned = outlook.likely == bad or not (outlook.straight or near)
    target = math.inf if turned else _beyond(state, bracket, curve, outlook)
    if target >= bad and bracket.setbacks == 1 and not exact and curve.readings[-1].noise < NOISE:
        target = bad  # good readings that promised a size which then failed are a little off, and once only
    elif target >= bad:
        target = good * (min(outlook.likely, bad) / good) ** (0.5 if exact else _KNEE_EXPONENT)
        if outlook.safe < bad:
            target = max(outlook.safe, target)
    return target if exact else min(target, bad * (1 - state.tolerance * 2 ** (bracket.setbacks - 1)))


def _without_readings(state: State, bracket: Bracket) -> Request:
    """Up by doubling, then bisection."""
    size = bracket.place(2 * (bracket.good or 0)) if bracket.bad is None else bracket.middle()
    return Request(size, state.soak and enough(size, bracket.largest, state.tolerance or _EXACT_SOAK_SHARE))


def _bisected(state: State, bracket: Bracket) -> Request:
    """Bisection alone; where nothing has failed yet, below the horizon, and then at it."""
    bounded = bracket.bounded()
    if bracket.bad is None and enough(bracket.good or 0, bounded.largest, state.tolerance):
        return Request(bracket.place(bounded.bad or math.inf), False)
    return _without_readings(state, bounded)


def _affordable(state: State, bracket: Bracket, size: int) -> bool:
    """Whether bisection could still end within LIMIT trials, whatever the trial of `size` brings."""
    good = bracket.good or bracket.sizes.first
    bad = bracket.bounded().bad or size
    rest = max(_cost(state, good, size), _cost(state, size, bad))
    limit = LIMIT + max(0.0, 2 * math.log2(good / HORIZON))
    return len(state.observations) + 1 + (bracket.bad is None) + rest <= limit


def _cost(state: State, good: float, bad: float) -> int:
    """How many trials `middle` needs at worst between a size that ran and one that failed, soak included."""
    trials = 1
    while bad > 4 * good:
        good, trials = math.sqrt(good * bad), trials + 1
    step = max(float(state.multiple_of), state.tolerance * good)
    return trials + math.ceil(math.log2(max(1.0, (bad - good) / step)))
