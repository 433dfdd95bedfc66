"""What one of several ranks holds at the highest moment of a step, by kind."""

from __future__ import annotations

from batchfit._engine.allocator.footprint import Footprint
from batchfit.results import RankPeak

_NAMED = ("weights", "gradients", "optimizer", "activations", "communication")


def peak_of_rank(footprint: Footprint, size: int) -> RankPeak:
    """Bytes that are live at the peak of a batch size; they add up to it before the allocator rounds."""
    sizes, live = footprint.sizes_at(size), set[int]()
    for event in footprint.events[: footprint.moment_of_peak(size) + 1]:
        if event >= 0:
            live.add(event)
        else:
            live.discard(~event)
    found = dict.fromkeys((*_NAMED, "other"), 0)
    for block in live:
        kind = footprint.origins[block].kind
        found[kind if kind in _NAMED else "other"] += sizes[block]
    return RankPeak(**{f"{kind}_bytes": size for kind, size in found.items()})
