"""Makes a workload's footprint: traces at a few sizes, a line through each allocation, and a check.

Rules:
- Two small traces show about where the end is; two more near the end give the lines, because the
  workspace of kernels is not a straight line from 1 to 1000. A trace costs the same at any size, as long as
  the host can make the batch.
- The lines are checked against a trace that they do not go through: a small one, which is there already, or
  one in the middle. Where they are off by more than a hundredth, or the streams differ from size to size,
  they are not used: each size is traced (`TracedWorkload.at`), as long as that takes no more than a minute.
- Far below the sizes that were traced the lines may be off by what kernels take at no small size: down there
  the small traces answer, and a budget that ends there is traced by itself (`TracedWorkload.is_off_at`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import nn

from batchfit._engine.allocator.footprint import (
    Footprint,
    ShapeChangedError,
    Trace,
    check_same_stream,
    expected_end,
)
from batchfit._engine.allocator.gpus import DEFAULT, Gpu
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.trace import TraceSource, WorkloadTraces
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._units import format_bytes
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

SMALL = (2, 3)
STRAIGHT = 0.01  # how far off, as a share of the peak, lines may be and still be used
_HOST_BATCH_BYTES = 2**28  # the largest batch that a trace makes on the host
_FAR_BEYOND_TRACE = 1.4  # times beyond its sizes `glance` draws its lines again
_REPORTED_GROWTH_BYTES = 2**20  # that a step leaves on top of those before
# How long sizes are traced one by one: a loop over samples takes as long as it has samples.
_EACH_SIZE_S = 60.0
_NO_LINES = "it allocates in another order at each size, so each must be traced"


@final
@dataclass(slots=True)
class TracedWorkload:
    """The footprint of what a source traces, and how it came about."""

    source: TraceSource
    footprint: Footprint | None
    sizes: tuple[int, ...]
    check: float = 0.0  # how far the lines were from the trace that checks them, as a share of a peak
    trace_s: float = 0.0
    caveats: tuple[str, ...] = ()
    small: tuple[Trace, Trace] | None = None  # the first two traces, for another budget's lines
    budget_bytes: int = 0  # where they end
    gap_bytes: float = 0.0  # how far the lines are from the small traces
    single: dict[int, Footprint] = field(default_factory=dict)  # of sizes that were traced by themselves
    _single_s: float = 0.0

    @property
    def rules(self) -> CudaRules:
        """The GPU that was traced for."""
        return self.source.rules

    @property
    def may_retry(self) -> bool:
        """As in a trial: retries of a step that generates are no reason against a size."""
        return self.source.may_retry

    def at(self, size: int) -> Footprint:
        """The footprint to replay for `size`."""
        if size in self.single:
            return self.single[size]
        return self._by_itself(size) if self.footprint is None else self.footprint

    def _by_itself(self, size: int) -> Footprint:
        begun = time.perf_counter()
        left_s = _EACH_SIZE_S - self._single_s
        try:
            found = self.source.trace(size, steps=self.source.steps, limit_s=left_s)
        except UntraceableError as error:
            if time.perf_counter() - begun < left_s:
                raise
            why = f"{_NO_LINES}, and {size} samples are more than {_EACH_SIZE_S:.0f} s allow"
            raise UntraceableError("", "", why) from error
        finally:
            self._single_s += time.perf_counter() - begun
        self.single[size] = Footprint.of(found)
        return self.single[size]

    def is_off_at(self, size: int, budget_bytes: int) -> bool:
        """Whether the lines are too far off for a budget that ends at `size`, far below where they are from.

        They pass the small traces by `gap_bytes`: no more, as a rule, between these and their own.
        """
        far = budget_bytes < self.budget_bytes and size < self.sizes[0]
        return far and self.gap_bytes > STRAIGHT * budget_bytes

    @property
    def traced_sizes(self) -> list[int]:
        """The sizes that were traced one by one."""
        return sorted(self.single)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU that is really here."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(
        name=properties.name,
        usable_bytes=properties.total_memory,
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        threads_per_multiprocessor=getattr(properties, "max_threads_per_multi_processor", 2048),
        measured=True,
    )


def rules_for(workload: Workload, gpu: Gpu | None = None, reach: StepReach | None = None) -> CudaRules:
    """A fake `cuda` where the workload is on one, a fake GPU on the CPU otherwise.

    Another GPU than the one that is here is always traced on the CPU: torch would make the choices of the
    GPU that it sees.
    """
    device = _cuda_device((reach_of(workload) if reach is None else reach).parts)
    if device is not None and gpu is None:
        return CudaRules(gpu_of(device), device)
    return CudaRules(gpu or DEFAULT, torch.device("cpu", 1))


def trace_workload(
    workload: Workload,
    *,
    rules: CudaRules,
    budget_bytes: int,
    most: int | None = None,
    small: tuple[Trace, Trace] | None = None,
    limit_s: float | None = None,
    reach: StepReach | None = None,
    changes: tuple[Any, ...] = (),
    notes: tuple[str, ...] = (),
) -> TracedWorkload:
    """The footprint of a workload, as in `trace_source`; `reach` is what its step can reach, if known.

    `changes` and `notes` are those of `WorkloadTraces`.
    """
    source = WorkloadTraces(reach_of(workload) if reach is None else reach, rules, changes, notes)
    return trace_source(source, budget_bytes=budget_bytes, most=most, small=small, limit_s=limit_s)


def trace_source(
    source: TraceSource,
    *,
    budget_bytes: int,
    most: int | None = None,
    small: tuple[Trace, Trace] | None = None,
    limit_s: float | None = None,
) -> TracedWorkload:
    """The footprint of a source, from traces around the largest size that may fit the budget.

    No size above `most` is asked about. `small` are the first two traces of an earlier call for this
    source. A trace that takes longer than `limit_s` is given up.
    """
    begun = time.perf_counter()
    traces = _Traces(source, limit_s, small)
    # One step is enough to see about where the end is. It is also the warm-up: the first trace in a process
    # differs by a few operations that are done once.
    first, second = (traces.at(size, steps=1) for size in SMALL)
    traced = TracedWorkload(source, None, (), small=(first, second), budget_bytes=budget_bytes)
    # A loop over samples has another stream at each size, and far sizes take as long as they are large.
    with contextlib.suppress(ShapeChangedError):
        check_same_stream(first, second)
        least = min((one for one in (most, source.most_size) if one is not None), default=None)
        _draw_lines(traced, traces, around(first, second, budget_bytes, least))
    traced.caveats = (*source.caveats(), *_growing(traces.all()))
    traced.trace_s = time.perf_counter() - begun
    return traced


@final
class _Traces:
    """Traces of one source at several sizes; each is made once."""

    def __init__(self, source: TraceSource, limit_s: float | None, small: tuple[Trace, Trace] | None) -> None:
        self._trace = partial(source.trace, limit_s=limit_s)
        self._whole = source.steps
        self._done = {(one.size, 1): one for one in small or ()}

    def at(self, size: int, steps: int | None = None) -> Trace:
        key = (size, self._whole if steps is None else steps)
        if key not in self._done:
            self._done[key] = self._trace(size, steps=key[1])
        return self._done[key]

    def lines(self, low: int, high: int) -> Footprint:
        # A second step grows as the first one does, so it is traced at one of the two sizes only.
        try:
            return Footprint.through(self.at(low, steps=1), self.at(high))
        except ShapeChangedError:
            return Footprint.between(self.at(low), self.at(high))

    def all(self) -> Iterable[Trace]:
        return self._done.values()


def _draw_lines(traced: TracedWorkload, traces: _Traces, sizes: tuple[int, int]) -> None:
    """Put lines through two sizes into `traced`, and check them; none where they are off by too much."""
    low, high = traced.sizes = sizes
    second = traces.at(SMALL[1], steps=1)
    footprint = traces.lines(low, high)
    traced.gap_bytes = _gap_bytes(footprint, second)
    # A square through whose ends the lines go is half its height off down there, and a sixteenth in the
    # middle.
    traced.check = traced.gap_bytes / footprint.peak_bytes(high)
    between = (low // 32, low // 4) if traced.check > STRAIGHT else ()
    if traced.check > STRAIGHT:  # kernels may take other ways with three samples than with thirty
        middle = (low + high) // 2 if high - low > 1 else high + 2
        traced.check = footprint.error_at(traces.at(middle))
        traced.sizes = tuple(sorted((low, middle, high)))
    if traced.check > STRAIGHT:
        return  # scores of all samples against all (contrastive losses) grow as a square
    if low > SMALL[1]:
        more = [traces.at(one, steps=1) for one in between if one > SMALL[1]]
        traced.single = _below(second, more, traces.at(high))
    traced.footprint = footprint


def glance(
    reach: StepReach, *, rules: CudaRules, budget_bytes: int, limit_s: float | None = None
) -> TracedWorkload:
    """The footprint from one step of a few samples and two steps near the end: half the time, no check.

    For those who compare it with a real run before they trust it. Where the end turns out to be far beyond
    what one step let expect, the lines are drawn again from there: what is not quite a line in the size (all
    samples against all, staging) shows most at the end.
    """
    begun, source = time.perf_counter(), WorkloadTraces(reach, rules)
    small = source.trace(SMALL[0], steps=1, limit_s=limit_s)
    most = most_on_host(small.batch_bytes / small.size)
    high = min(expected_end(small, budget_bytes), most)

    def through(size: int, limit_s: float | None) -> Footprint:
        return Footprint.through(small, source.trace(size, steps=source.steps, limit_s=limit_s))

    try:
        if high <= SMALL[1]:
            raise ShapeChangedError("too few samples fit to draw lines through two sizes")
        footprint = through(high, limit_s)
    except ShapeChangedError:
        return trace_source(source, budget_bytes=budget_bytes, limit_s=limit_s)
    end = footprint.upper_bound(budget_bytes, most=most)
    left_s = None if limit_s is None else limit_s - (time.perf_counter() - begun)
    if end > _FAR_BEYOND_TRACE * high and not source.may_retry:  # whose traces take long
        # What is slow or fails that far out leaves the first lines, which a run will be compared with.
        with contextlib.suppress(ShapeChangedError, UntraceableError):
            footprint, high = through(end, left_s), end
    took_s = time.perf_counter() - begun
    return TracedWorkload(source, footprint, (small.size, high), trace_s=took_s, caveats=source.caveats())


def _gap_bytes(footprint: Footprint, small: Trace) -> float:
    """How far the lines are from a small trace of one step."""
    try:
        return footprint.error_at(small, of_bytes=1)
    except ShapeChangedError:
        return float("inf")


def _below(small: Trace, more: list[Trace], whole: Trace) -> dict[int, Footprint]:
    """Footprints that are right at sizes far below those of the lines; one for each size that was traced."""
    found: dict[int, Footprint] = {}
    for one in (small, *more):
        with contextlib.suppress(ShapeChangedError):
            near = Footprint.through(one, whole)
            sizes = range(1, one.size + 1) if one is small else (one.size,)
            found |= dict.fromkeys(sizes, near)
    return found


def around(first: Trace, second: Trace, budget_bytes: int, most: int | None = None) -> tuple[int, int]:
    """Two sizes near the largest that the budget may allow and the host can make, up to `most`."""
    most = Footprint.between(first, second).upper_bound(budget_bytes, most=most)
    sample_bytes = (second.batch_bytes - first.batch_bytes) / (second.size - first.size)
    high = min(most, most_on_host(sample_bytes))
    return (max(high // 2, SMALL[1]), high) if high > 2 * SMALL[1] else SMALL


def most_on_host(sample_bytes: float) -> int:
    """The largest size whose batch a trace makes on the host: that takes time."""
    return int(_HOST_BATCH_BYTES / sample_bytes) if sample_bytes > 0 else 2**30


def _growing(traces: Iterable[Trace]) -> Iterator[str]:
    """What no single size answers: a step that leaves more and more behind."""
    left, line = max((one.left_by_each_step() for one in traces), default=(0, ""))
    if left >= _REPORTED_GROWTH_BYTES:
        yield f"each step keeps {format_bytes(left)} more than the one before ({line}): no size lasts"


def _cuda_device(parts: Iterable[Any]) -> torch.device | None:
    models = (part for part in parts if isinstance(part, nn.Module))
    devices = (tensor.device for model in models for tensor in model.parameters())
    return next((device for device in devices if device.type == "cuda"), None)
