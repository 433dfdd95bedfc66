"""Sizes of microbatches: how they add up to a batch, what is learned about them, how a change is reported.

Rules
- A batch is cut into microbatches of near-equal size (17 at 16 is 9 + 8); compiled code gets equal ones, of
  few sizes and at most one remainder instead, for each new size is compiled.
- What is known is kept per shape of a batch: the largest size that ran, the smallest that did not, and what
  sizes really used. A size is chosen by the number of microbatches: 64 samples at 22 or at 30 are three each.
- After an OOM the next size is half, or the largest that is known to run where that is more.
- Growing is cautious: after some calm batches a number of microbatches between the known ones is run; each
  failure doubles the wait. Where memory can be read, only a size that the readings allow is run.
- A new shape starts from what related shapes show: a longer batch is cut smaller before an OOM.
- A size that ran for longer samples runs for shorter ones: no shape is cut smaller than that, until it fails.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, final

from batchfit._engine.batch.pure.microbatch import Shape

log = logging.getLogger("batchfit")

PATIENCE = 4  # calm batches before a larger size is run
LONGEST_WAIT = 1024
MOST_SHAPES = 256
MOST_READINGS = 4
MARGIN = 0.92  # of the memory: what a size that never ran may be predicted to need
THRASHING = 2  # batches in a row with allocation retries that lower the size


def balanced(total: int, at_most: int) -> tuple[int, ...]:
    """Near-equal sizes of at most `at_most` that add up to `total`, the larger ones first.

    >>> balanced(17, 16)
    (9, 8)
    """
    count = -(-total // at_most)
    small, larger = divmod(total, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def equal(total: int, at_most: int) -> tuple[int, ...]:
    """Sizes of exactly `at_most`, and one remainder.

    >>> equal(17, 8)
    (8, 8, 1)
    """
    whole, rest = divmod(total, at_most)
    return (at_most,) * whole + ((rest,) if rest else ())


def rung(size: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (size.bit_length() - 1)


@final
@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known about the sizes of one shape. `size` is the one in use, 0: the whole batch."""

    size: int = 0
    good: int = 0  # the largest that ran
    bad: int = 0  # the smallest that did not; 0: none known
    calm: int = 0  # batches in a row without trouble
    wait: int = PATIENCE
    thrash: int = 0  # batches in a row in which allocations were retried
    readings: tuple[tuple[int, int], ...] = ()  # (size, bytes above what was held), few

    def ran(self, size: int, total: int, *, used_bytes: int | None = None) -> Bounds:
        """A batch of `total` ran in microbatches of at most `size`."""
        good = max(self.good, size)
        bad = 0 if self.bad <= good else self.bad
        present = self.size
        if size < total:
            present = size
        elif present <= size:
            present = size if bad else 0
        readings = self.readings if used_bytes is None else _with(self.readings, size, used_bytes)
        return replace(self, size=present, good=good, bad=bad, calm=self.calm + 1, readings=readings)

    def after_oom(self, size: int, total: int, *, sure: int = 0, compiled: bool = False) -> Bounds:
        """Microbatches of `size` did not fit: `size` of the answer is the next one, below 1 never.

        `sure`: what ran for samples that are longer, below which nothing is run before it has failed too.
        """
        probing = 0 < self.good < size
        good = self.good if probing else 0
        known = max(good, sure if sure < size else 0)
        count = -(-total // size)
        smaller = -(-total // (2 * count))
        smaller = min(max(smaller, known), size - 1)
        if compiled and smaller > 1 and smaller != known:
            smaller = rung(smaller)
        return replace(
            self,
            size=max(smaller, 1),
            good=good,
            bad=min(self.bad or size, size),
            calm=0,
            wait=min(2 * self.wait, LONGEST_WAIT) if probing else self.wait,
            # They promised too much, or the memory is not what it was.
            readings=tuple(one for one in self.readings if one[0] < size) if not probing else self.readings,
        )

    def thrashed(self, size: int, total: int, *, compiled: bool = False) -> Bounds:
        """Allocations were retried in the last batch: twice in a row, and the next one is cut smaller."""
        if self.thrash + 1 < THRASHING or size <= 1:
            return replace(self, thrash=self.thrash + 1)
        smaller = min(size - 1, -(-total // (-(-total // size) + 1)))
        smaller = rung(smaller) if compiled else smaller
        wait = min(2 * self.wait, LONGEST_WAIT)
        return replace(
            self, size=smaller, good=min(self.good, smaller), bad=size, calm=0, thrash=0, wait=wait
        )

    def settled(self) -> Bounds:
        """The last batch had no allocation retried."""
        return replace(self, thrash=0)

    def used_bytes(self, size: int) -> float | None:
        """What a size would use above what is held, by a line through the readings."""
        line = self.line()
        return None if line is None else line[0] + line[1] * size

    def line(self) -> tuple[float, float] | None:
        """(bytes that do not depend on the size, bytes per sample)."""
        if not self.readings:
            return None
        size, used = self.readings[-1]
        first_size, first_used = self.readings[0]
        slope = used / size
        if first_size < size and used > first_used:
            # One reading alone is a ray, and says too much of larger sizes; two show what is fixed.
            slope = min(slope, (used - first_used) / (size - first_size))
        return used - slope * size, slope

    def most(self, free_bytes: int | None) -> int | None:
        """The largest size that the readings allow in that much memory; None: they say nothing."""
        line = self.line()
        if line is None or free_bytes is None or line[1] <= 0:
            return None
        return max(0, int((free_bytes * MARGIN - line[0]) / line[1]))

    def next_size(self, total: int, free_bytes: int | None, *, compiled: bool = False) -> int:
        """The size for a batch of `total`, with `free_bytes` free for it where that is known."""
        size = self.size if self.size else total
        if size < total:
            size = max(size, self._grown(size, total, free_bytes, compiled))
        size = min(size, total)
        if self.bad and size >= self.bad and not self._due(total):
            size = max(self.good, 1) if self.good < self.bad else self.bad - 1
        if self.is_over(size, free_bytes):
            # It ran when more was free: before the optimizer had its state, say. What ran needs no margin.
            most = self.most(free_bytes) or 1
            size = max(1, min(size, most if self.is_over(self.good, free_bytes) else max(most, self.good)))
        return min(rung(size) if compiled and size < total else size, total)

    def is_over(self, size: int, free_bytes: int | None) -> bool:
        """Whether a size would use more than that, by its readings."""
        needed = self.used_bytes(size)
        return free_bytes is not None and needed is not None and needed > free_bytes

    def _due(self, total: int) -> bool:
        """So long without trouble that a size which failed once may be run once more."""
        return self.calm >= 16 * self.wait and self.size < total

    def _grown(self, size: int, total: int, free_bytes: int | None, compiled: bool) -> int:
        most = self.most(free_bytes)
        # Readings make a first growth safe; once one of them was wrong, growth waits as before.
        patience = self.wait if most is None or self.wait > PATIENCE else 1
        if self.calm < patience:
            return size
        if compiled:
            larger = min(2 * rung(size), total)
            allowed = not self.bad or larger < self.bad or self._due(total)
            return larger if allowed and (most is None or larger <= most) else size
        present = -(-total // size)
        fewest = -(-total // (self.bad - 1)) if self.bad > 1 else (present if self.bad else 1)
        if present > fewest:
            count = (fewest + present) // 2 if most is None else max(fewest, -(-total // max(most, 1)))
        elif present > 1 and self._due(total):
            count = present - 1
            if most is not None and -(-total // count) > most:
                return size
        else:
            return size
        return -(-total // count) if count < present else size


def _with(readings: tuple[tuple[int, int], ...], size: int, used_bytes: int) -> tuple[tuple[int, int], ...]:
    """The readings and a new one, by size; the extremes stay, for they carry the line."""
    table = dict(readings)
    table[size] = used_bytes
    kept = sorted(table.items())
    while len(kept) > MOST_READINGS:
        del kept[len(kept) // 2]
    return tuple(kept)


@final
class Learned:
    """What has been learned about all shapes; the ones not seen for longest are forgotten."""

    def __init__(self, bounds: Mapping[Shape, Bounds] | None = None) -> None:
        self._bounds: dict[Shape, Bounds] = dict(bounds or {})

    def __len__(self) -> int:
        return len(self._bounds)

    def of(self, shape: Shape) -> Bounds | None:
        """What is known about that very shape."""
        return self._bounds.get(shape)

    def put(self, shape: Shape, bounds: Bounds) -> None:
        """Remember `bounds`."""
        self._bounds.pop(shape, None)
        self._bounds[shape] = bounds
        if len(self._bounds) > MOST_SHAPES:
            del self._bounds[next(iter(self._bounds))]

    def sure(self, shape: Shape) -> int:
        """The largest size that ran for samples like these or longer ones; 0: none did."""
        return max((one.good for _, one in self._wider(shape)), default=0)

    def failed(self, shape: Shape, size: int) -> None:
        """That size did not fit: what ran for longer samples when more memory was free says nothing now."""
        for other, one in self._wider(shape):
            if one.good >= size and other != shape:
                self._bounds[other] = replace(one, good=0)

    def nothing_larger(self) -> None:
        """A search has said it: sizes beyond those that ran do not fit, for the shapes known so far."""
        self._bounds = {
            shape: replace(one, size=one.good, bad=one.good + 1) if one.good else one
            for shape, one in self._bounds.items()
        }

    def _wider(self, shape: Shape) -> list[tuple[Shape, Bounds]]:
        return [
            (other, one)
            for other, one in self._bounds.items()
            if other.family == shape.family and other.elements >= shape.elements
        ]

    def begin(self, shape: Shape, total: int, free_bytes: int | None, *, compiled: bool = False) -> int:
        """The size to begin a batch of `total` with."""
        known = self._bounds.get(shape)
        if known is not None:
            return known.next_size(total, free_bytes, compiled=compiled)
        size = min(total, self._guess(shape, total, free_bytes))
        return rung(size) if compiled and size < total else size

    def _guess(self, shape: Shape, total: int, free_bytes: int | None) -> int:
        """From the relative whose samples are nearest in extent, as if memory grew with their elements."""
        kin = [(other, b) for other, b in self._bounds.items() if other.family == shape.family and b.good]
        sure = max(self.sure(shape), 1)

        def distance(one: tuple[Shape, Bounds]) -> float:
            ratio = max(one[0].elements, 1) / max(shape.elements, 1)
            return max(ratio, 1 / ratio)

        read = [one for one in kin if one[1].line() is not None]
        if read and free_bytes is not None:
            other, bounds = min(read, key=distance)
            fixed, slope = bounds.line() or (0.0, 0.0)
            slope *= max(shape.elements, 1) / max(other.elements, 1)
            return max(sure, int((free_bytes * MARGIN - fixed) / slope)) if slope > 0 else total
        tight = [one for one in kin if one[1].bad]  # the others have had no OOM
        if not tight:
            return total
        other, bounds = min(tight, key=distance)
        return max(sure, bounds.good * max(other.elements, 1) // max(shape.elements, 1))

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"shapes": [{**shape._asdict(), **asdict(bounds)} for shape, bounds in self._bounds.items()]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Learned:
        """What `to_dict` wrote, by this version or an earlier one."""
        names = Bounds.__dataclass_fields__
        learned = cls()
        for entry in data["shapes"]:
            shape = Shape(entry["key"], entry["family"], entry["elements"])
            known = {name: entry[name] for name in names if name in entry}
            known["readings"] = tuple((int(size), int(used)) for size, used in known.get("readings", ()))
            learned.put(shape, Bounds(**known))
        return learned


EventKind = Literal["shrunk", "grown", "lowered", "retry", "skipped", "relearned"]


@final
@dataclass(frozen=True, slots=True)
class MicrobatchEvent:
    """The microbatch size changed, or what was learned did, and why: what `on_event` is called with.

    Attributes:
        kind: "shrunk" (OOM), "grown", "lowered" (allocation retries), "retry" (fragmented memory: the same
            size again), "skipped" (a batch without weight) or "relearned" (what was learned is not used).
        size_before: the size before.
        size_after: the size from now on.
        why: the reason, as a sentence.
        peak_bytes: peak of live bytes; None without a reading.
        shape: the shape of the batch; empty where it holds for all.
    """

    kind: EventKind
    size_before: int
    size_after: int
    why: str
    peak_bytes: int | None = None
    shape: str = ""

    def __str__(self) -> str:
        if self.kind == "relearned":  # of all sizes, so there is none to name
            return f"microbatch sizes are learned again: {self.why}"
        change = f"{self.size_before} -> {self.size_after}"
        return f"microbatch {change if self.size_after != self.size_before else self.size_after}: {self.why}"


@final
class EventLog:
    """Reports each change of a size: one line in the log, and a call of the user's `on_event`."""

    def __init__(self, on_event: Callable[[MicrobatchEvent], object] | None) -> None:
        self._on_event = on_event
        self._logged: set[str] = set()

    def report(
        self,
        kind: EventKind,
        before: int,
        after: int,
        why: str,
        *,
        shape: str = "",
        peak_bytes: int | None = None,
    ) -> None:
        """Log an event, and call `on_event` with it."""
        event = MicrobatchEvent(kind, before, after, why, peak_bytes, shape)
        log.log(logging.WARNING if kind == "relearned" else logging.INFO, "%s", event)
        if self._on_event is not None:
            self._on_event(event)

    def once(self, topic: str, text: str, level: int = logging.WARNING) -> None:
        """Log what holds for all batches, the first time only."""
        if topic not in self._logged:
            self._logged.add(topic)
            log.log(level, "%s", text)


_REQUEST = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")


def oom_in_short(message: str) -> str:
    """`OOM at a request of 40.0 MiB; retrying`; the message itself, where it names no request."""
    found = _REQUEST.search(message)
    return f"OOM at a request of {found[1]}; retrying" if found else message
