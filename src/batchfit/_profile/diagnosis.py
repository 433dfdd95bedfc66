"""The readings behind a diagnosis, taken at the recommended size after the sizes were timed.

Rules: each reading is a few steps and leaves the state as it was; one that cannot be taken is left out, and
then nothing is said about what it would have shown, except that something that the caller gave was not looked
at. Where the time is over no further step is run. `_profile.pure.diagnose` judges.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from batchfit._engine.batch.sources import Longest, Repeated
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.snapshot.contents import is_parallel
from batchfit._profile.bench import Bench
from batchfit._profile.model_inputs import watched_inputs
from batchfit._profile.pure.diagnose import MAKING, BatchFrom, Facts, Loaded, ShapeTimes, diagnose, ms
from batchfit._profile.pure.knee import Knee
from batchfit._profile.pure.steady import FINE
from batchfit._profile.readings import Busy, LoaderPace, batch_time, busy_time, fed_by, without_exchange
from batchfit._profile.timing import TimedRun
from batchfit.results import Bottleneck, ThroughputPoint

_RAGGED_STEPS = 8
_OWN_STEPS = 5
_SOURCES: Mapping[type, BatchFrom] = {Repeated: "example", Longest: "dataset"}


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a diagnosis starts from."""

    bench: Bench
    knee: Knee
    runs: Mapping[int, TimedRun]
    loader: Iterable[Any] | None
    pace: LoaderPace | None
    cut_off_by_memory: bool


@final
@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What was found, and what could not be measured."""

    bottlenecks: tuple[Bottleneck, ...]
    notes: tuple[str, ...]


def diagnosed(found: Diagnosis, points: Sequence[ThroughputPoint], *, may_step: bool) -> Diagnosed:
    """Take the readings and judge; without `may_step` from what was measured already."""
    size = found.knee.recommended
    assert size is not None
    facts = _measured(found, next(one for one in points if one.size == size))
    if may_step:
        facts = _read(found, facts)
    return Diagnosed(diagnose(facts), tuple(_left_out(found, facts, may_step=may_step)))


def _left_out(found: Diagnosis, facts: Facts, *, may_step: bool) -> Iterator[str]:
    """What the caller asked about and does not hear of otherwise."""
    if not may_step:
        yield "time_limit_s left no time to look at data, host, shapes and ranks"
    elif found.pace is not None and facts.loaded is None:
        yield f"the loader was not timed with the step: its batches of {found.pace.size} do not fit"
    share = (facts.batch_s or 0.0) / facts.step_s
    if facts.batch_from == "example" and share >= MAKING:
        yield (
            f"copying the example batch takes {ms(facts.batch_s or 0.0)} of a step's {ms(facts.step_s)}: "
            "give a function make_batch(n) that makes batches as the program does"
        )


def _measured(found: Diagnosis, point: ThroughputPoint) -> Facts:
    """What the timed sizes say already."""
    return timed_facts(
        point,
        found.runs,
        budget_bytes=found.bench.budget_bytes,
        has_own_clock=isinstance(found.bench.device, CudaDevice),
        cut_off_by_memory=found.cut_off_by_memory,
    )


def timed_facts(
    point: ThroughputPoint,
    runs: Mapping[int, TimedRun],
    *,
    budget_bytes: int,
    has_own_clock: bool,
    cut_off_by_memory: bool,
) -> Facts:
    """What the timed sizes say of the size at this point."""
    size, run = point.size, runs[point.size]
    return Facts(
        size=size,
        step_s=point.step_s,
        steps=point.steps_timed,
        has_own_clock=has_own_clock,
        host_s=point.host_s,
        alloc_retries=run.alloc_retries,
        reserved_bytes=point.reserved_bytes,
        budget_bytes=budget_bytes,
        growth=None if point.gain is None else 2 / point.gain,
        cut_off_by_memory=cut_off_by_memory,
        flops_share=point.flops_share,
        crowded=[
            (one.size, one.alloc_retries, len(one.times_s))
            for one in sorted(runs.values(), key=lambda one: one.size)
            if one.size > size and one.alloc_retries
        ],
    )


def _read(found: Diagnosis, facts: Facts) -> Facts:
    """What a few more steps say."""
    bench, size = found.bench, facts.size
    source = bench.work._parts.get("source")
    batch_s: float | None = None

    def read() -> tuple[Busy | None]:
        nonlocal batch_s  # it counts, too, where the other reading has an OOM
        batch_s = batch_time(source, size, device=bench.device)
        return (busy_time(bench.work.step, size, device=bench.device),)

    # Two readings, for which the state is restored once.
    (busy,) = bench.briefly(read) or (None,)
    return replace(
        facts,
        busy_s=None if busy is None else busy.busy_s,
        kernels=None if busy is None else busy.kernels,
        batch_s=batch_s,
        batch_from=_SOURCES.get(type(source), "make_batch"),
        loaded=_loaded(found),
        shapes=_shapes(found, size),
        own_s=_own_times(found, size),
    )


def _loaded(found: Diagnosis) -> Loaded | None:
    """The step alone and the step with a batch of the loader, at the loader's size."""
    pace, loader, bench = found.pace, found.loader, found.bench
    if pace is None or loader is None:
        return None
    size = bench.ranks.minimum(pace.size, doing="the loader's batch size")
    ceiling = found.knee.ceiling
    if ceiling is not None and size > max(ceiling, max(found.runs)):
        return None  # it would not fit
    alone = found.runs.get(size)
    if alone is None:
        alone = bench.time(size, FINE)
    if not alone.fits:
        return None
    with fed_by(loader, bench.work.step) as fed:
        both = bench.time(size, FINE, step=fed)
    if not both.fits or size != pace.size:
        return None
    return Loaded(
        size=size,
        loader_s=pace.batch_s,
        # Means: workers give several batches at once and then let the step wait. Of both, since a mean
        # counts stalls that a median does not, and those are not the loader's.
        step_s=statistics.fmean(alone.times_s),
        both_s=statistics.fmean(both.times_s),
        batches=pace.batches,
        shapes=pace.shapes,
    )


def _shapes(found: Diagnosis, size: int) -> ShapeTimes | None:
    """The same steps twice, at a size that has not run: new shapes the first time, known ones the second.

    Restoring the state restores generators too, so the second pass draws the same shapes.
    """
    bench = found.bench
    ragged = bench.seen[size].distinct > 2
    if not ragged and (found.pace is None or found.pace.shapes <= 2):
        return None
    fresh = next((one for one in (size - 1, size - 2, size + 1) if one > 0 and one not in bench.seen), None)
    if fresh is None:
        return None
    steps = _RAGGED_STEPS if ragged else 1
    passes: list[tuple[list[float], int]] = []
    for _ in range(2):
        one = bench.briefly(lambda: _one_pass(bench, fresh, steps))
        if one is None:
            return None
        passes.append(one)
    (cold, distinct), (warm, again) = passes
    if distinct != again:
        return None  # a generator that was not restored: the two passes cannot be compared
    return ShapeTimes(steps=steps, distinct=max(distinct, 1), cold_s=sum(cold), warm_s=sum(warm))


def _one_pass(bench: Bench, size: int, steps: int) -> tuple[list[float], int]:
    times = []
    with watched_inputs(bench.model) as seen:
        for _ in range(steps):
            begun = time.perf_counter()
            bench.work.step(size)
            bench.device.synchronize()
            times.append(time.perf_counter() - begun)
    return times, seen.distinct


def _own_times(found: Diagnosis, size: int) -> Sequence[float]:
    """Each rank's step time without the others: DDP without its exchange, steps that do not talk as is."""
    bench = found.bench
    if bench.ranks.world_size == 1:
        return ()
    mine: float | None = bench.own_s.get(size)
    parallel = [one for one in bench.work.state if is_parallel(one)]
    if parallel:
        with without_exchange(bench.work.state) as quiet:
            if quiet:
                mine = bench.briefly(lambda: statistics.median(_one_pass(bench, size, _OWN_STEPS)[0][1:]))
            else:
                mine = None  # sharded: every step is an exchange
    paces = bench.ranks.gather(mine, doing="each rank's own step time")
    return () if any(one is None for one in paces) else paces
