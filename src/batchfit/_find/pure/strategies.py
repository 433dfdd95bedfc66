"""The strategies: which size to try next, as pure functions of settings and history.

Rules:
- A strategy takes a `State` and returns the next `Request`, or the reason (a key of `results.REASONS`) why it
  asks nothing more. It keeps nothing: the same state always gives the same answer.
- Only allowed sizes are asked, and no size twice with the same `soak` flag.
"""

from __future__ import annotations

from collections.abc import Callable

from batchfit._find.pure.bracket import Bracket, Request, State, descend, settle
from batchfit._find.pure.guided import guided


def bisect(state: State) -> Request | str:
    """The middle of what is left, after doubling from `start`, or where max_size is not given; exact."""
    bracket = Bracket.of(state)
    if bracket.soak_failed:
        return descend(state, bracket, tolerance=0.0)
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if bracket.bad is None and (state.max_size is None or state.start is not None):
        first = state.start or bracket.sizes.first
        size = bracket.place(first if bracket.good is None else 2 * bracket.good)
    else:
        size = bracket.middle(by_ratio=False)
    return Request(size, state.soak and size == bracket.largest)


def halve(state: State) -> Request | str:
    """From `start` (or max_size) down by halves until a size runs."""
    bracket = Bracket.of(state)
    if bracket.good is not None or bracket.closed:
        return settle(state, bracket, "strategy")
    target = bracket.bad / 2 if bracket.bad is not None else state.start or bracket.sizes.last
    # The first that runs is the answer, and a failure costs no more as a soak.
    return Request(bracket.place(target), state.soak)


def powers(state: State) -> Request | str:
    """1, 2, 4, ... (times `multiple_of`) until one fails: the last that ran."""
    bracket = Bracket.of(state)
    if bracket.closed or (bracket.good is not None and bracket.bad is not None):
        return settle(state, bracket, "strategy")
    if bracket.bad is not None:
        return Request(bracket.largest, state.soak)
    first = state.start or bracket.sizes.first
    return Request(bracket.place(first if bracket.good is None else 2 * bracket.good), False)


def grow(state: State) -> Request | str:
    """From an estimate: half as much again while it runs, bisection once it fails, `attempts` in all.

    A size that fails before any has run is halved. Soaks are not attempts.
    """
    bracket = Bracket.of(state)
    if bracket.soak_failed:
        if bracket.good is not None:
            return settle(state, bracket, "strategy")
        return descend(state, bracket, tolerance=state.tolerance)
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if sum(not one.soak for one in state.observations) >= state.attempts:
        return settle(state, bracket, "attempts")
    good, bad = bracket.good, bracket.bad
    if good is None:
        size = state.start or bracket.sizes.last
        return Request(bracket.place(size if bad is None else bad // 2), False)
    return Request(bracket.place(good * 3 // 2 if bad is None else (good + bad) // 2), False)


STRATEGIES: dict[str, Callable[[State], Request | str]] = {
    "guided": guided,
    "bisect": bisect,
    "halve": halve,
    "grow": grow,
    "powers": powers,
}
