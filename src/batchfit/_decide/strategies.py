"""The strategies: which size to try next, as pure functions of settings and history.

Rules:
- A strategy takes a `State` and returns the next `Ask`, or the reason (a key of `results.REASONS`) why it
  asks nothing more. It keeps nothing: the same state always gives the same answer.
- Every failure is a bound: no size at or above one is asked again, whatever the memory model says.
- Only allowed sizes are asked, and no size twice with the same `soak` flag.
- With `soak`, an answer has survived a soak. One that does not is a failure like any other; the search goes
  on just below it, since a soak fails by one or two per cent (ResNet-50 on an H200: 562 passes 3 steps,
  556 dies in the soak, 549 survives).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from batchfit._decide.memory import NOISE, Curve, Outlook, Reading, need_bytes

# Without max_size a search ends here: no tensor library indexes more samples, and a step that ignores its
# size would be tried for ever.
LARGEST = 2**30
# How many trials may fail to halve the bracket before the memory model is no longer asked.
PATIENCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one trial taught."""

    size: int
    fits: bool
    soak: bool = False
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    split_bytes: int | None = None
    held_bytes: int | None = None
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """The trial to run next: a size, and whether to run it as long as a soak."""

    size: int
    soak: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """The allowed sizes, ascending: `first + i * step`, or `first * 2**i` where `step` is 0."""

    first: int
    step: int
    count: int

    @classmethod
    def between(cls, smallest: int, largest: int, *, multiple_of: int = 1, doubling_from: int | None = None) -> Sizes:
        """Multiples of `multiple_of`, or `doubling_from * 2**i`, in [smallest, largest]; `count` may be 0."""
        if doubling_from is not None:
            first = doubling_from
            while first < smallest:
                first *= 2
            return cls(first, 0, (largest // first).bit_length())
        first = -(-smallest // multiple_of) * multiple_of
        return cls(first, multiple_of, max(0, (largest - first) // multiple_of + 1))

    def at(self, index: int) -> int:
        """The allowed size at `index`, counted from the smallest."""
        return self.first + index * self.step if self.step else self.first << index

    def index(self, size: float) -> int:
        """The index of the largest allowed size up to `size`; -1 below the smallest."""
        if size < self.first:
            return -1
        whole = math.floor(min(size, self.last))
        return (whole - self.first) // self.step if self.step else (whole // self.first).bit_length() - 1

    @property
    def last(self) -> int:
        """The largest allowed size."""
        return self.at(self.count - 1)

    def within(self, size: float, *, above: int | None, below: int | None) -> int:
        """The allowed size nearest under `size` that lies strictly between two allowed sizes."""
        low = self.index(above) + 1 if above is not None else 0
        high = self.index(below) - 1 if below is not None else self.count - 1
        return self.at(max(low, min(high, self.index(size))))

    def __contains__(self, size: int) -> bool:
        return self.first <= size <= self.last and self.at(self.index(size)) == size


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The settings of a search and what its trials taught so far."""

    strategy: str = "guided"
    budget_bytes: int | None = None
    min_size: int = 1
    max_size: int | None = None
    multiple_of: int = 1
    power_of_two: bool = False
    tolerance: float = 0.02
    start: int | None = None
    attempts: int = 5
    max_trials: int | None = None
    soak: bool = True
    told: tuple[Told, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """The sizes that may be asked."""
        doubling_from = None
        if self.power_of_two or self.strategy == "powers":
            doubling_from = self.multiple_of
        largest = LARGEST if self.max_size is None else self.max_size
        return Sizes.between(self.min_size, largest, multiple_of=self.multiple_of, doubling_from=doubling_from)


@dataclass(frozen=True, slots=True)
class Bracket:
    """What the history proves: `good` ran, `bad` did not, and nothing at or above `bad` counts."""

    sizes: Sizes
    good: int | None
    bad: int | None
    sustained: int | None  # the largest size below `bad` that survived a soak
    setbacks: int  # failures in a row, at the end of the history
    soak_failed: bool  # some size that ran did not survive its soak

    @classmethod
    def of(cls, state: State) -> Bracket:
        """The bracket after all trials of `state`."""
        bad = min((one.size for one in state.told if not one.fits), default=None)
        ran = [one for one in state.told if one.fits and (bad is None or one.size < bad)]
        setbacks = 0
        for one in reversed(state.told):
            if one.fits:
                break
            setbacks += 1
        short = {one.size for one in state.told if one.fits and not one.soak}
        return cls(
            sizes=state.sizes,
            good=max((one.size for one in ran), default=None),
            bad=bad,
            sustained=max((one.size for one in ran if one.soak), default=None),
            setbacks=setbacks,
            soak_failed=any(one.soak and not one.fits and one.size in short for one in state.told),
        )

    @property
    def largest(self) -> int:
        """The largest allowed size that has not failed."""
        return self.sizes.last if self.bad is None else self.sizes.at(max(0, self.sizes.index(self.bad) - 1))

    @property
    def closed(self) -> bool:
        """No allowed size is left between what ran and what failed (or the largest size)."""
        if self.good is None:
            return self.bad == self.sizes.first
        return self.good == self.largest

    @property
    def width(self) -> int:
        """How many allowed sizes are left above `good`."""
        return self.sizes.index(self.largest) - (-1 if self.good is None else self.sizes.index(self.good))

    def place(self, size: float) -> int:
        """The allowed size nearest under `size` that is still open."""
        return self.sizes.within(size, above=self.good, below=self.bad)


def settle(state: State, bracket: Bracket, reason: str) -> Ask | str:
    """The end of a search: the soak of the best size, unless it has survived one already."""
    if bracket.good is None:
        return "nothing_fits" if bracket.closed else reason
    if state.soak and bracket.sustained != bracket.good:
        return Ask(bracket.good, True)
    return "max_size" if bracket.good == bracket.sizes.last and state.max_size is not None else reason
