"""Where a larger batch stops paying: which sizes to time, and which of them to use.

Rules:
- A profile in progress is its settings and its observations, nothing else: `ask()` what to time, `tell()`
  what it took. Every rank can hold it, and it can be replayed.
- The size that it recommends has been timed: the smallest within `within` of the best throughput, as far as
  its time and that of the best are known.
- Time per step is close to `max(floor, fixed + per_sample * size)`: a floor while the host or latency sets
  the pace, a straight line once the device is busy. The line says which sizes to time and, of two noisy
  timings, which to believe; where they are not, the timings count (`estimated_rates`).
- Every new size costs more than its steps (kernels, plans, restoring the state), and the largest cost the
  most: sizes are far apart until the line can be read, the largest is timed once and briefly, and the
  size that the line names is timed finely at once. One is timed again only where it may change the answer.
- Sizes are powers of two and their midpoints, as people use them.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import final

from batchfit._profile.pure.step_time import LEAST_SPREAD, TimedSize, estimated_rates, fitted

SCHEMA_VERSION = 1

_CLIMB = 16  # sizes of the first pass are this far apart, while a step takes no longer for them
_CLIMB_ON = 8  # and so far once it does
_CLIMB_SLOWLY = 4  # and so far from a first size whose steps are long
_LONG_S = 0.5  # no launch or latency takes that: a step of 16 times the size may well take 16 times as long
_FLAT = 1.25  # a step that takes up to so many times the fastest is one that takes no longer
_BEYOND = 4  # how far above the knee it is worth looking for more
_GAP = 6  # sizes that are so many times apart have one between them timed
_SPARE = 0.1  # of `within`: what the line has to promise more, for a size to be worth a timing
_ROOMY = 0.9  # a brief timing stays that far below the limit
_NOISY = 0.4  # of `within`: a spread above that is worth another timing where the answer is close
_TIMES = 3  # how often one size is timed at most
LARGEST = 2**30  # where nothing else ends the sizes; who gets there has a step that does not use its size
_LONGEST = 64  # asks; a bound that no run has come near


@final
@dataclass(frozen=True, slots=True)
class Timed:
    """What one timing of one size showed; `spread` is the half-width of its interval, as a share."""

    size: int
    step_s: float = 0.0
    spread: float = 0.0
    fits: bool = True
    fine: bool = False


@final
@dataclass(frozen=True, slots=True)
class TimingRequest:
    """A size to time: briefly, or `fine`ly."""

    size: int
    fine: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """A search for the knee; `tell` returns the next one.

    `limit` is the largest size that memory allows, as far as is known; the driver lowers or raises it
    (`dataclasses.replace`) as it learns. `sizes` names the sizes to time instead, in their order.

    >>> knee = Knee(limit=1024)
    >>> while (ask := knee.ask()) is not None:
    ...     knee = knee.tell(Timed(ask.size, 0.010 + 0.001 * ask.size, fine=ask.fine))
    >>> knee.recommended, len(knee.observations)
    (192, 5)
    """

    limit: int | None = None
    within: float = 0.05
    smallest: int = 1
    sizes: tuple[int, ...] = ()
    observations: tuple[Timed, ...] = ()

    def __post_init__(self) -> None:
        for name in ("limit", "smallest"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        within: object = self.within
        if isinstance(within, bool) or not isinstance(within, int | float) or not 0 < within < 1:
            raise ValueError(f"within must be above 0 and below 1, not {self.within!r}")
        if any(type(size) is not int or size < 1 for size in self.sizes):
            raise ValueError(f"sizes must hold positive integers, not {self.sizes!r}")

    def tell(self, timed: Timed) -> Knee:
        """The search after one more timing, whether or not `ask` asked for it."""
        if not isinstance(timed, Timed):
            raise TypeError(f"timed must be a Timed, not {timed!r}")
        return replace(self, observations=(*self.observations, timed))

    def ask(self) -> TimingRequest | None:
        """The next size to time; None when there is nothing more to learn."""
        if self.sizes:
            done = {one.size for one in self.observations}
            # What is larger than a size with an OOM would have one as well.
            failed = min((one.size for one in self.observations if not one.fits), default=math.inf)
            return next(
                (TimingRequest(size, True) for size in self.sizes if size not in done and size < failed), None
            )
        if len(self.observations) >= _LONGEST:
            return None
        points = _joined(self.observations)
        if not points:
            first = self.smallest if self.ceiling is None else min(self.smallest, self.ceiling)
            return None if self.observations else TimingRequest(first, False)
        return self._climb(points) or self._look_far(points) or self._close_in(points) or self._settle(points)

    @property
    def recommended(self) -> int | None:
        """The smallest size within `within` of the best throughput; None before any size was timed."""
        points = _joined(self.observations)
        if not points:
            return None
        chosen = self._smallest_within(points)
        # Noisy times may lie so that the line prefers a size to a smaller one that was timed as faster, and
        # finely: what was timed counts then, for nobody would take the larger one.
        rates = {one.size: one.size / one.step_s for one in points if one.fine or one.size == chosen}
        chosen = min(size for size in rates if rates[size] >= rates[chosen])
        if self._may_be_within(points, chosen):
            return chosen
        rates = {one.size: one.size / one.step_s for one in points}  # the line is wrong about these
        enough = (1 - self.within) * max(rates.values())
        return min(size for size, rate in rates.items() if rate >= enough)

    def _may_be_within(self, points: Sequence[TimedSize], size: int) -> bool:
        """Whether its time and that of the best, each off by its spread, leave a size within reach."""
        here = next(one for one in points if one.size == size)
        best = min(points, key=lambda one: one.step_s / one.size)
        highest = here.size / here.step_s * (1 + here.spread)
        return highest >= (1 - self.within) * best.size / best.step_s * (1 - min(best.spread, 1.0))

    @property
    def ceiling(self) -> int | None:
        """The largest size that may still be asked for; None where nothing limits it."""
        failed = min((one.size for one in self.observations if not one.fits), default=None)
        if failed is None:
            return self.limit
        # Where memory ends exactly is another search's question: here the next grid size below will do.
        below = max(grid(1, failed - 1), default=1)
        return below if self.limit is None else min(below, self.limit)

    # The stages, in order. Each answers with a size that it needs, or None.

    def _climb(self, points: Sequence[TimedSize]) -> TimingRequest | None:
        """From the smallest size up in large steps, until a step's time grows with the size."""
        if len(points) >= 2 and _is_loaded(points):
            return None
        last = points[-1]
        flat = last.step_s * (1 - last.spread) <= _FLAT * min(one.step_s for one in points)
        times = _CLIMB if flat else _CLIMB_ON
        if len(points) == 1 and last.step_s >= _LONG_S:
            times = _CLIMB_SLOWLY
        return self._above(last.size * times, points)

    def _look_far(self, points: Sequence[TimedSize]) -> TimingRequest | None:
        """One brief timing well above the knee that the line predicts: is there more to be had?"""
        return self._above(fitted(points).crossing(1 - self.within) * _BEYOND, points)

    def _close_in(self, points: Sequence[TimedSize]) -> TimingRequest | None:
        """The grid size at which throughput comes within reach of the best, as the line has it."""
        chosen = self._smallest_within(points)
        if not self._is_within(points, chosen):  # throughput still rises where the timings end
            return self._new(_on_grid(points[-1].size * 2, self.ceiling, self.smallest), points)
        below = max((point.size for point in points if point.size < chosen), default=None)
        if below is None:
            # Two timings always lie on a line, and nothing says whether the steps between them do.
            return self._new(_middle(chosen, points[-1].size), points) if len(points) == 2 else None
        failed = {one.size for one in self.observations if not one.fits}
        between = [size for size in grid(below + 1, chosen - 1) if size not in failed]
        # With something to spare: a size on the very edge would be in today and out tomorrow, and its timing
        # for nothing. Timed finely at once: where the line is right, this is the answer.
        fit, enough = fitted(points), (1 - (1 - _SPARE) * self.within) * self._reference(points)
        promised = next((size for size in between if fit.rate(size) >= enough), None)
        if promised is not None:
            return TimingRequest(promised, True)
        if between and chosen > _GAP * below:  # so wide that the line may be wrong about it
            return TimingRequest(_middle(below, chosen, among=between), False)
        return None

    def _settle(self, points: Sequence[TimedSize]) -> TimingRequest | None:
        """The answer timed finely; before that, or again, what a better timing may put in its place."""
        chosen = self._smallest_within(points)
        rates, enough = estimated_rates(points), (1 - self.within) * self._reference(points)
        top = max(points, key=lambda one: rates[one.size])

        def is_close(one: TimedSize) -> bool:
            doubt = math.hypot(max(one.spread, LEAST_SPREAD), top.spread)
            return abs(math.log(rates[one.size] / enough)) <= doubt

        point = next(one for one in points if one.size == chosen)
        below = [one for one in points if one.size < chosen][-1:]
        close = [one for one in (*below, point) if is_close(one)]
        brief = [one for one in (*close, point) if not one.fine]
        if brief:
            return TimingRequest(brief[0].size, True)
        noisy = [one for one in close if one.spread > _NOISY * self.within]
        if close and top.spread > 2 * _NOISY * self.within:  # it costs the most, so it has to be worse
            noisy.insert(0, top)
        noisy = [one for one in noisy if one.times < _TIMES]
        return TimingRequest(max(noisy, key=lambda one: one.spread).size, True) if noisy else None

    def _above(self, wanted: float, points: Sequence[TimedSize]) -> TimingRequest | None:
        """A brief timing of that size, or of the largest well below the limit, if it is a larger one."""
        ceiling = self.ceiling
        if ceiling is not None:
            # Memory at the very end says nothing about speed.
            wanted = min(wanted, max(ceiling * _ROOMY, 1))
        size = _on_grid(wanted, ceiling, self.smallest)
        return self._new(size, points) if size > points[-1].size else None

    def _smallest_within(self, points: Sequence[TimedSize]) -> int:
        rates, enough = estimated_rates(points), (1 - self.within) * self._reference(points)
        return min(
            (size for size, rate in rates.items() if rate >= enough),
            default=max(rates, key=lambda size: (rates[size], -size)),
        )

    def _is_within(self, points: Sequence[TimedSize], size: int) -> bool:
        rates = estimated_rates(points)
        if rates[size] >= (1 - self.within) * self._reference(points):
            return True
        ceiling = self.ceiling
        return (
            ceiling is not None and _on_grid(points[-1].size * 2, ceiling, self.smallest) <= points[-1].size
        )

    def _reference(self, points: Sequence[TimedSize]) -> float:
        """The best throughput: of what was timed, or what the line promises for the largest size.

        Sizes that were named are compared with each other only.
        """
        best = max(estimated_rates(points).values())
        ceiling = self.ceiling
        if self.sizes or len(points) < 2 or (ceiling is not None and ceiling <= points[-1].size):
            return best
        fit = fitted(points)
        promised = fit.rate(ceiling) if ceiling is not None else fit.best_rate
        return max(best, promised) if math.isfinite(promised) else best

    def _new(self, size: int, points: Sequence[TimedSize]) -> TimingRequest | None:
        known = {point.size for point in points} | {one.size for one in self.observations if not one.fits}
        return None if size in known else TimingRequest(size, False)

    def to_json(self) -> str:
        """This search as JSON text, settings and history, for ranks to compare."""
        return json.dumps({"kind": "knee", "schema_version": SCHEMA_VERSION, **asdict(self)})


def _joined(timings: Sequence[Timed]) -> list[TimedSize]:
    """What fits, by size; several timings of a size are averaged, and a fine one replaces brief ones."""
    smallest_failed = min((one.size for one in timings if not one.fits), default=math.inf)
    by_size: dict[int, list[Timed]] = {}
    for one in timings:
        if one.fits and one.size < smallest_failed:
            by_size.setdefault(one.size, []).append(one)
    points = []
    for size in sorted(by_size):
        every = by_size[size]
        kept = [one for one in every if one.fine] or every
        mean = sum(one.step_s for one in kept) / len(kept)
        spread = math.sqrt(sum(one.spread**2 for one in kept)) / len(kept)
        points.append(TimedSize(size, mean, spread, any(one.fine for one in kept), len(every)))
    return points


def _is_loaded(points: Sequence[TimedSize]) -> bool:
    """Whether the last step up in size made a step clearly longer: from here on the line can be read."""
    one, two = points[-2], points[-1]
    return two.step_s >= one.step_s * (1 + 0.25 * (two.size / one.size - 1))


def grid(low: int, high: int) -> list[int]:
    """Powers of two and their midpoints from `low` to `high`: 1, 2, 3, 4, 6, 8, 12, ..."""
    sizes, power = [], 1
    while power <= high:
        sizes += [power, power + power // 2] if power > 1 else [1]
        power *= 2
    return [size for size in sizes if low <= size <= high]


def _middle(low: int, high: int, *, among: Sequence[int] = ()) -> int:
    """The grid size that is as many times one as the other is times it."""
    return min(among or [low, *grid(low, high)], key=lambda size: abs(math.log(size**2 / (low * high))))


def _on_grid(wanted: float, ceiling: int | None, smallest: int) -> int:
    """The largest grid size that is not above `wanted`; the ceiling itself where `wanted` is above that."""
    if ceiling is not None and wanted >= ceiling:
        return max(ceiling, 1)
    whole = int(min(wanted, LARGEST))
    sizes = grid(smallest, max(whole, smallest))
    return sizes[bisect_right(sizes, whole) - 1] if sizes and sizes[0] <= whole else smallest


def marginal_gains(rates: dict[int, float]) -> dict[int, float]:
    """For each size: its throughput over that at half the size, read off lines between the points."""
    sizes = sorted(rates)
    found = {}
    for size in sizes:
        half = size / 2
        above = next((one for one in sizes if one >= half), None)
        if above is None or half < sizes[0]:
            continue
        below = max(one for one in sizes if one <= half)
        part = 0.0 if above == below else (half - below) / (above - below)
        # Times, not rates, lie on a straight line.
        half_s = (1 - part) * below / rates[below] + part * above / rates[above]
        found[size] = rates[size] * half_s / half
    return found
