"""When step times can be believed: warmed up, enough of them, no trend.

Rules:
- Warm-up ends with the first step that is no longer clearly faster than all before it. Compilation,
  autotuning and a growing cache make early steps slow, never fast.
- The time of a step is the median, its interval that of order statistics: no shape of the noise is assumed,
  and a single stall moves neither. Fewer than six values cannot give 95 %: their range is the interval.
- A series that drifts or that stalls repeatedly is said to be unsteady, however narrow its interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

Verdict = Literal["steady", "drifting", "stalling", "noisy"]

_FASTER = 0.9  # a step below this share of the fastest before it shows that warm-up goes on
_DRIFT = 0.05  # how far the times have to move over the series to be a drift
_STALL = 1.5  # a step of this many medians is a stall
_STALLS = 0.1  # the share of steps that may stall
_NOISY = 0.03  # an interval that wide is worth a word, whatever was hoped for
_CONFIDENCE = 0.95


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """How finely to time one size."""

    target: float  # the half-width of the interval to reach, as a share of the median
    least: int  # steps to time at least
    most: int  # and at most
    most_s: float = 10.0  # and for so long: steps that take seconds and vary would take a quarter of an hour
    most_warmup: int = 12
    least_s: float = 0.0  # and at least for so long, where `most` allows it

    def is_enough(self, times: Sequence[float]) -> bool:
        """Whether these times say what was asked for, or no more of them may be taken."""
        if len(times) < self.least:
            return False
        return (
            len(times) >= self.most
            or math.fsum(times) >= self.most_s
            or (math.fsum(times) >= self.least_s and Interval.of(times).spread <= self.target)
        )


FINE = Timing(target=0.015, least=5, most=60)
# Of short steps, and of steps that vary, a brief timing takes more: that costs less than to time them again.
BRIEF = Timing(target=0.01, least=2, most=6, least_s=0.2)
# A fine timing within a search goes on for so long, or for this share of what the search has taken.
_FINE_S, _FINE_SHARE = 1.5, 0.15


@final
@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Interval:
        """The interval of the median of `times`.

        >>> Interval.of([1.0, 1.1, 0.9, 1.0, 1.0, 5.0, 1.0, 1.0])
        Interval(median=1.0, low=1.0, high=1.1)
        """
        if not times:
            raise ValueError("times must hold at least one time, not []")
        ordered = sorted(times)
        cut = _cut(len(ordered))
        return cls(statistics.median(ordered), ordered[cut], ordered[-1 - cut])

    @property
    def spread(self) -> float:
        """Half the width, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median > 0 else math.inf


def fine_after(spent_s: float) -> Timing:
    """A fine timing in a search that has taken `spent_s`: long steps that vary must not take over its time.

    >>> fine_after(4.0).most_s, fine_after(20.0).most_s
    (1.5, 3.0)
    """
    return replace(FINE, most_s=min(FINE.most_s, max(_FINE_S, _FINE_SHARE * spent_s)))


def is_fine(times: Sequence[float]) -> bool:
    """Whether these times say what a fine timing asks for, however they were taken."""
    return len(times) >= FINE.least and Interval.of(times).spread <= FINE.target


def _cut(count: int) -> int:
    """How many values to leave out at each end: the most that keep the interval's coverage at 95 %."""
    below, cut = 0.0, 0
    for number in range(count // 2):
        below += math.comb(count, number) * 0.5**count
        if 1 - 2 * below < _CONFIDENCE:
            break
        cut = number
    return min(cut, max((count - 1) // 2, 0))


def is_warm(times: Sequence[float], *, most: int) -> bool:
    """Whether the last step shows that warm-up is over (or that it will not end).

    >>> is_warm([30.0, 0.1], most=12), is_warm([30.0, 0.1, 0.1], most=12)
    (False, True)
    """
    if len(times) < 2:
        return False
    return len(times) >= most or times[-1] >= _FASTER * min(times[:-1])


def warmup_of(times: Sequence[float], *, most: int) -> int:
    """How many of these steps, from the first on, are warm-up; all of them where it has not ended.

    >>> warmup_of([30.0, 0.1, 0.1, 0.1], most=12)
    3
    """
    return next(
        (count for count in range(2, len(times) + 1) if is_warm(times[:count], most=most)), len(times)
    )


def verdict(times: Sequence[float], *, target: float) -> Verdict:
    """What kind of series this is."""
    interval = Interval.of(times)
    stalls = sum(one > _STALL * interval.median for one in times)
    if len(times) >= 5 and stalls > max(1, _STALLS * len(times)):
        return "stalling"
    if _drifts(times):
        return "drifting"
    return "steady" if interval.spread <= max(target, _NOISY) else "noisy"


def _drifts(times: Sequence[float]) -> bool:
    """Whether the times go up or down: Kendall's count of pairs, far from chance, and by enough to matter."""
    count = len(times)
    if count < 8:
        return False
    order = sum(
        (times[late] > times[early]) - (times[late] < times[early])
        for early in range(count)
        for late in range(early + 1, count)
    )
    chance = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    third = count // 3
    moved = statistics.median(times[-third:]) / statistics.median(times[:third])
    return abs(order) > 3 * chance and abs(math.log(moved)) > _DRIFT
