"""The next size where one was predicted: the prediction, and once more if it was clearly too low."""

from __future__ import annotations

from batchfit._find.pure.bracket import Bracket, Request, State, enough, settle
from batchfit._find.pure.by_curve import aside_bytes
from batchfit._find.pure.memory_curve import Curve, MemoryReading


def by_prediction(state: State, bracket: Bracket, predicted: int) -> Request | str | None:
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
    aside = aside_bytes(state.budget_bytes, min(held, *(one.least_bytes for one in at_good)))
    return Curve.through(
        [MemoryReading(good, taken - aside)],
        budget_bytes=state.budget_bytes - aside,
        floor_bytes=held - aside,
    ).safe()
