"""What a profile says in words: why this size, how a larger batch is accumulated, what to know of the times.

Rules: each sentence holds its figures. That a batch does not fit is said only where that
size, or a smaller one, had an OOM: sizes that the caller did not ask for are not known, and the
sentence says so. Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from batchfit._charts.throughput_page import format_rate
from batchfit._profile.timing import TimedRun
from batchfit.results import Accumulation, ThroughputPoint

# Times the smallest size, and times its time: a step that takes no more ignores its size.
_SIZE_RATIO, _SAME_TIME_RATIO = 64, 1.1


@final
@dataclass(frozen=True, slots=True)
class KnownSizes:
    """The largest size that fits, run or predicted from memory, and a size that had an OOM."""

    known: int
    failed: int | None = None


def reason(points: Sequence[ThroughputPoint], chosen: int, *, within: float) -> str:
    """Why this size, in one sentence."""
    by_size = {point.size: point for point in points}
    here, best = by_size[chosen], max(points, key=lambda point: point.samples_per_s)
    rate = f"{format_rate(here.samples_per_s)} samples/s"
    if len(points) == 1:
        return f"{chosen} is the only size that was measured ({rate})"
    share = here.samples_per_s / best.samples_per_s
    enough = (1 - within) * best.samples_per_s
    if here.samples_per_s < enough:
        return (
            f"{chosen} was timed at {_below(share, 1 - within)} of what {best.size} gives ({rate}), and the "
            f"times vary by {max(here.spread, best.spread):.0%}: a curve through all sizes puts it closer"
        )
    smaller = [one for one in points if one.size < chosen and one.samples_per_s >= enough]
    if smaller:
        # Times that vary, or more throughput to come than was timed: the search goes by a curve through all.
        near = max(smaller, key=lambda one: one.size)
        return (
            f"{chosen} is within {within:.0%} of the best throughput ({rate}); {near.size} was timed at "
            f"{near.samples_per_s / best.samples_per_s:.1%} of what {best.size} gives, but a curve through "
            f"all sizes puts it below {1 - within:.0%} of the best"
        )
    if best.size == chosen:
        why = f"{chosen} has the best throughput of {len(points)} sizes ({rate})"
        return f"{why}, and it is the smallest within {within:.0%} of it"
    text = (
        f"{chosen} is the smallest size within {within:.0%} of the best throughput: {rate}, "
        f"{share:.1%} of what {best.size} gives"
    )
    if here.peak_bytes and best.peak_bytes and best.peak_bytes > here.peak_bytes:
        text += f" with {here.peak_bytes / best.peak_bytes:.0%} of the memory"
    return text


def _below(share: float, limit: float) -> str:
    """A share as text that does not read as the limit that it is below: 94.96% is not 95.0%."""
    text = f"{share:.1%}"
    return text if float(text[:-1]) / 100 < limit else f"{share:.3%}"


def accumulation(
    points: Sequence[ThroughputPoint], chosen: int, target: int | None, room: KnownSizes, *, world_size: int
) -> Accumulation | None:
    """How to make a batch that does not fit, as far as is known; None where it fits."""
    if target is None:
        return None
    local = math.ceil(target / world_size)
    if local <= room.known:
        return None
    each = f" on each of {world_size} ranks" if world_size > 1 else ""
    if room.failed is not None and local >= room.failed:
        why = f"a batch of {target} does not fit at once"
    else:
        why = f"a batch of {target} is more than is known to fit at once ({room.known}{each})"
    count = math.ceil(local / chosen)
    size = math.ceil(local / count)
    rate = next(point.samples_per_s for point in points if point.size == chosen)
    return Accumulation(
        target_batch_size=target,
        microbatch_size=size,
        microbatches=count,
        samples_per_s=rate,
        advice=(
            f"{why}: accumulate {count} microbatches of {size}{each} "
            f"(batchfit.Microbatcher). This adds no throughput, which stays at about {format_rate(rate)} "
            "samples/s: use it only where the training itself wants the larger batch"
        ),
    )


def notes(runs: Mapping[int, TimedRun], points: Sequence[ThroughputPoint], *, stopped: str) -> Iterator[str]:
    """What a reader of the figures has to know."""
    why = {
        "drifting": "the times go one way (clocks, another program)",
        "stalling": "some steps stall",
        "noisy": "the times vary",
    }
    for kind, text in why.items():
        sizes = [str(size) for size, run in sorted(runs.items()) if run.verdict == kind]
        if sizes:
            yield f"not steady at batch size {', '.join(sizes)}: {text}"
    if stopped == "time_limit":
        yield "time_limit_s was reached: other sizes may be better"
    if stopped == "interrupted":
        yield "it was interrupted: other sizes may be better, and nothing was diagnosed"
    if _ignores_its_size(points[0], points[-1]):
        yield (
            f"neither time nor memory grows from batch size {points[0].size} to {points[-1].size}: "
            "does the step use its batch size?"
        )
    compiled = sum(point.recompilations for point in points)
    if compiled:
        yield f"{compiled} functions were compiled during warm-up, which is not timed"
    late = [run.size for run in runs.values() if run.late_recompilations]
    if late:
        yield f"torch.compile compiled again while batch size {late[0]} was timed"


def _ignores_its_size(one: ThroughputPoint, last: ThroughputPoint) -> bool:
    same_memory = one.peak_bytes is not None and one.peak_bytes == last.peak_bytes
    return same_memory and last.size >= _SIZE_RATIO * one.size and last.step_s < _SAME_TIME_RATIO * one.step_s
