"""What kind of loss a function returns, decided from its values for a few samples.

Rules
- Sets of samples are joined, and the loss of the join is compared with those of the sets. A mean, over
  whatever it counts (samples, tokens, class weights), lies between them; a sum is their sum. A loss for which
  neither holds compares samples with each other (in-batch negatives, mined triplets), or mixes terms that are
  means with terms that are sums: microbatches of it do not add up to the batch.
- Nothing here depends on the size of a microbatch, and a loss of zero for one sample is a value as any other.
- A random loss (dropout, noise) is read several times. What is refused must be clear: past many standard
  errors. What is not clear is "unclear", and never "compared".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, final

Kind = Literal["mean", "sum", "compared", "unclear"]

# A part of the largest loss that was read. Kernels round differently for other shapes: in bf16 less than 1 %.
_CLEAR: Final = 0.02
_CLEAR_OF_NOISE: Final = 0.1
_STANDARD_ERRORS: Final = 6.0
# Two readings that are this near are one value: sums on a GPU are added up in any order.
_SAME: Final = 1e-4
# What terms of both signs leave of a loss that is zero.
_ZERO: Final = 1e-6


@final
@dataclass(frozen=True, slots=True)
class LossReading:
    """The losses of one set of samples, one for each time that it was run."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    @property
    def error(self) -> float:
        """The standard error of `mean`."""
        count = len(self.values)
        if count < 2:
            return 0.0
        squares = math.fsum((value - self.mean) ** 2 for value in self.values)
        return math.sqrt(squares / (count - 1) / count)

    @property
    def is_random(self) -> bool:
        """Whether the same samples gave other losses."""
        return max(self.values) - min(self.values) > _SAME * max(map(abs, self.values))


class Join(NamedTuple):
    """The losses of some sets of samples, and of all of them together."""

    sets: tuple[LossReading, ...]
    joined: LossReading
    expected: float | None = None  # of `joined`, where the loss is a mean: known from another join

    @property
    def readings(self) -> tuple[LossReading, ...]:
        return (*self.sets, self.joined)


def after(first: Join) -> float | None:
    """The mean of its first set twice and its second set once; None where `first` is no mean.

    What each set counts in a mean follows from `first`, so this is known whatever the loss divides by.
    """
    left, right = first.sets
    up, down = first.joined.mean - left.mean, right.mean - first.joined.mean
    if up * down < 0 or up + 2 * down == 0:
        return None
    return first.joined.mean - up * down / (up + 2 * down)


def scale_of(joins: Sequence[Join]) -> float:
    """The largest loss that was read; 0 where there is none."""
    return max((abs(reading.mean) for join in joins for reading in join.readings), default=0.0)


def finite(joins: Sequence[Join]) -> list[Join]:
    """Those that say something: a set in which nothing counts has no mean."""
    return [join for join in joins if all(math.isfinite(reading.mean) for reading in join.readings)]


def kind_of(joins: Sequence[Join]) -> Kind:
    """What all joins together say; they are `finite`."""
    readings = [one for join in joins for one in join.readings]
    scale = scale_of(joins)
    if scale < _ZERO:
        return "unclear"
    limit = scale * (_CLEAR_OF_NOISE if any(one.is_random for one in readings) else _CLEAR)
    is_mean = not any(_exceeds(*_off_mean(join), limit) for join in joins)
    is_sum = not any(_exceeds(*_off_sum(join), limit) for join in joins)
    if is_mean and is_sum:
        return "unclear"
    return "mean" if is_mean else "sum" if is_sum else "compared"


def is_noisy(joins: Sequence[Join]) -> bool:
    """Whether more readings may change the answer: a difference that noise may have made."""
    readings = [one for join in joins for one in join.readings]
    limit = _CLEAR_OF_NOISE * scale_of(joins)
    if limit < _ZERO or not any(one.is_random for one in readings):
        return False
    found = [off(join) for join in joins for off in (_off_mean, _off_sum)]
    return any(gap > limit and not _exceeds(gap, error, limit) for gap, error in found)


def differs(reading: LossReading, wanted: float, scale: float) -> bool:
    """Whether a loss is clearly another one than wanted; never said of a random one."""
    return not reading.is_random and abs(reading.mean - wanted) > _CLEAR * scale


def _exceeds(gap: float, error: float, limit: float) -> bool:
    return gap > max(limit, _STANDARD_ERRORS * error)


def _off_mean(join: Join) -> tuple[float, float]:
    """How far the join is from a mean of its sets, and the standard error of that."""
    means, found = [reading.mean for reading in join.sets], join.joined.mean
    gap = max(found - max(means), min(means) - found, 0.0)
    if join.expected is not None:
        gap = max(gap, abs(found - join.expected))
    return gap, math.hypot(join.joined.error, max(reading.error for reading in join.sets))


def _off_sum(join: Join) -> tuple[float, float]:
    """How far the join is from the sum of its sets, and the standard error of that."""
    gap = abs(join.joined.mean - math.fsum(reading.mean for reading in join.sets))
    # Sets may be one and the same, whose errors are one error.
    return gap, math.hypot(join.joined.error, math.fsum(reading.error for reading in join.sets))
