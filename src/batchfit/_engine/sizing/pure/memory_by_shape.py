"""What microbatches of ragged samples need, as a function of (samples, padded length), learned as they run.

Rules:
- What a microbatch takes above what is held anyway grows in proportion to its samples, and with the length
  between linearly and quadratically: `samples * (a * length + c * length**2)`, `a` and `c` not negative.
- So each reading bounds every other length from above: shorter in proportion to the length, longer to its
  square. Between two neighbours the chord of bytes per element (`a + c * length`) is a bound too. The least
  bound counts; noise makes it too low by no more than one reading is, and a margin pays for that.
- Longer, or more of them, never needs less: answers fall with the length, and stay below what failed.
- No answer goes beyond twice the dearest microbatch that ran: what is wrong shows early.
- A high reading counts at once, and fades when its length is read later, lower. A low one is dropped as soon
  as a microbatch that it promised has an OOM.
- Few readings are kept: one per length, the one with the most samples, and as many lengths as say something.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, final

# Readings wobble by up to 3 %; the margin over a reading that is 3 % low.
MARGIN: Final = 0.031
# After each OOM although readings were there, the margin grows ...
_SETBACK: Final = 0.03
# ... and after so many readings in peace it shrinks, and the oldest failure is forgotten; twice as many after
# each further setback, so that what never fits is run ever less often.
_PEACE: Final = 64
_MOST_PEACE: Final = 4096
_MOST_SETBACKS: Final = 8
# How far beyond the dearest microbatch seen one step may go.
_REACH: Final = 2.0
# A reading that says less than the others by more than this factor is supported by no other.
_ALONE: Final = 1.2
# Lengths remembered, and shapes that had an OOM.
_LENGTHS: Final = 24
_FAILURES: Final = 8
# The share of a reading's excess that fades when its length is read later, lower.
_FADE: Final = 0.25
# Nothing with more than this share of the elements of a shape that had an OOM is run at a longer length, nor
# at one that is shorter by no more than `_NEAR`.
_BELOW_FAILURE: Final = 0.95
_NEAR: Final = 1.5
# Of the memory: what live tensors may take, and how that changes where the allocator has to retry.
_SHARE: Final = 0.9
_LEAST_SHARE: Final = 0.6
_SHARE_STEP: Final = 0.03
_THRASHING: Final = 2
_CALM: Final = 64


class ShapeReading(NamedTuple):
    """What a microbatch took above what was held."""

    samples: int
    length: int
    used_bytes: float

    def each_at(self, length: int) -> float:
        """At most so much for one sample of `length`, by this reading."""
        ratio = length / self.length
        return self.used_bytes / self.samples * (ratio * ratio if ratio > 1 else ratio)

    @property
    def shape(self) -> tuple[int, int]:
        return self.samples, self.length

    @property
    def density(self) -> float:
        """Bytes per padded element."""
        return self.used_bytes / (self.samples * self.length)


@final
@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Readings so far. A new value after each: `model = model.seen(8, 512, peak)`.

    >>> model = MemoryModel(held_bytes=1000).seen(4, 256, 5000).seen(8, 512, 17000)
    >>> [model.most_samples(length, 30_000) for length in (256, 512, 1024)]
    [28, 14, 3]
    >>> MemoryModel().most_samples(512, 30_000) is None
    True
    """

    held_bytes: float = 0.0
    readings: tuple[ShapeReading, ...] = ()  # by length, ascending
    failures: tuple[tuple[int, int], ...] = ()  # (samples, length), oldest first
    setbacks: int = 0
    peace: int = 0  # readings since the last setback, or since one was forgiven
    patience: int = _PEACE

    @property
    def margin(self) -> float:
        return MARGIN + _SETBACK * self.setbacks

    def seen(
        self, samples: int, length: int, peak_bytes: float, *, held_bytes: float | None = None
    ) -> MemoryModel:
        """A microbatch ran, and its peak was `peak_bytes`; `held_bytes` were held when it began."""
        _check(samples, length)
        if not (math.isfinite(peak_bytes) and peak_bytes >= 0):
            raise ValueError(f"peak_bytes must be a finite number that is not negative, not {peak_bytes!r}")
        held = self.held_bytes if held_bytes is None else float(held_bytes)
        if not (math.isfinite(held) and held >= 0):
            raise ValueError(f"held_bytes must be a finite number that is not negative, not {held_bytes!r}")
        new = ShapeReading(samples, length, peak_bytes - held)
        # What ran holds no shape that fails, whatever happened before.
        failures = tuple(one for one in self.failures if not _holds((samples, length), one))
        calm = self.peace + 1 >= self.patience
        model = replace(
            self,
            held_bytes=held,
            failures=failures[1:] if calm else failures,
            setbacks=max(0, self.setbacks - calm),
            peace=0 if calm else self.peace + 1,
        )
        return model if new.used_bytes < 1 else replace(model, readings=_with(self.readings, new))

    def after_oom(self, samples: int, length: int) -> MemoryModel:
        """A microbatch of this shape had an OOM."""
        _check(samples, length)
        shape = (samples, length)
        # Something promised that this shape fits. A reading that says far less than all others, and does not
        # hold the shape itself, is not believed any more; its length will be read later.
        least = _least_bound(self.readings, length)
        believed = []
        for one in self.readings:
            others = _least_bound(tuple(other for other in self.readings if other is not one), length)
            alone = least is not None and others is not None and others > _ALONE * least
            if not alone or _holds(one.shape, shape):
                believed.append(one)
        is_setback = bool(self.readings)
        return replace(
            self,
            readings=tuple(believed),
            failures=(*(one for one in self.failures if not _holds(one, shape)), shape)[-_FAILURES:],
            setbacks=min(_MOST_SETBACKS, self.setbacks + is_setback),
            peace=0,
            patience=min(_MOST_PEACE, self.patience * (1 + is_setback)),
        )

    def most_samples(self, length: int, budget_bytes: float) -> int | None:
        """How many samples of a padded length fit the budget, 0 if not even one; None: nothing is known."""
        _check(1, length)
        each = _least_bound(self.readings, length)
        limits = [self._below_failure(samples, at, length) for samples, at in self.failures]
        if each is None:
            known = [limit for limit in limits if limit is not None]
            return min(known, default=None)
        free_bytes = budget_bytes - self.held_bytes
        need = each * (1 + self.margin)
        reach = _REACH * max(one.used_bytes for one in self.readings)
        most = math.floor(min(free_bytes, reach) / need + 1e-9)
        if most < 1 and need <= free_bytes:
            most = 1  # beyond the reach, but it cannot be cut any smaller
        too_large = [one for one in self.readings if one.length <= length and one.used_bytes > free_bytes]
        limits += [one.samples - 1 for one in too_large]
        return max(0, min([most, *(limit for limit in limits if limit is not None)]))

    @staticmethod
    def _below_failure(samples: int, at: int, length: int) -> int | None:
        """The most samples of `length`, where `samples` of the length `at` had an OOM."""
        alike = math.floor(_BELOW_FAILURE * samples * at / length)
        if at <= length:
            return alike
        return max(samples, alike) if length * _NEAR >= at else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "held_bytes": self.held_bytes,
            "readings": [list(one) for one in self.readings],
            "failures": [list(one) for one in self.failures],
            "setbacks": self.setbacks,
            "peace": self.peace,
            "patience": self.patience,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> MemoryModel:
        return cls(
            held_bytes=float(stored["held_bytes"]),
            readings=tuple(ShapeReading(int(n), int(at), float(used)) for n, at, used in stored["readings"]),
            failures=tuple((int(n), int(at)) for n, at in stored["failures"]),
            setbacks=int(stored["setbacks"]),
            peace=int(stored["peace"]),
            patience=int(stored["patience"]),
        )


@final
@dataclass(frozen=True, slots=True)
class Headroom:
    """The share of the memory that live tensors may take; the remainder is for fragmentation.

    Batches in a row in which allocations were retried lower it, calm ones bring it back.
    """

    share: float = _SHARE
    retried: int = 0  # batches in a row with retries
    calm: int = 0

    def after(self, retries: int) -> Headroom:
        """A batch ended, in which the allocator retried so often."""
        if retries:
            lower = self.retried + 1 >= _THRASHING
            share = max(_LEAST_SHARE, self.share - _SHARE_STEP) if lower else self.share
            return Headroom(share, 0 if lower else self.retried + 1)
        if self.calm + 1 < _CALM:
            return Headroom(self.share, 0, self.calm + 1)
        return Headroom(min(_SHARE, self.share + _SHARE_STEP / 2))


@lru_cache(maxsize=256)
def _least_bound(readings: tuple[ShapeReading, ...], length: int) -> float | None:
    bounds = [one.each_at(length) for one in readings]
    for first, second in itertools.pairwise(readings):
        if first.length <= length < second.length:
            # Where bytes per element fall, the ray of the longer one is below the chord anyway.
            rise = (second.density - first.density) / (second.length - first.length)
            bounds.append(length * (first.density + rise * (length - first.length)))
    return min(bounds, default=None)


def _with(readings: tuple[ShapeReading, ...], new: ShapeReading) -> tuple[ShapeReading, ...]:
    """The readings with a new one: merged with that of its length, and few enough."""
    by_length = {one.length: one for one in readings}
    old = by_length.get(new.length)
    if old is None:
        by_length[new.length] = new
    elif new.samples >= old.samples:
        fading = old.used_bytes - _FADE * (old.used_bytes - new.used_bytes)
        by_length[new.length] = new._replace(used_bytes=max(new.used_bytes, fading))
    else:
        # Fewer samples bear more of what is fixed: what they say of more is an upper bound, and what they
        # took themselves a lower one.
        bound = new.used_bytes * old.samples / new.samples
        faded = old.used_bytes - _FADE * max(0.0, old.used_bytes - bound)
        by_length[new.length] = old._replace(used_bytes=max(faded, new.used_bytes))
    kept = sorted(by_length.values(), key=lambda one: one.length)
    while len(kept) > _LENGTHS:
        kept.remove(min(_supported_by_others(kept))[1])
    return tuple(kept)


def _supported_by_others(readings: list[ShapeReading]) -> Iterator[tuple[float, ShapeReading]]:
    """For each reading between others, how much tighter it is than what its neighbours say."""
    for before, one, after in zip(readings, readings[1:], readings[2:], strict=False):
        share = (one.length - before.length) / (after.length - before.length)
        chord = before.density + share * (after.density - before.density)
        yield abs(math.log(chord / one.density)), one


def _holds(shape: tuple[int, int], smaller: tuple[int, int]) -> bool:
    """`shape` is at least `smaller` in both."""
    return shape[0] >= smaller[0] and shape[1] >= smaller[1]


def _check(samples: object, length: object) -> None:
    for name, value in (("samples", samples), ("length", length)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
