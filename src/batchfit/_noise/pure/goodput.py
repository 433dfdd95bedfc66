"""Which batch size to train with next, from the noise scale and from what each size costs.

Rules
- The progress of one sample in a batch of B is taken as 1 / (1 + B / phi), phi being the noise scale
  (McCandlish et al. 2018; Pollux calls it statistical efficiency). Goodput is samples/s times that.
- With measured samples/s, the size with more goodput wins. Without, the aim is `target` times the noise
  scale: a batch of phi takes at most twice the steps and twice the samples of the best possible.
- All of the interval must agree, the gain must exceed `hysteresis`, and `min_steps` lie between changes. No
  estimate, no change (with `use_bound`, a lower bound is enough to grow). One decision moves by one `ratio`.
- While nothing else changes, every move raises goodput for every noise scale in the interval by the
  hysteresis (or comes closer to the aim from one side), so decisions cannot go in a circle.
- What fits goes first: a size above `largest` is left at once, whatever the noise says.
- Each decision carries a sentence with its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from batchfit._noise.pure.estimate import NoiseReading

Action = Literal["grow", "shrink", "stay", "cap"]


@final
@dataclass(frozen=True, slots=True)
class DecideSettings:
    """How willing a decision is to move.

    ratio: the largest step of one decision, as a factor.
    hysteresis: the part by which a size must be better than the present one.
    min_steps: steps at a size before it may change again.
    target: the batch that is aimed for where samples/s are not known, in noise scales.
    can_shrink: whether a smaller batch may be chosen, other than for memory.
    use_bound: whether to grow where the noise scale has only a lower bound, which is what there is while the
        batch is far too small to see the gradient in its noise.
    """

    ratio: float = 2.0
    hysteresis: float = 0.05
    min_steps: int = 50
    target: float = 1.0
    can_shrink: bool = True
    use_bound: bool = False

    def __post_init__(self) -> None:
        if not (_is_number(self.ratio) and self.ratio > 1):
            raise ValueError(f"ratio must be above 1, not {self.ratio!r}")
        if not (_is_number(self.hysteresis) and self.hysteresis > 0):
            raise ValueError(f"hysteresis must be above 0, not {self.hysteresis!r}")
        if not _is_count(self.min_steps, 0):
            raise ValueError(f"min_steps must be an integer of at least 0, not {self.min_steps!r}")
        if not (_is_number(self.target) and self.target > 0):
            raise ValueError(f"target must be above 0, not {self.target!r}")


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """The size to go on with, and why. `gain` is goodput over that of the present size, at the end of the
    interval that speaks least for it; None where goodput was not weighed."""

    size: int
    action: Action
    reason: str
    gain: float | None = None

    def __str__(self) -> str:
        return f"batch size {self.size} ({self.action}): {self.reason}"


def efficiency(size: float, scale: float, *, reference: float = 0.0) -> float:
    """Progress per sample at `size`, over that at `reference` (0: the limit of tiny batches)."""
    return 1.0 if math.isinf(scale) else (scale + reference) / (scale + size)


def decide(
    reading: NoiseReading | None,
    current: int,
    candidates: Sequence[int],
    throughput: Callable[[int], float] | None = None,
    settings: DecideSettings | None = None,
    *,
    steps_since_change: int | None = None,
    largest: int | None = None,
) -> Decision:
    """The next batch size: `current`, or one of `candidates`.

        decide(noise.reading(), 256, [128, 256, 512, 1024], profile.samples_per_s, DecideSettings())

    `throughput(size)` is measured samples/s. `largest` is what fits, or what the data allow; None: whatever
    the candidates say. `steps_since_change` None: the size was never changed.
    """
    settings = DecideSettings() if settings is None else settings
    sizes = _checked(current, candidates, steps_since_change, largest)
    allowed = [size for size in sizes if largest is None or size <= largest]
    if largest is not None and current > largest:
        if not allowed:
            return Decision(largest, "cap", f"{current} does not fit any more, and {largest} does")
        return Decision(allowed[-1], "cap", f"{current} is above the limit of {largest}")
    if reading is None or reading.low is None or (reading.scale is None and not settings.use_bound):
        why = "no reading" if reading is None else reading.reason
        return Decision(current, "stay", f"no estimate of the noise scale: {why}")
    if steps_since_change is not None and steps_since_change < settings.min_steps:
        wait = f"{steps_since_change} of {settings.min_steps} steps since the last change"
        return Decision(current, "stay", wait)
    above, below = _neighbours(allowed, current, settings.ratio)
    if not settings.can_shrink:
        below = None
    if throughput is None:
        return _by_aim(reading, current, above, below, settings)
    return _by_goodput(reading, current, above, below, throughput, settings)


def _by_goodput(
    reading: NoiseReading,
    current: int,
    above: int | None,
    below: int | None,
    throughput: Callable[[int], float],
    settings: DecideSettings,
) -> Decision:
    """The neighbour with more goodput at both ends of the interval."""
    now = _measured(throughput, current)
    low, high = _ends(reading)
    measured = f"noise scale {_interval(reading)}"
    gains: list[str] = []
    for other, action, worst in ((above, "grow", low), (below, "shrink", high)):
        if other is None:
            continue
        # Growing pays least where the noise is small, shrinking where it is large: that end must agree.
        speed = _measured(throughput, other) / now
        gain = speed * efficiency(other, worst, reference=current)
        text = (
            f"{other} has {speed:.2f}x the samples/s and at least "
            f"{efficiency(other, worst, reference=current):.2f}x the progress a sample: goodput x{gain:.2f}"
        )
        if gain >= 1 + settings.hysteresis:
            grows: Action = "grow" if action == "grow" else "shrink"
            return Decision(other, grows, f"{measured}; {text}", gain)
        gains.append(text)
    if not gains:
        return Decision(current, "stay", f"{measured}; no other size is allowed")
    need = f"less than the x{1 + settings.hysteresis:.2f} that a change must bring"
    return Decision(current, "stay", f"{measured}; {'; '.join(gains)}, {need}")


def _by_aim(
    reading: NoiseReading, current: int, above: int | None, below: int | None, settings: DecideSettings
) -> Decision:
    """Towards `target` noise scales, as long as the next size does not pass them."""
    low, high = (settings.target * end for end in _ends(reading))
    slack = 1 + settings.hysteresis
    aim = "" if settings.target == 1 else f" times {settings.target:g}"
    measured = f"noise scale {_interval(reading)}{aim}"
    if above is not None and above * slack <= low:
        return Decision(above, "grow", f"{measured} is above {above} in all of its interval")
    if below is not None and below >= high * slack:
        return Decision(below, "shrink", f"{measured} is below {below} in all of its interval")
    if above is None and current * slack <= low:
        return Decision(current, "stay", f"{measured}; {current} is the largest size that is allowed")
    return Decision(
        current, "stay", f"{measured}; neither half nor twice as much is clearly better than {current}"
    )


def _ends(reading: NoiseReading) -> tuple[float, float]:
    assert reading.low is not None
    return reading.low, math.inf if reading.high is None else reading.high


def _neighbours(allowed: Sequence[int], current: int, ratio: float) -> tuple[int | None, int | None]:
    """The farthest sizes within one ratio; where there are none, the nearest."""
    above = [size for size in allowed if size > current]
    below = [size for size in allowed if size < current]
    up = max((size for size in above if size <= current * ratio), default=min(above, default=None))
    down = min((size for size in below if size * ratio >= current), default=max(below, default=None))
    return up, down


def _checked(
    current: object, candidates: Sequence[int], steps_since_change: object, largest: object
) -> list[int]:
    optional = [("largest", largest, 1), ("steps_since_change", steps_since_change, 0)]
    for name, value, least in (("current", current, 1), *(one for one in optional if one[1] is not None)):
        if not _is_count(value, least):
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    for size in candidates:
        if not _is_count(size, 1):
            raise ValueError(f"candidates must be integers of at least 1, not {size!r}")
    return sorted(set(candidates))


def _measured(throughput: Callable[[int], float], size: int) -> float:
    value = throughput(size)
    if not (_is_number(value) and value > 0):
        raise ValueError(f"throughput must give a number above 0 for a size of {size}, not {value!r}")
    return float(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _interval(reading: NoiseReading) -> str:
    high = "no upper end" if reading.high is None else f"{reading.high:,.0f}"
    if reading.scale is None:
        return f"of at least {reading.low or 0.0:,.0f}"
    return f"{reading.scale:,.0f} ({reading.low or 0.0:,.0f} to {high})"
