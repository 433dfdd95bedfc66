"""Time per step as a function of the batch size: a floor, then a straight line.

Rules: errors are relative, since the error of a timing grows with its time. The first few sizes may lie
on a floor, where the host sets the pace. Precise timings keep their own values;
noisy ones borrow from the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

LEAST_SPREAD = 0.01  # no timing is trusted to be better than this
_FLOOR_VARIES = 0.1  # a host that sets the pace is that much slower or faster from one size to the next


@final
@dataclass(frozen=True, slots=True)
class TimedSize:
    """All timings of one size as one."""

    size: int
    step_s: float
    spread: float
    fine: bool
    times: int


@final
@dataclass(frozen=True, slots=True)
class StepTimeLine:
    """Time per step: `max(floor_s, fixed_s + sample_s * size)`."""

    floor_s: float
    fixed_s: float
    sample_s: float

    def step_s(self, size: float) -> float:
        """The time of a step of that many samples."""
        return max(self.floor_s, self.fixed_s + self.sample_s * size, 1e-12)

    def rate(self, size: float) -> float:
        """Samples per second."""
        return size / self.step_s(size)

    @property
    def best_rate(self) -> float:
        """What throughput comes close to as the size grows."""
        return 1 / self.sample_s if self.sample_s > 0 else math.inf

    def crossing(self, share: float) -> float:
        """The size at which throughput is that share of `best_rate`."""
        if self.sample_s <= 0:
            return math.inf
        sloped = share * self.fixed_s / (self.sample_s * (1 - share)) if self.fixed_s > 0 else 0.0
        return max(sloped, share * self.floor_s / self.sample_s, 1.0)


def fitted(points: Sequence[TimedSize]) -> StepTimeLine:
    """The line through the points, by relative errors; the first few may lie on a floor."""
    if len(points) == 1:
        return StepTimeLine(0.0, 0.0, points[0].step_s / points[0].size)
    best: tuple[float, StepTimeLine] | None = None
    for flat in range(len(points) - 1):
        fixed_s, sample_s = _straight(points[flat:])
        floor_s = sum(one.step_s for one in points[:flat]) / flat if flat else 0.0
        line = StepTimeLine(floor_s, fixed_s, sample_s)
        cost = sum(
            (math.log(line.step_s(one.size) / one.step_s) / max(one.spread, least)) ** 2
            for one, least in zip(points, [_FLOOR_VARIES] * flat + [LEAST_SPREAD] * len(points), strict=False)
        )
        cost += 2.0 if flat else 0.0  # one more number has to earn its place (Akaike)
        if best is None or cost < best[0]:
            best = (cost, line)
    return best[1] if best is not None else StepTimeLine(0.0, *_straight(points))


def _straight(points: Sequence[TimedSize]) -> tuple[float, float]:
    """The line of least relative squares; neither part is negative."""
    weights = [1 / (one.step_s * max(one.spread, LEAST_SPREAD)) ** 2 for one in points]
    total = sum(weights)
    size = sum(w * one.size for w, one in zip(weights, points, strict=True)) / total
    time = sum(w * one.step_s for w, one in zip(weights, points, strict=True)) / total
    over = sum(w * (one.size - size) * (one.step_s - time) for w, one in zip(weights, points, strict=True))
    under = sum(w * (one.size - size) ** 2 for w, one in zip(weights, points, strict=True))
    slope = over / under if under > 0 else 0.0
    if slope <= 0:
        return time, 0.0
    fixed = time - slope * size
    if fixed < 0:  # a line through nothing: time in proportion to the size
        squares = sum(w * one.size**2 for w, one in zip(weights, points, strict=True))
        products = sum(w * one.size * one.step_s for w, one in zip(weights, points, strict=True))
        return 0.0, products / squares
    return fixed, slope


def _misfit(points: Sequence[TimedSize], line: StepTimeLine) -> float:
    """How far off the line the timings are, as a share: root mean square."""
    free = max(len(points) - 3, 1)
    return math.sqrt(sum(math.log(one.step_s / line.step_s(one.size)) ** 2 for one in points) / free)


def estimated_rates(points: Sequence[TimedSize]) -> dict[int, float]:
    """Samples per second at each timed size, each drawn towards the line as far as it is noisier than that.

    With `noise` the variance of a timing and `misfit` that of the true times about the line, the best mean of
    the two gives the line the part noise / (noise + misfit). The misfit is what the residuals show beyond the
    noise: precise timings keep their own values, noisy ones borrow from each other.
    """
    if len(points) < 4:
        return {one.size: one.size / one.step_s for one in points}
    line = fitted(points)
    residuals = [math.log(one.step_s / line.step_s(one.size)) for one in points]
    noises = [(max(one.spread, LEAST_SPREAD) / 2) ** 2 for one in points]
    misfit = max(_misfit(points, line) ** 2 - sum(noises) / len(noises), 0.0)
    rates = {}
    for one, residual, noise in zip(points, residuals, noises, strict=True):
        kept = misfit / (noise + misfit)
        rates[one.size] = one.size / (line.step_s(one.size) * math.exp(kept * residual))
    return rates
