"""The default strategy: measured memory proposes, the bracket disposes.

Rules: a pure function of the state, as every strategy. Bisection can always still end the search within
`LIMIT` trials; a prediction is tried first, and believed as far as what it took says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from batchfit._find.pure.bracket import (
    HORIZON,
    LIMIT,
    Bracket,
    Observation,
    Request,
    State,
    descend,
    enough,
    ran_short,
    settle,
)
from batchfit._find.pure.on_line import by_line, end_of, within_rounding
from batchfit._find.pure.memory_curve import COARSE_NOISE, FINEST, NOISE, Curve, MemoryReading, Outlook

# The numbers below were chosen on simulated curves (benchmarks/search_simulated.py). Bolder ones save a tenth
# of a trial on straight lines, and cost failures on curves with knees.
# Held bytes unknown: part of any peak is fixed, so the first step may go beyond the ray from zero.
_BOLD = 1.5
_FAR = 1.2  # times beyond the ray a failure says nothing of where between it and the ray the end is
# How far from the ray (0) to the chord (1), by ratio, while no straight line has been seen.
_REACH = 0.55
_REACH_EXACT = 0.7  # a failure is part of an exact search anyway
# Up to this many times what ran the end is near: steps below half of what is left are not worth a trial.
_NEAR = 2.0
# A size is worth a trial if the chord, shortened by this much of the readings' error, reaches it.
_DOUBT = 0.85
# The ray of the first reading ends within so many times its size: the next size may well be the last.
_FEW = 2.5
# Whatever the readings say: a step that allocates elsewhere than where they are taken has none to show.
_LARGEST_LEAP = 512
_LEAP = 6.0  # times what ran: beyond it a failure may be far above the end
# With a known floor no size is tried further beyond the ray than this.
_BEYOND_RAY = 1.1
# With tolerance 0: where to begin, and how close to the end every trial is a soak.
_EXACT_START = 8
_EXACT_END = 0.1
# What readings are granted is a share of them, chosen on programs that hold up to a fifth of the budget. If
# more than _CROWDED of it is held for good (frozen weights: LoRA, inference), that share would outweigh the
# room that is left; then so much is set aside that the rest of the budget looks like theirs.
_CROWDED = 0.6
_USUAL = 0.2
# Weights fill the budget, and nothing says so yet: beyond this share of it, the first reading is no sign that
# the next size is the last.
_FULL = 0.65
# Readings lie on a line if the middle one of three is off it by at most this share of what they grow by, or
# by what an allocator rounds blocks up by.
_ON_LINE = 0.02
_ROUNDING_BYTES = 2 * 2**20
# What such a line says is fixed counts as set aside beyond this share of the budget.
_MUCH_FIXED = 0.4
_MOST_OF_IT = 0.8  # a floor that is that much of it says as much, and is not read off noisy readings


def guided(state: State) -> Request | str:
    """Measured memory proposes, the bracket disposes; the default.

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
    end = end_of(state, bracket)
    step = by_line(state, bracket, end) if end is not None else None
    if step is None:
        curve = curve_of(state, bracket)
        step = _without_readings(state, bracket) if curve is None else _by_memory(state, bracket, curve)
        if end is not None and not end.clear and isinstance(step, Request):
            step = within_rounding(state, bracket, end, step)
    if isinstance(step, Request) and step.size != bracket.good and not _affordable(state, bracket, step.size):
        return _bisected(state, bracket)
    return step


def _as_predicted(state: State, bracket: Bracket, predicted: int) -> Request | str | None:
    """What a prediction says is the end: tried at once, as a soak; the answer if it survives.

    A failure there or below says that the prediction is wrong, and the search goes on without it. So does an
    exact search, from there on. Where what it took leaves room for more beyond doubt, the room is used: how
    an allocator's fragmentation is foreseen less well than live tensors.
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
    """The size up to which all that the allocator took for `good` would be within the budget, if it grows."""
    at_good = [one for one in state.observations if one.size == good and one.fits]
    taken = max((one.reserved_bytes or one.allocated_bytes or 0 for one in at_good), default=0)
    if state.budget_bytes is None or not taken:
        return good
    held = min(one.held_bytes or 0 for one in at_good)
    aside = _aside_bytes(state.budget_bytes, min(held, *(one.least_bytes for one in at_good)))
    return Curve.through(
        [MemoryReading(good, taken - aside)],
        budget_bytes=state.budget_bytes - aside,
        floor_bytes=held - aside,
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
        size = bracket.place(state.start or (1 if state.tolerance else _EXACT_START) * sizes.first)
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
    # An exact search has failures to go by, and three noisy readings may lie on a line by chance.
    crowded = _MUCH_FIXED if state.tolerance else _CROWDED
    fixed = _fixed_bytes(ran, state.budget_bytes)
    if floor < _MOST_OF_IT * fixed:
        aside = max(aside, _aside_bytes(state.budget_bytes, fixed, crowded=crowded))
    budget = state.budget_bytes - aside
    # The largest size says most about the blocks; where none has shown them, any size that had to retry.
    shown = [one for one in ran if one.largest_bytes] or [one for one in ran if one.retries] or ran
    releases = max(shown, key=lambda one: one.size).cache_is_releasable(aside_bytes=aside)
    # A large block among small ones (a kernel's workspace) does not keep those from being handed back.
    if any(one.handed_back for one in ran):
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
        if abs(above) <= max(_ON_LINE * (high - low), _ROUNDING_BYTES):
            return max(0, int(low - growth * first))
        if above < 0:
            return 0  # it turns up: how steeply is not seen yet
        points.pop()  # no peak grows ever more slowly: a reading is wrong, and those before it say more
    return 0


def _aside_bytes(budget_bytes: int, floor_bytes: int, *, crowded: float = _CROWDED) -> int:
    """What of the floor to leave out of all figures, so that the floor is a usual share of what remains."""
    if floor_bytes <= crowded * budget_bytes:
        return 0
    return max(0, int((min(floor_bytes, budget_bytes - 1) - _USUAL * budget_bytes) / (1 - _USUAL)))


def _by_memory(state: State, bracket: Bracket, curve: Curve) -> Request | str:
    """The next size from the memory model; or the end, where what is left is not worth a trial."""
    good, exact, single = bracket.good or 0, state.tolerance == 0, len(curve.readings) == 1
    look = curve.outlook(failed=bracket.bad, setbacks=bracket.setbacks)
    # The smallest size may hide all growth: nothing ends there.
    likely = math.inf if single and good == bracket.sizes.first else look.likely
    # Where one sample more is worth a trial by itself, or two readings are all there is, no doubt counts.
    fine = enough(good, bracket.place(0), state.tolerance) and len(curve.readings) > 2
    end = likely * (1 - _DOUBT * (look.error - FINEST)) if fine else likely
    worth = bracket.sizes.at(max(0, bracket.sizes.index(min(end, bracket.largest))))
    # Where much is set aside, a second soak may be worth the last per cent of a line, a third is not.
    crowded = curve.budget_bytes != state.budget_bytes and look.error <= FINEST
    soaked = crowded and bracket.sustained == good and sum(one.soak for one in state.observations) > 1
    if not exact and enough(good, worth, state.tolerance * (1.5 if soaked else 1)):
        return _last_soak(state, bracket, curve, look) or settle(state, bracket, "within_tolerance")
    size = bracket.place(_target(state, bracket, curve, look, worth=worth))
    # A soak now saves a trial if the size turns out to be the answer.
    if exact:
        final = enough(size, min(likely, bracket.largest), _EXACT_END)
    else:
        full = curve.readings[0].need_bytes > _FULL * curve.budget_bytes
        few = single and look.safe < _FEW * good and not full
        final = few or (curve.readings[-1].firm and enough(size, worth, state.tolerance + look.error / 2))
    return Request(size, state.soak and (final or size == bracket.sizes.last))


def _last_soak(state: State, bracket: Bracket, curve: Curve, look: Outlook) -> Request | None:
    """The answer needs a soak yet: of where the memory is expected to end, if the readings are good enough.

    It costs no further trial, and a tolerance is for what nobody knows.
    """
    if not state.soak or bracket.sustained == bracket.good or bracket.bad is not None:
        return None
    size = bracket.place(min(look.aim, bracket.largest))
    return Request(size, True) if curve.readings[-1].noise < NOISE and size <= look.aim else None


def _target(state: State, bracket: Bracket, curve: Curve, look: Outlook, *, worth: int) -> float:
    """Where to try next, as a real number: between the ray, which is safe, and the chord, which is not."""
    good, bad, exact = float(bracket.good or 0), bracket.bad, state.tolerance == 0
    base = max(look.safe, good)
    if len(curve.readings) == 1:
        target = look.safe * (1 if curve.floor_bytes else _BOLD)
    elif look.straight or (exact and look.likely < _NEAR * good):
        low, high = max(look.low, good), min(look.high, bad or math.inf)
        target = (low + high) / 2 if exact and low < high < math.inf else max(look.aim, good)
    else:
        # With a known floor the ray leads near the end by itself, and a chord over the flat part beyond it.
        by_ray = curve.floor_bytes > 0 and look.likely >= _NEAR * good
        reach = _REACH_EXACT if exact else 0.0 if by_ray else _REACH
        # To the nearest size; downwards where a block of one sample more may find no gap.
        half = 0.0 if curve.readings[-1].noise == COARSE_NOISE else bracket.sizes.step / 2
        target = base * (max(look.careful, base) / base) ** reach + half
    if not exact and worth < _NEAR * good:
        target = max(target, (good + worth) / 2)  # a smaller step is not worth a trial
    target = min(target, 8 * base, _LARGEST_LEAP * good)
    if curve.floor_bytes and not exact:
        # Readings may lie on one line and still be the flat part, before the curve turns up.
        target = min(target, max(_BEYOND_RAY * look.safe, good + bracket.sizes.step))
    if bad is not None:
        if target >= bad:
            # Good readings that promised a size which then failed are a little off, and once only.
            near = bracket.setbacks == 1 and not exact and curve.readings[-1].noise < NOISE
            target = math.sqrt(base * bad) if base < bad else float(bad) if near else good
            if len(curve.readings) == 1 and not curve.floor_bytes and not exact and bad > _FAR * base:
                target = base  # nothing is fixed: what was bold was too bold
        if bracket.setbacks and not exact:
            target = min(target, bad * (1 - max(state.tolerance, NOISE / 2) * 2 ** (bracket.setbacks - 1)))
        crowded = curve.budget_bytes != state.budget_bytes
        if crowded and bracket.setbacks and not exact and bad > _LEAP * good:
            target = min(target, math.sqrt(good * bad))  # a leap that failed says little of what is between
        if target <= good:
            target = bracket.middle()
    return target


def _without_readings(state: State, bracket: Bracket) -> Request:
    """Up by doubling, then bisection."""
    size = bracket.place(2 * (bracket.good or 0)) if bracket.bad is None else bracket.middle()
    return Request(size, state.soak and enough(size, bracket.largest, state.tolerance or _EXACT_END))


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
