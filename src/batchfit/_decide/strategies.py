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
from dataclasses import dataclass, replace

from batchfit._decide.memory import FINEST, NOISE, Curve, Outlook, Reading

# Without max_size a search ends here: no tensor library indexes more samples, and a step that ignores its
# size would be tried for ever.
LARGEST = 2**30
# Sizes below HORIZON are found within LIMIT trials, whatever the readings say (soaks that fail apart).
HORIZON = 2**13
LIMIT = 24

# The numbers below were chosen on simulated curves (benchmarks/search_simulated.py). Bolder ones save a tenth
# of a trial on straight lines, and cost failures on curves with knees.
# Held bytes unknown: part of any peak is fixed, so the first step may go beyond the ray from zero.
_BOLD = 1.5
# How far from the ray (0) to the chord (1), by ratio, while no straight line has been seen.
_REACH = 0.55
_REACH_EXACT = 0.7  # a failure is part of an exact search anyway
# Up to this many times what ran the end is near: steps below half of what is left are not worth a trial.
_NEAR = 2.0
# A size is worth a trial if the chord, shortened by this much of the readings' error, reaches it.
_DOUBT = 0.85
# The ray of the first reading ends within so many times its size: the next size may well be the last.
_FEW = 2.5
# Whatever the readings say: a step that allocates elsewhere than where they are taken has none to show.
_LARGEST_LEAP = 512
# With a known floor no size is tried further beyond the ray than this.
_BEYOND_RAY = 1.1
# With tolerance 0: where to begin, and how close to the end every trial is a soak.
_EXACT_START = 8
_EXACT_END = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one trial taught.

    `fits` is False for a size that was too big for whatever reason, and for a soak that failed anywhere.
    The byte fields are peaks over the trial (of a failed one: up to the failure), None without a reading:
    live tensors, what a caching allocator took from the device, the rests of split segments that it cannot
    hand back; `held_bytes` is what stays between steps, a floor under every peak. `retries` counts the
    allocations that succeeded only after cached memory had been handed back.
    """

    size: int
    fits: bool
    soak: bool = False
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    split_bytes: int | None = None
    held_bytes: int | None = None
    retries: int = 0

    def reading(self, *, releases: bool) -> Reading | None:
        """What the trial needed of the budget; None where its peaks say nothing."""
        return Reading.of(
            self.size,
            self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            split_bytes=self.split_bytes,
            releases=releases,
        )


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
    predicted: int | None = None  # the largest size by a prediction, a little margin taken off
    told: tuple[Told, ...] = ()

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
        bad = min((one.size for one in state.told if not one.fits), default=None)
        ran = [one for one in state.told if one.fits and (bad is None or one.size < bad)]
        sustained = max((one.size for one in ran if one.soak), default=None)
        ends = [i for i, one in enumerate(state.told) if not one.fits and one.soak and _ran_short(state, one)]
        since = state.told[ends[0] :] if ends else state.told
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


def _ran_short(state: State, told: Told) -> bool:
    """The size of `told` has also run in a trial shorter than a soak."""
    return any(one.size == told.size and one.fits and not one.soak for one in state.told)


def settle(state: State, bracket: Bracket, reason: str) -> Ask | str:
    """The end of a search: the soak of the best size, unless it has survived one already."""
    if bracket.good is None:
        return "nothing_fits" if bracket.closed else reason
    if state.soak and bracket.sustained != bracket.good:
        return Ask(bracket.good, True)
    if bracket.good == bracket.sizes.last:
        return "largest" if state.max_size is None else "max_size"
    return reason


def descend(state: State, bracket: Bracket, *, tolerance: float) -> Ask | str:
    """After a failed soak: down by about the tolerance, twice as far each time, until a size survives one."""
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if bracket.good is not None and enough(bracket.good, bracket.largest, tolerance):
        return settle(state, bracket, "within_tolerance")
    bad = bracket.bad or bracket.sizes.last
    target = bad - max(bad - bracket.largest, tolerance * bad) * 2 ** (bracket.setbacks - 1)
    if bracket.falling and target > (bracket.good or 0):
        return Ask(bracket.place(target), True)
    return Ask(bracket.place(0) if bracket.falling and bracket.good is None else bracket.middle(), True)


def enough(good: float, best: float, tolerance: float) -> bool:
    """`good` is within `tolerance` of `best`."""
    return good >= (1 - tolerance) * best


def guided(state: State) -> Ask | str:
    """Measured memory proposes, the bracket disposes; the default.

    Ends without a failure where the memory that is left is worth no further trial. With `tolerance` 0 it
    ends when the next larger size has failed. Without readings it doubles, then bisects.
    """
    bracket = Bracket.of(state)
    if bracket.soak_failed:
        return descend(state, bracket, tolerance=state.tolerance)
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if state.predicted is not None:
        step = _as_predicted(state, bracket, state.predicted)
        if step is not None:
            return step
    if bracket.good is None:
        return _first(state, bracket)
    if _settled(state) or enough(bracket.good, bracket.largest, state.tolerance):
        return settle(state, bracket, "within_tolerance")
    curve = curve_of(state, bracket)
    step = _without_readings(state, bracket) if curve is None else _by_memory(state, bracket, curve)
    if isinstance(step, Ask) and step.size != bracket.good and not _affordable(state, bracket, step.size):
        return _bisected(state, bracket)
    return step


def _as_predicted(state: State, bracket: Bracket, predicted: int) -> Ask | str | None:
    """What a prediction says is the end: tried at once, as a soak; the answer if it survives.

    A failure there or below says that the prediction is wrong, and the search goes on without it. So does an
    exact search, from there on. Where what it took leaves room for more beyond doubt, the room is used: how
    an allocator's memory falls into pieces is foreseen less well than what is put into them.
    """
    size = bracket.sizes.at(max(0, bracket.sizes.index(predicted)))
    if bracket.bad is not None and bracket.bad <= size:
        return None
    if (bracket.good or 0) < size:
        return Ask(size, state.soak)
    if not state.tolerance:
        return None
    if bracket.bad is not None:
        return settle(state, bracket, "predicted")
    more = bracket.sizes.at(max(0, bracket.sizes.index(_reserved_end(state, bracket.good or 0))))
    if not enough(bracket.good or 0, more, state.tolerance):
        return Ask(more, state.soak)
    return settle(state, bracket, "predicted")


def _reserved_end(state: State, good: int) -> float:
    """The size up to which all that the allocator took for `good` would be within the budget, if it grows."""
    at_good = [one for one in state.told if one.size == good and one.fits]
    taken = max((one.reserved_bytes or one.allocated_bytes or 0 for one in at_good), default=0)
    if state.budget_bytes is None or not taken:
        return good
    held = min(one.held_bytes or 0 for one in at_good)
    return Curve.through([Reading(good, taken)], budget_bytes=state.budget_bytes, floor_bytes=held).safe()


def _settled(state: State) -> bool:
    """The last trial was the soak of what was to be the answer, and it survived: no second thoughts."""
    last = state.told[-1]
    if not (state.tolerance and last.soak and last.fits and _ran_short(state, last)):
        return False
    return guided(replace(state, told=state.told[:-1])) == Ask(last.size, True)


def _first(state: State, bracket: Bracket) -> Ask:
    """Nothing has run yet: the smallest size, which is never too bold, or the caller's estimate."""
    sizes, bad = bracket.sizes, bracket.bad
    if bad is None:
        # An exact answer costs failures anyway: begin where a reading says more.
        size = bracket.place(state.start or (1 if state.tolerance else _EXACT_START) * sizes.first)
    elif state.start is not None and bracket.setbacks == 1:
        size = bracket.place(bad * 7 / 8)  # an estimate is rarely far off
    else:
        size = bracket.place(math.sqrt(sizes.first * bad))
    return Ask(size, state.soak and sizes.first == bracket.largest)


def curve_of(state: State, bracket: Bracket) -> Curve | None:
    """The readings of what ran below the bracket's end; None where they say nothing."""
    ran = [one for one in state.told if one.fits and (bracket.bad is None or one.size < bracket.bad)]
    if state.budget_bytes is None or not ran:
        return None
    releases = any(one.retries > 0 for one in ran)
    readings = [reading for one in ran if (reading := one.reading(releases=releases)) is not None]
    # A reading at the budget while twice the size runs: a pool taken beforehand, not what the step needs.
    largest = max(one.size for one in ran)
    full = (1 - NOISE) * state.budget_bytes
    if not readings or any(one.need_bytes >= full and 2 * one.size <= largest for one in readings):
        return None
    held = [one.held_bytes for one in ran if one.held_bytes]
    return Curve.through(readings, budget_bytes=state.budget_bytes, floor_bytes=min(held, default=0))


def _by_memory(state: State, bracket: Bracket, curve: Curve) -> Ask | str:
    """The next size from the memory model; or the end, where what is left is not worth a trial."""
    good, exact, single = bracket.good or 0, state.tolerance == 0, len(curve.readings) == 1
    look = curve.outlook(failed=bracket.bad, setbacks=bracket.setbacks)
    # The smallest size may hide all growth: nothing ends there.
    likely = math.inf if single and good == bracket.sizes.first else look.likely
    # Where one sample more is worth a trial by itself, or two readings are all there is, no doubt counts.
    fine = enough(good, bracket.place(0), state.tolerance) and len(curve.readings) > 2
    end = likely * (1 - _DOUBT * (look.error - FINEST)) if fine else likely
    worth = bracket.sizes.at(max(0, bracket.sizes.index(min(end, bracket.largest))))
    if not exact and enough(good, worth, state.tolerance):
        return settle(state, bracket, "within_tolerance")
    size = bracket.place(_target(state, bracket, curve, look, worth=worth))
    # A soak now saves a trial if the size turns out to be the answer.
    if exact:
        final = enough(size, min(likely, bracket.largest), _EXACT_END)
    else:
        few = single and look.safe < _FEW * good
        final = few or (curve.readings[-1].firm and enough(size, worth, state.tolerance + look.error / 2))
    return Ask(size, state.soak and (final or size == bracket.sizes.last))


def _target(state: State, bracket: Bracket, curve: Curve, look: Outlook, *, worth: int) -> float:
    """Where to try next, as a real number: between the ray, which is safe, and the chord, which is not."""
    good, bad, exact = float(bracket.good or 0), bracket.bad, state.tolerance == 0
    base = max(look.safe, good)
    if len(curve.readings) == 1:
        target = look.safe * (1 if curve.floor_bytes else _BOLD)
    elif look.straight or (exact and look.likely < _NEAR * good):
        low, high = max(look.low, good), min(look.high, bad or math.inf)
        target = (low + high) / 2 if exact and low < high < math.inf else max(look.aim, good)
    else:
        # With a known floor the ray leads near the end by itself, and a chord over the flat part beyond it.
        by_ray = curve.floor_bytes > 0 and look.likely >= _NEAR * good
        reach = _REACH_EXACT if exact else 0.0 if by_ray else _REACH
        target = base * (max(look.careful, base) / base) ** reach + bracket.sizes.step / 2
    if not exact and worth < _NEAR * good:
        target = max(target, (good + worth) / 2)  # a smaller step is not worth a trial
    target = min(target, 8 * base, _LARGEST_LEAP * good)
    if curve.floor_bytes and not exact:
        # Readings may lie on one line and still be the flat part, before the curve turns up.
        target = min(target, max(_BEYOND_RAY * look.safe, good + bracket.sizes.step))
    if bad is not None:
        if target >= bad:
            target = math.sqrt(base * bad) if base < bad else good
        if bracket.setbacks and not exact:
            target = min(target, bad * (1 - max(state.tolerance, NOISE / 2) * 2 ** (bracket.setbacks - 1)))
        if target <= good:
            target = bracket.middle()
    return target


def _without_readings(state: State, bracket: Bracket) -> Ask:
    """Up by doubling, then bisection."""
    size = bracket.place(2 * (bracket.good or 0)) if bracket.bad is None else bracket.middle()
    return Ask(size, state.soak and enough(size, bracket.largest, state.tolerance or _EXACT_END))


def _bisected(state: State, bracket: Bracket) -> Ask:
    """Bisection alone; where nothing has failed yet, below the horizon, and then at it."""
    bounded = bracket.bounded()
    if bracket.bad is None and enough(bracket.good or 0, bounded.largest, state.tolerance):
        return Ask(bracket.place(bounded.bad or math.inf), False)
    return _without_readings(state, bounded)


def _affordable(state: State, bracket: Bracket, size: int) -> bool:
    """Whether bisection could still end within LIMIT trials, whatever the trial of `size` brings."""
    good = bracket.good or bracket.sizes.first
    bad = bracket.bounded().bad or size
    rest = max(_cost(state, good, size), _cost(state, size, bad))
    limit = LIMIT + max(0.0, 2 * math.log2(good / HORIZON))
    return len(state.told) + 1 + (bracket.bad is None) + rest <= limit


def _cost(state: State, good: float, bad: float) -> int:
    """How many trials `middle` needs at worst between a size that ran and one that failed, soak included."""
    trials = 1
    while bad > 4 * good:
        good, trials = math.sqrt(good * bad), trials + 1
    step = max(float(state.multiple_of), state.tolerance * good)
    return trials + math.ceil(math.log2(max(1.0, (bad - good) / step)))


def bisect(state: State) -> Ask | str:
    """The middle of what is left, after doubling where max_size is not given; always exact."""
    bracket = Bracket.of(state)
    if bracket.soak_failed:
        return descend(state, bracket, tolerance=0.0)
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if bracket.bad is None and state.max_size is None:
        first = state.start or bracket.sizes.first
        return Ask(bracket.place(first if bracket.good is None else 2 * bracket.good), False)
    size = bracket.middle(by_ratio=False)
    return Ask(size, state.soak and size == bracket.largest)


def halve(state: State) -> Ask | str:
    """From `start` (or max_size) down by halves until a size runs."""
    bracket = Bracket.of(state)
    if bracket.good is not None or bracket.closed:
        return settle(state, bracket, "strategy")
    target = bracket.bad / 2 if bracket.bad is not None else state.start or bracket.sizes.last
    # The first that runs is the answer, and a failure costs no more as a soak.
    return Ask(bracket.place(target), state.soak)


def powers(state: State) -> Ask | str:
    """1, 2, 4, ... (times `multiple_of`) until one fails: the last that ran."""
    bracket = Bracket.of(state)
    if bracket.closed or (bracket.good is not None and bracket.bad is not None):
        return settle(state, bracket, "strategy")
    if bracket.bad is not None:
        return Ask(bracket.largest, state.soak)
    first = state.start or bracket.sizes.first
    return Ask(bracket.place(first if bracket.good is None else 2 * bracket.good), False)


def grow(state: State) -> Ask | str:
    """From an estimate: half as much again while it runs, bisection once it fails, `attempts` in all.

    A size that fails before any has run is halved. Soaks are not attempts.
    """
    bracket = Bracket.of(state)
    if bracket.soak_failed:
        if bracket.good is not None:
            return settle(state, bracket, "strategy")
        return descend(state, bracket, tolerance=state.tolerance)
    if bracket.closed:
        return settle(state, bracket, "bracketed")
    if sum(not one.soak for one in state.told) >= state.attempts:
        return settle(state, bracket, "attempts")
    good, bad = bracket.good, bracket.bad
    if good is None:
        size = state.start or bracket.sizes.last
        return Ask(bracket.place(size if bad is None else bad // 2), False)
    return Ask(bracket.place(good * 3 // 2 if bad is None else (good + bad) // 2), False)


STRATEGIES: dict[str, Callable[[State], Ask | str]] = {
    "guided": guided,
    "bisect": bisect,
    "halve": halve,
    "grow": grow,
    "powers": powers,
}
