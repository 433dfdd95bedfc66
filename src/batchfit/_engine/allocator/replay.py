"""Whether a size fits: a footprint's steps, replayed through the caching allocator under a capacity.

Rules:
- Steps are repeated until the allocator settles: a size that gets through two steps may die in the eighth
  (ResNet-50 on an H200: 562 passes 2 steps, 556 dies in a stability check (soak) of 25, 549 survives).
- A workspace that cuDNN finds no room for is not the end: it takes another plan, and remembers it. What such
  a plan needs is not known; it is taken for nothing.
- "Sustained" means what it means in a trial: no retry once settled, unless a step generates. The answer is
  the largest size that is sustained, and every size that is answered has been replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from batchfit._engine.allocator.caching import AllocatorSettings, Block, CachingAllocator
from batchfit._engine.allocator.footprint import Footprint

STEPS = 12
# Of a step that generates, as in a stability check (soak): the second finds other free blocks than the first.
_CALLS = 3
NO_STREAMS: Mapping[int, int] = {}
_SETTLED = 2  # steps in a row without a retry


@final
@dataclass(frozen=True, slots=True)
class Simulation:
    """How a size fared."""

    size: int
    fits: bool
    sustained: bool
    retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    failed_at: int | None = None  # the event that found no room


def simulate(
    footprint: Footprint,
    size: int,
    *,
    capacity_bytes: int | None,
    rules: AllocatorSettings = AllocatorSettings(),  # noqa: B008  frozen
    steps: int = STEPS,
    extra_bytes: float = 0.0,
    first_size: int | None = None,
    may_retry: bool = False,
) -> Simulation:
    """Run `steps` steps of `size` samples; `extra_bytes` are taken first and held throughout.

    `may_retry`: a step that generates. As in its trials, retries are no reason against a size, and what it
    does not keep for good is gone when it ends; the footprint may be of one step.
    With `first_size` the first step has that many samples, and the cache is emptied after it.
    """
    run = _ReplayedSteps(footprint, size, CachingAllocator(capacity_bytes, rules))
    if extra_bytes > 0 and run.device.allocate(round(extra_bytes)) is None:
        return run.failed(0)
    failed_at = run.traced_steps(first_size)
    if failed_at is not None:
        return run.failed(failed_at)
    if may_retry:
        # Without a capacity nothing is fragmented, and one call shows all.
        return run.more_calls(_CALLS if capacity_bytes is not None else 1)
    return run.more_steps(steps)


@final
class _ReplayedSteps:
    """The steps of a footprint on a device, and the blocks that are live."""

    def __init__(self, footprint: Footprint, size: int, device: CachingAllocator) -> None:
        self.footprint = footprint
        self.size = size
        self.device = device
        self.sizes = footprint.sizes_at(size)
        self.optional = footprint.optional
        self.streams = footprint.streams
        self.blocks: dict[int, Block] = {}

    def ended(self, *, fits: bool, sustained: bool, failed_at: int | None = None) -> Simulation:
        device = self.device
        peaks = device.peak_allocated_bytes, device.peak_reserved_bytes
        return Simulation(self.size, fits, sustained, device.retries, *peaks, failed_at)

    def failed(self, at: int) -> Simulation:
        return self.ended(fits=False, sustained=False, failed_at=at)

    def play(self, events: tuple[int, ...], begin: int, end: int) -> int | None:
        return self._played(events, begin, end, self.sizes)

    def _played(self, events: tuple[int, ...], begin: int, end: int, sizes: list[int]) -> int | None:
        return play(events, begin, end, sizes, self.device, self.blocks, self.optional, self.streams)

    def traced_steps(self, first_size: int | None) -> int | None:
        """The steps that were traced; the event that found no room."""
        footprint, begin = self.footprint, 0
        events, ends = footprint.events, footprint.step_ends
        if first_size is not None:
            begin, sizes = ends[0], footprint.sizes_at(first_size)
            failed_at = self._played(events, 0, begin, sizes)
            self.device.empty_cache()
            if failed_at is not None:
                return failed_at
        return self.play(events, begin, ends[-1])

    def more_calls(self, calls: int) -> Simulation:
        """A step that generates, called again."""
        again = self.footprint.again
        for _ in range(1, calls):
            failed_at = self.play(again, 0, len(again))
            if failed_at is not None:
                return self.failed(failed_at)
        return self.ended(fits=True, sustained=True)

    def more_steps(self, steps: int) -> Simulation:
        """The last step repeated, until the allocator settles or there were `steps` in all."""
        footprint, device, blocks = self.footprint, self.device, self.blocks
        pairs, ends = footprint.carried, footprint.step_ends
        if pairs is None or len(ends) < 2:
            return self.ended(fits=True, sustained=device.retries == 0)
        quiet, before = 0, device.retries
        for _ in range(len(ends), steps):
            for old, new in pairs:
                blocks[old] = blocks.pop(new)
            failed_at = self.play(footprint.events, ends[-2], ends[-1])
            if failed_at is not None:
                return self.failed(failed_at)
            quiet = quiet + 1 if device.retries == before else 0
            before = device.retries
            if quiet == _SETTLED:
                return self.ended(fits=True, sustained=True)
        return self.ended(fits=True, sustained=quiet > 0 or device.retries == 0)


def play(
    events: tuple[int, ...],
    begin: int,
    end: int,
    sizes: list[int],
    device: CachingAllocator,
    blocks: dict[int, Block],
    optional: Mapping[int, tuple[int, ...]],
    streams: Mapping[int, int] = NO_STREAMS,
) -> int | None:
    """Run events on a device; the position of the one that found no room, None where all did."""
    allocate, free = device.allocate, device.free
    for position in range(begin, end):
        event = events[position]
        if event >= 0:
            block = allocate(sizes[event], streams.get(event, 0)) if streams else allocate(sizes[event])
            if block is None:
                alike = optional.get(event)
                if alike is None:
                    return position
                for one in alike:
                    sizes[one] = 0
                block = allocate(0)
                assert block is not None
            blocks[event] = block
        else:
            free(blocks.pop(~event))
    return None


def largest(
    footprint: Footprint,
    *,
    capacity_bytes: int,
    rules: AllocatorSettings = AllocatorSettings(),  # noqa: B008  frozen
    extra: tuple[float, float] = (0.0, 0.0),
    most: int | None = None,
    first_size: int | None = None,
    may_retry: bool = False,
) -> Simulation | None:
    """The largest size that is sustained, up to `most`; None where not even one sample is.

    `extra` is what the footprint does not show: fixed bytes, and bytes per sample. Fragmentation is
    not monotone: a size may run although smaller ones do not (GPT-2 with checkpointing at 16 GiB:
    35 runs, 36 fails on the GPU as it does here, and 40 to 43 run here). Such an island is not answered:
    the sizes below the answer run too. A retry alone must not decide it: what a retry makes fit also
    fits with a little more held (ALBERT in bf16 at 16 GiB: 25 last on the GPU; 26 runs here with 6 MiB
    held besides, and with 4 or 8 it does not). Of a step that generates (`may_retry`) all run with a
    little more held, since its end is ragged: how many inactive split blocks a growing cache leaves is
    decided by small things.
    """
    tried: dict[tuple[int, float], Simulation] = {}

    def run(size: int, more_bytes: float = 0.0) -> Simulation:
        if (size, more_bytes) not in tried:
            held = max(0.0, extra[0] + extra[1] * size)
            tried[size, more_bytes] = simulate(
                footprint,
                size,
                capacity_bytes=capacity_bytes,
                rules=rules,
                extra_bytes=held + more_bytes,
                first_size=first_size,
                may_retry=may_retry,
            )
        return tried[size, more_bytes]

    def is_sure(size: int, more_bytes: float) -> bool:
        """Whether it is sustained, and not by a retry that any little more held would undo."""
        first = run(size, more_bytes)
        if may_retry or not first.sustained or not first.retries:
            return first.sustained
        return any(run(size, more * capacity_bytes).sustained for more in (_A_LITTLE, _MORE))

    top = footprint.upper_bound(capacity_bytes, extra, most) + 1
    close, island = (0.01, _RAGGED) if may_retry else (0.0, _ISLAND)
    known = 0
    while top > 1:
        best = _last_sustained(run, top, close, known)
        if best is None:
            return None
        checks = [(max(1, round(best * (1 - less))), more * capacity_bytes) for less, more in island]
        failing = next((size for size, more in checks if not is_sure(size, more)), None)
        if failing is None or best == 1:
            return run(best)
        # A retry decides over a band of sizes: among millions of samples it is not crossed one by one.
        failing -= best // _SHARE if failing == best else 0
        top = 2 if failing == 1 and run(1).sustained else failing
        if may_retry:  # a replay takes a third of a second
            ran = (size for (size, more), one in tried.items() if one.sustained and not more)
            known = max((size for size in ran if size < top), default=0)
    return None


# How far below an answer the sizes must run as well (people round down), and with what share held besides.
# The next answer is below the first that does not.
_ISLAND = tuple((less, 0.0) for less in (0.15, 0.1, 0.075, 0.05, 0.035, 0.02, 0.01, 0.0))
_A_LITTLE, _MORE = 0.0005, 0.002
_SHARE = 10_000  # the answer is exact to one part in so many
_RAGGED = (
    *((0.0, _A_LITTLE), (0.0, _MORE), (0.005, 0.0), (0.005, _MORE), (0.01, 0.0), (0.01, _A_LITTLE)),
    *((0.015, _MORE), (0.02, 0.0), (0.02, _A_LITTLE), (0.03, _MORE), (0.05, 0.0), (0.1, 0.0)),
)


def _last_sustained(run: Callable[[int], Simulation], top: int, close: float, known: int) -> int | None:
    """By halving, from a size that is known to run, or else from a few per cent below the top on.

    That is what fragmentation costs as a rule.
    """
    low, high, step = known, top, max(1, round(top * 0.03))
    while high - low > max(1, close * low):
        size = high - step if low == 0 else (low + high) // 2
        if run(max(1, size)).sustained:
            low = max(1, size)
        else:
            high = max(1, size)
            step *= 2
    return low or None


def residual_of(first: tuple[int, int], second: tuple[int, int], *, small: float) -> tuple[float, float]:
    """Fixed bytes and bytes per sample, from what two sizes needed beyond the trace.

    A trace is a line near the largest size, and may say a little too much at a small one: that is no sign of
    too little at the end. What is `small` at the larger size is taken for fixed: should it grow with the
    size, it is as small a share at the end, and the margin covers it.
    """
    (a, more_a), (b, more_b) = ((size, max(0, more)) for size, more in (first, second))
    slope = 0.0 if more_b <= small else max(0.0, (more_b - more_a) / (b - a))
    return (more_b - slope * b if slope else float(max(more_a, more_b)), slope)
