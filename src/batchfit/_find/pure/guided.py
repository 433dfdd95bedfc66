"""The default strategy: the next size comes from measured peaks, within the bracket of sizes still open.

Rules: a pure function of the state, as every strategy. Bisection can always still end the search within
`LIMIT` trials; a prediction is tried first, and believed as far as what it took says. One module a situation:
`by_prediction`, `by_starts` (each trial starts a program), `by_line` (readings on a line, in bytes),
`by_curve` (all other readings); without readings it doubles and bisects, here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from batchfit._find.pure.bracket import (
    EXACT_SOAK_SHARE,
    HORIZON,
    LIMIT,
    Bracket,
    Request,
    State,
    also_ran_shorter,
    descend,
    enough,
    settle,
)
from batchfit._find.pure.by_curve import by_curve, curve_of
from batchfit._find.pure.by_line import at_knee, by_line, line_of, within_rounding
from batchfit._find.pure.by_prediction import by_prediction
from batchfit._find.pure.by_starts import FIRST_SIZE, by_starts

# With tolerance 0 failures are needed anyway: so many times the smallest size says more of the curve (without
# it 12 % more trials; benchmarks/search_ablation.py).
_EXACT_FIRST_SIZE = 8


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
        step = by_prediction(state, bracket, state.predicted)
        if step is not None:
            return step
    if bracket.good is None:
        return _first(state, bracket)
    if _settled(state) or enough(bracket.good, bracket.largest, state.tolerance):
        return settle(state, bracket, "within_tolerance")
    step = (by_starts(state, bracket) if state.costly_trials else None) or _by_readings(state, bracket)
    if isinstance(step, Request) and step.size != bracket.good and not _affordable(state, bracket, step.size):
        return _bisected(state, bracket)
    return step


def _settled(state: State) -> bool:
    """The last trial was the soak of what was to be the answer, and it survived: no second thoughts."""
    last = state.observations[-1]
    if not (state.tolerance and last.soak and last.fits and also_ran_shorter(state, last)):
        return False
    return guided(replace(state, observations=state.observations[:-1])) == Request(last.size, True)


def _first(state: State, bracket: Bracket) -> Request:
    """Nothing has run yet: the smallest size, which is never too bold, or the caller's estimate."""
    sizes, bad = bracket.sizes, bracket.bad
    if bad is None:
        # An exact answer costs failures anyway: begin where a reading says more.
        usual = FIRST_SIZE if state.costly_trials else 1
        size = bracket.place(state.start or (usual if state.tolerance else _EXACT_FIRST_SIZE) * sizes.first)
    elif (state.start is not None or state.predicted is not None) and bracket.setbacks == 1:
        size = bracket.place(bad * 7 / 8)  # an estimate is rarely far off
    else:
        size = bracket.place(math.sqrt(sizes.first * bad))
    return Request(size, state.soak and sizes.first == bracket.largest)


def _by_readings(state: State, bracket: Bracket) -> Request | str:
    """By the line that the readings lie on, by the curve through them, or without any."""
    end = line_of(state, bracket, failed=bracket.bad)
    step = by_line(state, bracket, end) if end is not None and end.clear else None
    if step is not None:
        return step
    curve = curve_of(state, bracket)
    if curve is None:
        step = _without_readings(state, bracket)
    else:
        step = at_knee(state, bracket) or by_curve(state, bracket, curve)
    if end is not None and not end.clear and isinstance(step, Request):
        return within_rounding(state, bracket, end, step)
    return step


def _without_readings(state: State, bracket: Bracket) -> Request:
    """Up by doubling, then bisection."""
    size = bracket.place(2 * (bracket.good or 0)) if bracket.bad is None else bracket.middle()
    return Request(size, state.soak and enough(size, bracket.largest, state.tolerance or EXACT_SOAK_SHARE))


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
