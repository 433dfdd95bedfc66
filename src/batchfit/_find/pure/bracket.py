"""What a search knows, and what follows from it before any strategy: the sizes allowed and the bracket.

Rules:
- Every failure is a bound: no size at or above one is asked again, whatever the memory model says.
- With `soak`, an answer has survived a soak. One that does not is a failure like any other; the search goes
  on just below it, since a soak fails by one or two per cent (ResNet-50 on an H200: 562 passes 3 steps,
  556 dies in the soak, 549 survives).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from batchfit._find.pure.memory_curve import MemoryReading, cache_is_releasable

# Without max_size a search ends here: no tensor library indexes more samples, and a step that ignores its
# size would be tried again and again.
LARGEST = 2**30
# Sizes below HORIZON are found within LIMIT trials, whatever the readings say (soaks that fail apart).
HORIZON = 2**13
LIMIT = 24
# With tolerance 0: how close to the end every trial is a stability check (without it 6 % more trials;
# benchmarks/search_ablation.py).
EXACT_SOAK_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one trial taught.

    `fits` is False for a size that was too big for whatever reason, and for a soak that failed anywhere.
    The byte fields are peaks over the trial (of a failed one: up to the failure), None without a reading:
    live tensors, what a caching allocator reserved, the inactive split blocks that it cannot
    hand back; `largest_bytes` is the largest block, `held_bytes` what stays between steps, a floor under
    every peak. `retries` counts the allocations that succeeded only after cached memory was released.
    """

    size: int
    fits: bool
    soak: bool = False
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    split_bytes: int | None = None
    largest_bytes: int | None = None
    held_bytes: int | None = None
    retries: int = 0

    @property
    def least_bytes(self) -> int:
        """The lowest of the peaks that were read."""
        return min((peak for peak in (self.allocated_bytes, self.reserved_bytes) if peak), default=0)

    def cache_is_releasable(self, *, aside_bytes: int = 0) -> bool | None:
        """Whether the allocator can use what lies idle, by this trial, `aside_bytes` apart."""
        live = self.allocated_bytes and self.allocated_bytes - aside_bytes
        return cache_is_releasable(live, largest_bytes=self.largest_bytes, retries=self.retries)

    @property
    def cache_released(self) -> bool:
        """It had to retry, and more was cached than the inactive split blocks that cannot be released."""
        if not self.retries or self.split_bytes is None or not self.allocated_bytes:
            return False
        return self.allocated_bytes + self.split_bytes < (self.reserved_bytes or 0)

    def reading(
        self, *, releases: bool | None, budget_bytes: int, aside_bytes: int = 0
    ) -> MemoryReading | None:
        """What the trial needed of the budget, `aside_bytes` apart; None where its peaks say nothing."""
        return MemoryReading.of(
            self.size,
            self.allocated_bytes and self.allocated_bytes - aside_bytes,
            reserved_bytes=self.reserved_bytes and self.reserved_bytes - aside_bytes,
            split_bytes=self.split_bytes,
            releases=releases,
            budget_bytes=budget_bytes,
        )


@dataclass(frozen=True, slots=True)
class Request:
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
    def between(cls, smallest: int, largest: int, *, multiple_of: int = 1, doubling: bool = False) -> Sizes:
        """Multiples of `multiple_of`, or `multiple_of * 2**i`, in [smallest, largest]; `count` may be 0."""
        if doubling:
            first = multiple_of
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

    def to_rehearse(self) -> tuple[int, ...]:
        """A few small sizes, ascending: not 1 where others are allowed, as BatchNorm raises there."""
        low = self.at(1) if self.first == 1 and self.count > 1 else self.first
        return tuple(size for size in (low, 2 * low, 4 * low) if size <= self.last)

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
    costly_trials: bool = False  # each starts a program: a failure costs as much as a size that fits
    predicted: int | None = None  # the largest size by a prediction, a little margin taken off
    observations: tuple[Observation, ...] = ()

    @property
    def sizes(self) -> Sizes:
        """The sizes that may be asked."""
        doubling = self.power_of_two or self.strategy == "powers"
        largest = LARGEST if self.max_size is None else self.max_size
        return Sizes.between(self.min_size, largest, multiple_of=self.multiple_of, doubling=doubling)


@dataclass(frozen=True, slots=True)
class Bracket:
    """What the history proves: `good` ran, `bad` did not, and nothing at or above `bad` counts."""

    sizes: Sizes
    good: int | None  # once a soak has failed, only what survived one counts: short runs proved too little
    bad: int | None
    sustained: int | None  # the largest size below `bad` that survived a soak
    setbacks: int  # failures in a row, at the end of the history
    soak_failed: bool  # a size that ran did not survive its soak
    falling: bool  # ... and none has since

    @classmethod
    def of(cls, state: State) -> Bracket:
        """The bracket after all trials of `state`."""
        bad = min((one.size for one in state.observations if not one.fits), default=None)
        ran = [one for one in state.observations if one.fits and (bad is None or one.size < bad)]
        sustained = max((one.size for one in ran if one.soak), default=None)
        ends = [
            i
            for i, one in enumerate(state.observations)
            if not one.fits and one.soak and also_ran_shorter(state, one)
        ]
        since = state.observations[ends[0] :] if ends else state.observations
        setbacks = 0
        for one in reversed(since):
            if one.fits:
                break
            setbacks += 1
        good = sustained if ends else max((one.size for one in ran), default=None)
        falling = bool(ends) and setbacks == len(since)
        return cls(state.sizes, good, bad, sustained, setbacks, bool(ends), falling)

    @property
    def largest(self) -> int:
        """The largest allowed size that has not failed; the smallest allowed one if all have."""
        return self.sizes.last if self.bad is None else self.sizes.at(max(0, self.sizes.index(self.bad) - 1))

    @property
    def closed(self) -> bool:
        """No allowed size is left between what ran and what failed (or the largest size)."""
        if self.good is None:
            return self.bad == self.sizes.first
        return self.good == self.largest

    def place(self, size: float) -> int:
        """The allowed size nearest under `size` that is still open."""
        return self.sizes.within(size, above=self.good, below=self.bad)

    def bounded(self) -> Bracket:
        """The same; where nothing has failed yet, as if a size at the horizon had."""
        if self.bad is not None:
            return self
        good = self.good or 0
        size = self.sizes.at(self.sizes.index(HORIZON if good < HORIZON else 4 * good))
        return self if size <= good else replace(self, bad=size)

    def middle(self, *, by_ratio: bool = True) -> int:
        """The open size that halves the bracket: by ratio while it is wide, by count when it is not."""
        low = self.sizes.index(self.good) if self.good is not None else -1
        high = self.sizes.index(self.largest) + 1
        if by_ratio and self.sizes.step and high > 4 * (low + 2):
            return self.place(math.sqrt((self.good or self.sizes.first) * self.largest))
        return self.sizes.at((low + high) // 2)


def also_ran_shorter(state: State, observation: Observation) -> bool:
    """The size of `observation` has also run in a trial shorter than a soak."""
    return any(one.size == observation.size and one.fits and not one.soak for one in state.observations)


def settle(state: State, bracket: Bracket, reason: str) -> Request | str:
    """The end of a search: the soak of the best size, unless it has survived one already."""
    if bracket.good is None:
        return "nothing_fits" if bracket.closed else reason
    if state.soak and bracket.sustained != bracket.good:
        return Request(bracket.good, True)
    if bracket.good == bracket.sizes.last:
        return "largest" if state.max_size is None else "max_size"
    if reason == "within_tolerance" and state.max_size is not None and bracket.bad is None:
        # It is not the memory that ends a search so close to max_size: a lot of it may be left.
        return "near_max_size" if enough(bracket.good, bracket.sizes.last, state.tolerance) else reason
    return reason


def descend(state: State, bracket: Bracket, *, tolerance: float) -> Request | str:
    """After a failed soak: down by about the tolerance, twice as far each time, until a size survives one."""
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if bracket.good is not None and enough(bracket.good, bracket.largest, tolerance):
        return settle(state, bracket, "within_tolerance")
    bad = bracket.bad or bracket.sizes.last
    target = bad - max(bad - bracket.largest, tolerance * bad) * 2 ** (bracket.setbacks - 1)
    if bracket.falling and target > (bracket.good or 0):
        return Request(bracket.place(target), True)
    return Request(bracket.place(0) if bracket.falling and bracket.good is None else bracket.middle(), True)


def enough(good: float, best: float, tolerance: float) -> bool:
    """`good` is within `tolerance` of `best`."""
    return good >= (1 - tolerance) * best
