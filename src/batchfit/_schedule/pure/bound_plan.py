"""A schedule bound to a run (ranks, cap, rounding): what a loader and a scheduler ask for the next size.

Rules: pure, so that asking twice gives the same answer. The size that a schedule wants is capped by what
fits, then rounded, in that order: rounding up never passes the cap. No rank is left without a sample: what
would leave one is an error, when the plan is made where that can be known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, final

from batchfit._loader.pure.progress import Progress
from batchfit._units import Rounding, round_size, whole

UNITS = ("epoch", "step", "samples", "tokens")


class Wants(Protocol):
    """A schedule: what it wants, before any limit of this run."""

    @property
    def unit(self) -> str: ...
    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def multiple_of(self) -> int: ...
    @property
    def rounding(self) -> Rounding: ...

    def wanted(self, progress: Progress, initial_batch_size: int) -> float: ...
    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None: ...
    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None: ...


@final
@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A schedule for one run: the size it starts from, and the limits of the run. `schedule.bind()` makes it.

    Attributes:
        schedule: the schedule.
        initial_batch_size: the global size that the run starts from.
        largest: the largest global batch that fits; None: no limit.
        world_size: ranks that share a batch.
        multiple_of: what sizes are rounded to, besides the schedule's own `multiple_of`.
        tokens_per_sample: tokens of a sample, for schedules in tokens; None where they are counted.
    """

    schedule: Wants
    initial_batch_size: int
    largest: int | None = None
    world_size: int = 1
    multiple_of: int = 1
    tokens_per_sample: int | None = None

    def size_at(self, progress: Progress) -> int:
        """The global size of the batch that comes next.

        Args:
            progress: how far the run has come.
        """
        return self._fitted(self.wanted_at(progress))

    def wanted_at(self, progress: Progress) -> float:
        """What the schedule wants there, before limits and rounding.

        Args:
            progress: how far the run has come.

        Raises:
            ValueError: the schedule wants less than one sample per rank.
        """
        wanted = self.schedule.wanted(self._with_tokens(progress), self.initial_batch_size)
        if wanted < self.world_size:
            raise ValueError(
                f"the schedule must leave no rank without a sample: it wants a batch of {wanted:g} for "
                f"{self.world_size} ranks ({where(progress, self.schedule.unit)})"
            )
        return wanted

    def limited_at(self, progress: Progress) -> str:
        """Why the size there is not what the schedule wants; empty where it is.

        Args:
            progress: how far the run has come.
        """
        wanted = self.wanted_at(progress)
        size = self._fitted(wanted)
        if wanted > size and self.largest is not None and size + self.multiple > self.largest:
            return f"the schedule wants {wanted:g}, and the largest that fits is {self.largest}"
        if self.multiple > self.schedule.multiple_of and round_size(wanted) != size:
            return f"{wanted:g} is rounded {self.schedule.rounding} to a multiple of {self.multiple}"
        return ""

    def steady_until(self, progress: Progress) -> int | None:
        """The count, in the schedule's unit, from which the size may be another; None: never.

        Args:
            progress: how far the run has come.

        Returns:
            The count in the schedule's unit; None where the size stays.
        """
        return self.schedule.steady_until(self._with_tokens(progress), self.initial_batch_size)

    @property
    def unit(self) -> str:
        """What the schedule counts."""
        return self.schedule.unit

    @property
    def multiple(self) -> int:
        """What every size is a multiple of."""
        return math.lcm(self.multiple_of, self.schedule.multiple_of)

    @property
    def cap(self) -> int | None:
        """The most that a size may be."""
        caps = [cap for cap in (self.schedule.max_batch_size, self.largest) if cap is not None]
        return min(caps, default=None)

    def check(self) -> None:
        """Refuse, before training, what can be known to be wrong.

        Raises:
            ValueError: the sizes contradict each other; names both.
        """
        initial, most = self.initial_batch_size, self.schedule.max_batch_size
        if most is not None and most < initial:
            raise ValueError(f"max_batch_size must be at least the initial batch size {initial}, not {most}")
        if self.largest is not None and self.largest < initial:
            raise ValueError(f"largest must be at least the initial batch size {initial}, not {self.largest}")
        name, least = self.schedule.smallest(initial) or ("initial_batch_size", initial)
        if least < self.world_size:
            raise ValueError(
                f"{name} must be at least {self.world_size}, so that no rank of {self.world_size} is without "
                f"a sample, not {least}"
            )
        cap = self.cap
        if cap is not None and cap < self.multiple:
            cap_name = "largest" if cap == self.largest else "max_batch_size"
            raise ValueError(
                f"{cap_name} must be at least {self.multiple}, what sizes are a multiple of, not {cap}"
            )

    def _fitted(self, wanted: float) -> int:
        return fitted(wanted, self.cap, self.multiple, self.schedule.rounding)

    def _with_tokens(self, progress: Progress) -> Progress:
        if progress.tokens is None and self.tokens_per_sample is not None:
            return replace(progress, tokens=progress.samples * self.tokens_per_sample)
        return progress


def fitted(wanted: float, cap: int | None, multiple_of: int, rounding: Rounding) -> int:
    """A size within a cap, rounded."""
    if cap is None:
        return round_size(wanted, multiple_of=multiple_of, rounding=rounding)
    size = round_size(min(wanted, cap), multiple_of=multiple_of, rounding=rounding)
    return size if size <= cap else max(cap // multiple_of, 1) * multiple_of


def count_in(progress: Progress, unit: str) -> int:
    """How far a run has come in a unit."""
    if unit == "epoch":
        return progress.epoch
    if unit == "step":
        return progress.step
    if unit == "samples":
        return progress.samples
    if progress.tokens is None:
        raise ValueError(
            "tokens must be counted for a schedule in tokens: pass tokens_per_sample, or step(tokens=...)"
        )
    return progress.tokens


def where(progress: Progress, unit: str) -> str:
    """`epoch 20`, `step 1000`, `sample 500000`, `token 250000000000`."""
    return f"{unit.removesuffix('s')} {count_in(progress, unit)}"


def checked_size(value: object, *, name: str) -> int:
    """A batch size that somebody gave."""
    return whole(value, name=name, at_least=1)
