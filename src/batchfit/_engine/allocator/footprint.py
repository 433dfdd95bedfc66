"""A step's memory as a function of its batch size: bytes = fixed + per sample, for each allocation.

Rules:
- A `Trace` is what a step allocated and freed at one size, in order. Two traces whose streams have the same
  shape give every allocation a line `fixed + per_sample * size`; a third trace checks the lines.
- A `Footprint` answers for any size: the bytes live at the highest moment (exact, a convex function made of
  straight segments), where its knees are, and what is held then.
- Nothing here knows of torch or of a device; an allocator's rounding and fragmentation come from replaying
  the footprint's events (`_engine.allocator.caching`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, final

# What a block is for, in the order in which people ask.
KINDS = (
    *("weights", "gradients", "optimizer", "activations", "communication", "batch", "workspaces"),
    "temporaries",
)
STATE = ("weights", "gradients", "optimizer")  # no batch makes it smaller
# How the operation of a block begins that a kernel does without where there is no room for it.
OPTIONAL = "plan of "


class ShapeChangedError(Exception):
    """Two traces are not the same stream of allocations at different sizes."""


@final
class CodeLine(NamedTuple):
    """A line of the program that was running: the whole path of its file, its number, and its function."""

    file: str
    number: int
    function: str


@final
@dataclass(frozen=True, slots=True)
class Origin:
    """Where a block came from: its kind, the phase, the module's path, the source line and the operation.

    A detailed trace also has the program's `lines` that were running, the outermost first, and what `tensor`
    the block was made for ("float32[8, 512]"). They are no part of what makes two origins equal.
    """

    kind: str
    phase: str
    module: str = ""
    source: str = ""
    operation: str = ""
    lines: tuple[CodeLine, ...] = field(default=(), compare=False)
    tensor: str = field(default="", compare=False)
    stream: int = 0  # 0 is the one that the program computes on


@final
@dataclass(frozen=True, slots=True)
class Trace:
    """What some steps at one size allocated and freed.

    An event n >= 0 allocates block n, an event n < 0 frees block ~n; block n has `sizes[n]` bytes and comes
    from `origins[n]`. `step_ends[i]` is the number of events up to the end of step i; what comes before
    `begins` is there before the first step (weights, buffers).
    """

    size: int
    sizes: tuple[int, ...]
    origins: tuple[Origin, ...]
    events: tuple[int, ...]
    begins: int
    step_ends: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes asked for and live at the highest moment."""
        return max(accumulate(self.sizes[e] if e >= 0 else -self.sizes[~e] for e in self.events), default=0)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the batch that one step is given."""
        whole = sum(
            size for size, origin in zip(self.sizes, self.origins, strict=True) if origin.kind == "batch"
        )
        return whole // max(len(self.step_ends), 1)

    def left_by_each_step(self) -> tuple[int, str]:
        """Bytes that the last step leaves on top of the same ones of the step before it, and from which line.

        A list of losses that is never cleared keeps what hangs on them. What one step leaves and the next one
        takes away, or what was made once, is not counted.
        """
        if len(self.step_ends) < 2:
            return 0, ""
        *_, before, last, end = (self.begins, *self.step_ends)
        live = self.live_after(end)
        earlier = Counter(_made_by(self.origins[b]) for b, at in live.items() if before <= at < last)
        lines: Counter[str] = Counter()
        for block, at in live.items():
            origin = self.origins[block]
            if at >= last and origin.kind not in _LASTING and earlier[_made_by(origin)] > 0:
                earlier[_made_by(origin)] -= 1
                lines[origin.source] += self.sizes[block]
        return sum(lines.values()), max(lines, key=lines.__getitem__, default="")

    def live_after(self, count: int) -> dict[int, int]:
        """The blocks that are there after so many events, with when they were allocated."""
        live: dict[int, int] = {}
        for position, event in enumerate(self.events[:count]):
            if event >= 0:
                live[event] = position
            else:
                live.pop(~event, None)
        return live

    def beginning(self, steps: int) -> Trace:
        """The trace of its first steps alone."""
        ends = self.step_ends[:steps]
        events = self.events[: ends[-1]]
        count = sum(1 for event in events if event >= 0)  # blocks are numbered as they are allocated
        return replace(
            self, sizes=self.sizes[:count], origins=self.origins[:count], events=events, step_ends=ends
        )

    def ordered(self) -> Trace:
        """The same trace with each run of frees in the order of its blocks.

        Python frees some things in the order of their hashes (autocast's cache of weights), which differs
        from run to run; the allocator does not mind the order.
        """
        events: list[int] = []
        run: list[int] = []
        cuts = {self.begins, *self.step_ends}
        for position, event in enumerate(self.events):
            if (event >= 0 or position in cuts) and run:
                events += sorted(run, reverse=True)
                run = []
            if event < 0:
                run.append(event)
            else:
                events.append(event)
        events += sorted(run, reverse=True)
        return replace(self, events=tuple(events))


class TraceLog:
    """A trace while it is written down."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._origins: list[Origin] = []
        self._events: list[int] = []

    def allocate(self, size: int, origin: Origin) -> int:
        """A block of that many bytes; it stays until it is freed."""
        block = len(self._sizes)
        self._sizes.append(size)
        self._origins.append(origin)
        self._events.append(block)
        return block

    def written(self, size: int, begins: int, step_ends: Iterable[int]) -> Trace:
        events = tuple(self._events)
        return Trace(size, tuple(self._sizes), tuple(self._origins), events, begins, tuple(step_ends))


_LASTING = (*STATE, "workspaces")


def _made_by(origin: Origin) -> tuple[str, str, str]:
    return origin.kind, origin.operation, origin.source


@final
@dataclass(frozen=True, slots=True)
class PeakLine:
    """One straight segment of the peak: from `size` on, the peak is a line in the size, at event `moment`."""

    size: float
    moment: int
    fixed: float
    per_sample: float


@final
@dataclass(frozen=True, slots=True)
class Footprint:
    """A step's allocations for every size: `fixed[n] + per_sample[n] * size` bytes for block n."""

    fixed: tuple[float, ...]
    per_sample: tuple[float, ...]
    origins: tuple[Origin, ...]
    events: tuple[int, ...]
    begins: int
    step_ends: tuple[int, ...]

    @classmethod
    def between(cls, first: Trace, second: Trace) -> Footprint:
        """The footprint through two traces of the same stream."""
        check_same_stream(first, second)
        gap = second.size - first.size
        slopes = [(two - one) / gap for one, two in zip(first.sizes, second.sizes, strict=True)]
        fixed = [one - slope * first.size for one, slope in zip(first.sizes, slopes, strict=True)]
        return cls(tuple(fixed), tuple(slopes), first.origins, first.events, first.begins, first.step_ends)

    @classmethod
    def through(cls, small: Trace, whole: Trace) -> Footprint:
        """The footprint through a trace and a small one of its first step only.

        A later step does again what the first one did: its blocks grow as those do. What it alone does, in
        the optimizer, does not grow.
        """
        check_same_stream(whole, small, beginning=True)
        gap = whole.size - small.size
        count = len(small.sizes)
        held = sum(1 for event in whole.events[: whole.begins] if event >= 0)
        slopes = [(two - one) / gap for one, two in zip(small.sizes, whole.sizes, strict=False)]
        for begin, end in pairwise(whole.step_ends):
            like = held
            for block in (event for event in whole.events[begin:end] if event >= 0):
                same = next((one for one in range(like, count) if _alike(whole, one, block)), None)
                if same is not None:
                    like = same + 1
                elif whole.origins[block].phase != "optimizer":
                    raise ShapeChangedError("a later step does what the first one did not")
                slopes.append(0.0 if same is None else slopes[same])
        fixed = [one - slope * whole.size for one, slope in zip(whole.sizes, slopes, strict=True)]
        return cls(tuple(fixed), tuple(slopes), whole.origins, whole.events, whole.begins, whole.step_ends)

    @classmethod
    def of(cls, only: Trace) -> Footprint:
        """The footprint of one trace, for its own size alone."""
        nothing = (0.0,) * len(only.sizes)
        fixed = tuple(map(float, only.sizes))
        return cls(fixed, nothing, only.origins, only.events, only.begins, only.step_ends)

    def sizes_at(self, size: int) -> list[int]:
        """The bytes of each block at `size`."""
        # A block that shrinks with the batch would be odd, and a negative one impossible.
        return [
            max(0, round(fixed + slope * size))
            for fixed, slope in zip(self.fixed, self.per_sample, strict=True)
        ]

    def error_at(self, trace: Trace, *, of_bytes: float | None = None) -> float:
        """How far the lines are from a trace at another size: a share of that trace's peak or of `of_bytes`.

        The trace may have fewer steps than the lines. A line below zero counts as what it is.
        """
        check_same_stream(self, trace, beginning=True)
        lines = zip(self.fixed, self.per_sample, strict=True)
        ours, theirs = [round(fixed + slope * trace.size) for fixed, slope in lines], trace.sizes
        live = theirs_peak = worst = gap = 0
        for event in trace.events:
            block = event if event >= 0 else ~event
            sign = 1 if event >= 0 else -1
            live += sign * theirs[block]
            gap += sign * (ours[block] - theirs[block])
            theirs_peak = max(theirs_peak, live)
            worst = max(worst, abs(gap))
        return worst / max(theirs_peak if of_bytes is None else of_bytes, 1)

    def live_lines(self) -> tuple[list[float], list[float]]:
        """Live bytes after each event, as fixed parts and slopes."""

        def running(values: Sequence[float]) -> list[float]:
            return list(accumulate(values[e] if e >= 0 else -values[~e] for e in self.events))

        return running(self.fixed), running(self.per_sample)

    def peak_bytes(self, size: float) -> float:
        """Bytes asked for and live at the highest moment."""
        return max(self._live_at(size))

    def moment_of_peak(self, size: float) -> int:
        """The event after which the most is live; the first of several."""
        live = self._live_at(size)
        return max(range(len(live)), key=live.__getitem__)

    def _live_at(self, size: float) -> list[float]:
        return [fixed + slope * size for fixed, slope in zip(*self.live_lines(), strict=True)]

    @property
    def state_bytes(self) -> int:
        """The most that weights, gradients and optimizer state take at one moment, whatever the size."""
        live = [
            sign * self.fixed[block]
            for sign, block in ((1, event) if event >= 0 else (-1, ~event) for event in self.events)
            if self.origins[block].kind in STATE
        ]
        return round(max(accumulate(live), default=0))

    def peak_lines(self, largest: float = float("inf")) -> list[PeakLine]:
        """The straight segments of the peak from size 1 up, exactly: the upper envelope of all moments."""
        fixed, slopes = self.live_lines()
        best: dict[float, int] = {}
        for moment, (a, b) in enumerate(zip(fixed, slopes, strict=True)):
            if b not in best or a > fixed[best[b]]:
                best[b] = moment
        lines = sorted((slope, fixed[moment], moment) for slope, moment in best.items())
        hull: list[tuple[float, float, int]] = []  # slopes ascending
        starts: list[float] = []  # from which size each is on top
        for slope, at_zero, moment in lines:
            start = float("-inf")
            while hull:
                start = (hull[-1][1] - at_zero) / (slope - hull[-1][0])
                if start > starts[-1]:
                    break
                hull.pop()
                starts.pop()
                start = float("-inf")
            hull.append((slope, at_zero, moment))
            starts.append(start)
        found = []
        for index, (slope, at_zero, moment) in enumerate(hull):
            ends = starts[index + 1] if index + 1 < len(hull) else float("inf")
            if ends > 1 and starts[index] <= largest:
                found.append(PeakLine(max(1.0, starts[index]), moment, at_zero, slope))
        return found

    def upper_bound(
        self, capacity_bytes: float, extra: tuple[float, float] = (0.0, 0.0), most: int | None = None
    ) -> int:
        """The largest size whose live bytes alone are within the capacity; 0 where none is.

        `extra` is what the footprint does not show: fixed bytes, and bytes per sample.
        """
        bound = float("inf") if most is None else float(most)
        for line in self.peak_lines():
            fixed, slope = line.fixed + extra[0], line.per_sample + extra[1]
            if slope > 0:
                bound = min(bound, (capacity_bytes - fixed) / slope)
            elif fixed > capacity_bytes:
                return 0
        return int(min(max(bound, 0.0), 2**30))

    @property
    def carried(self) -> tuple[tuple[int, int], ...] | None:
        """Which blocks of the last step take the place of which of the step before (gradients, as a rule).

        What a step frees of the one before it, the next step must free of this one: pairs of (block of the
        step before, block of the last step). None where the steps are not alike, so that they cannot be
        repeated.
        """
        if len(self.step_ends) < 2:
            return None
        begin, end = self.step_ends[-2:]
        made = {event for event in self.events[begin:end] if event >= 0}
        freed = [~event for event in self.events[begin:end] if event < 0]
        old = sorted(block for block in freed if block not in made)
        new = sorted(made - set(freed))

        def shape(block: int) -> tuple[float, float]:
            return self.fixed[block], self.per_sample[block]

        # The same number of blocks of each size: which of two equal ones it is does not matter.
        by_shape = sorted(old, key=shape), sorted(new, key=shape)
        if [shape(one) for one in by_shape[0]] != [shape(one) for one in by_shape[1]]:
            return None
        return tuple(zip(*by_shape, strict=True))

    @property
    def again(self) -> tuple[int, ...]:
        """The events of the first step when it comes again: without what it takes once and keeps."""
        step = self.events[self.begins : self.step_ends[0]]
        made = {event for event in step if event >= 0}
        gone = made & {~event for event in step if event < 0}
        return tuple(event for event in step if (event if event >= 0 else ~event) in gone)

    @property
    def optional(self) -> dict[int, tuple[int, ...]]:
        """Each block that a kernel does without if need be, with all blocks of the same plan."""
        plans: dict[tuple[str, float, float], list[int]] = {}
        for block, origin in enumerate(self.origins):
            if origin.operation.startswith(OPTIONAL):
                key = (origin.operation, self.fixed[block], self.per_sample[block])
                plans.setdefault(key, []).append(block)
        return {block: tuple(blocks) for blocks in plans.values() for block in blocks}

    @property
    def streams(self) -> dict[int, int]:
        """The streams of blocks that are not made on the one that the program computes on."""
        return {block: origin.stream for block, origin in enumerate(self.origins) if origin.stream}

    @property
    def bare(self) -> Footprint:
        """The same as it is where there is no room for what kernels can do without."""
        left_out = self.optional
        fixed, slopes = (
            tuple(0.0 if block in left_out else one for block, one in enumerate(values))
            for values in (self.fixed, self.per_sample)
        )
        return replace(self, fixed=fixed, per_sample=slopes)


def expected_end(small: Trace, capacity_bytes: int) -> int:
    """About the largest size, from one trace of a few samples: too small as a rule, rarely too large.

    What is made on the way forward and back is taken to grow with the size, all else to stay.
    """
    growing = highest = fixed = 0
    for event in small.events:
        block = event if event >= 0 else ~event
        change = small.sizes[block] if event >= 0 else -small.sizes[block]
        origin = small.origins[block]
        if origin.kind in ("activations", "batch", "temporaries") and origin.phase != "optimizer":
            growing += change
            highest = max(highest, growing)
        else:
            fixed += change
    return max(0, int((capacity_bytes - fixed) * small.size / highest)) if highest else small.size


def _alike(trace: Trace, one: int, two: int) -> bool:
    first, second = trace.origins[one], trace.origins[two]
    return (
        trace.sizes[one] == trace.sizes[two]
        and first.operation == second.operation
        and first.phase == second.phase
    )


def check_same_stream(one: Trace | Footprint, two: Trace | Footprint, *, beginning: bool = False) -> None:
    """Refuse two streams that differ in anything but the bytes; with `beginning`, two may end earlier."""
    events, ends = one.events, one.step_ends
    if beginning:
        events, ends = events[: len(two.events)], ends[: len(two.step_ends)]
    if events == two.events and ends == two.step_ends:
        return
    shorter = min(len(one.events), len(two.events))
    first = next((i for i in range(shorter) if one.events[i] != two.events[i]), shorter)
    block = next((e for e in one.events[first:] if e >= 0), None)
    origin = one.origins[block] if block is not None else None
    where = f" at {origin.operation} ({origin.source or origin.phase})" if origin is not None else ""
    raise ShapeChangedError(
        f"the step allocates in another order at another batch size: {len(one.events)} and "
        f"{len(two.events)} events, the first difference{where}"
    )
