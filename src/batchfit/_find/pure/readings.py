"""What the trials of a search have read, as a curve in the size; and what of the budget is fixed.

Rules:
- A size has one reading, the highest. Sizes at or above one that failed are not read.
- What readings are granted is a share of them. Where weights fill the budget (LoRA, inference, a plain step
  that loads its own), that share would outweigh the room that is left: then so much is set aside of all
  figures that the rest of the budget looks like that of any other program.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchfit._find.pure.bracket import Bracket, Observation, State
from batchfit._find.pure.line import SEGMENT_BYTES
from batchfit._find.pure.memory_curve import FINEST, NOISE, Curve

# Evidence: benchmarks/search_ablation.py.
# Beyond this share of the budget what is held is set aside, until it looks like the other share: trials of
# exact searches on crowded lines +6.6 %; of crowded knees +12 %.
_CROWDED_SHARE = 0.6
_USUAL_SHARE = 0.2
# The same for what the line through the readings says is fixed. Not where a floor of that share of it is
# known, which says as much and is not read off noisy readings. Trials of crowded knees +16 %; of unusual
# curves +1.3 %, and 0.06 OOMs.
_CROWDED_LINE_SHARE = 0.4
_FLOOR_SHARE = 0.8


def curve_of(state: State, bracket: Bracket) -> Curve | None:
    """The readings of what ran below the bracket's end; None where they say nothing."""
    ran = [one for one in state.observations if one.fits and (bracket.bad is None or one.size < bracket.bad)]
    if state.budget_bytes is None or not ran:
        return None
    floor = min((one.held_bytes for one in ran if one.held_bytes), default=0)
    aside = aside_bytes(state.budget_bytes, min([floor, *(one.least_bytes for one in ran)]))
    # An exact search has failures to go by, and three noisy readings may lie on a line by chance.
    crowded = _CROWDED_LINE_SHARE if state.tolerance else _CROWDED_SHARE
    fixed = _fixed_bytes(ran, state.budget_bytes)
    if floor < _FLOOR_SHARE * fixed:
        aside = max(aside, aside_bytes(state.budget_bytes, fixed, beyond=crowded))
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
