"""What a program does with the size it is given: uses it, has too few samples, accumulates, or ignores it.

Rules: judged from two sizes that ran, one at least twice the other, by the samples of the forward passes,
their number per step, and the peak. Where the peak grows, or a pass gets more numbers, the size is used,
whatever else the passes show: their first dimension need not be the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from batchfit.errors import ProgramError

_SAME_PEAK_SHARE = 0.005  # two peaks this close are the same
_MORE_PASSES = 1.5
_TRACKS = 0.9  # of what the size promises


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SizeUse:
    """What one size showed: the most samples and numbers of a pass, passes per optimizer step, the peak."""

    size: int
    samples: int
    elements: int
    passes: int
    peak_bytes: int | None


def note_use(uses: list[SizeUse], use: SizeUse, lines: Sequence[str] = ()) -> int | None:
    """Add a size to those that ran, or answer the largest batch where it is beyond that and shows no more.

    A `ProgramError` where the search makes no sense, with the `lines` that the program printed last.
    """
    largest = largest_batch([*uses, use])
    if largest is not None and use.size > largest:
        return largest
    uses.append(use)
    wrong = wrong_use(uses)
    if wrong:
        raise ProgramError(wrong, lines=lines)
    return None


def largest_batch(uses: Sequence[SizeUse]) -> int | None:
    """The size beyond which the program's batches grow no more; None where none is known."""
    for small, large in _pairs(uses):
        per_size = small.samples / small.size
        follows = per_size == int(per_size) and per_size > 0
        if follows and small.samples < large.samples < _TRACKS * per_size * large.size:
            return int(large.samples // per_size)
    return None


def wrong_use(uses: Sequence[SizeUse]) -> str:
    """Why the search makes no sense; empty where it does."""
    for small, large in _pairs(uses):
        if small.peak_bytes is None or large.peak_bytes is None or small.samples != large.samples:
            continue
        grows = large.peak_bytes > small.peak_bytes * (1 + _SAME_PEAK_SHARE)
        if grows or large.elements != small.elements:
            continue
        if small.passes and large.passes >= _MORE_PASSES * small.passes:
            return (
                f"the program cuts its batch itself (gradient accumulation): at {small.size} a step is "
                f"{small.passes} x {small.samples} samples, at {large.size} it is {large.passes} x "
                f"{large.samples}, so memory does not grow. "
                "Put {} in the place of the size of a microbatch"
            )
        return (
            f"the size changes nothing: at {small.size} and at {large.size} the forward passes have "
            f"{large.samples} samples and the peak is the same. The program takes its batch size from "
            f"elsewhere, or has only {large.samples} samples"
        )
    return ""


def _pairs(uses: Sequence[SizeUse]) -> list[tuple[SizeUse, SizeUse]]:
    ordered = sorted(uses, key=lambda one: one.size)
    return [(small, large) for small in ordered for large in ordered if large.size >= 2 * small.size]
