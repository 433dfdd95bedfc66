"""The scale of a chart's axis: from values to positions, and the round values of its ticks.

Rules: pure arithmetic, no markup; a scale maps its whole domain into its pixels and never outside them;
ticks lie inside the domain, in order, and no more of them than there is room for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from batchfit._charts.text_charts import ticks

# Whatever a file says, a chart's numbers stay where floats are exact enough to draw.
MOST, LEAST = 1e18, 1e-12
_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def real(value: float) -> float:
    """A number of a result as a float that can be drawn."""
    held = float(max(-MOST, min(value, MOST)))
    return held if abs(held) >= LEAST else 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """`low` to `high` onto the pixels `begin` to `end` (which may run downwards)."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a value; a value outside is put at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def scale_over(
    values: Iterable[float], begin: float, end: float, *, log: bool = False, headroom: float = 0.0
) -> Scale:
    """A scale that holds the values: from 0 in a linear one, from the smallest positive in a log one."""
    found = [real(value) for value in values]
    if not log:
        top = max([value for value in found if value > 0], default=1.0)
        return Scale(0.0, top * (1 + headroom), begin, end)
    positive = [value for value in found if value > 0] or [1.0]
    low, high = min(positive), max(positive)
    # Half a doubling of air at either end: marks keep off the axis, and one value alone has a domain.
    low, high = low / 2**0.3, high * 2**0.3
    return Scale(low, high, begin, end, log=True)


def ticks_within(scale: Scale, most: int) -> list[float]:
    """At most `most` round numbers inside the scale: powers of two on a log axis that spans a few."""
    most = max(most, 2)
    if not scale.log:
        return [tick for tick in ticks(scale.high, most) if scale.low <= tick <= scale.high]
    first, last = math.ceil(math.log2(scale.low) - 1e-9), math.floor(math.log2(scale.high) + 1e-9)
    count = last - first + 1
    if count >= 3:
        every = -(-count // most)
        begin = first + (-first) % every  # 1, 4, 16: a power that the step divides, so that 1 is among them
        return [2.0**power for power in range(begin, last + 1, every)]
    # Two powers of two or fewer: round numbers say more.
    found = [tick for tick in ticks(scale.high, 4 * most) if tick >= scale.low and tick > 0]
    every = max(1, -(-len(found) // most))
    return found[::every]


def byte_axis(top: float) -> tuple[int, str]:
    """The unit in which an axis up to `top` bytes is numbered, and its name."""
    return next(((unit, name) for name, unit in _BYTES if top >= unit), (1, "B"))


def count_text(value: float) -> str:
    """`4,096`, `65.5k`, `2.1M`: short enough for an axis."""
    if abs(value) < 10_000:
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:g}"
