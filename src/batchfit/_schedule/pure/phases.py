"""The phases of a schedule over a run: for each size its epochs and optimizer updates.

Rules: the size is asked before every batch, so that it changes between batches only, in the middle of an
epoch too; the last batch of an epoch is short, or dropped, and has a sample for every rank. Batches are
counted one by one only where nobody knows how long a size stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, final

from batchfit._arguments import MOST_EPOCHS, check_whole
from batchfit._loader.pure.deal import cut
from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.bound_plan import count_in, where
from batchfit._units import Rounding, whole

EventKind = Literal["changed", "skipped", "limited", "kept"]


@final
@dataclass(frozen=True, slots=True)
class ScheduleEvent:
    """A schedule changed the batch size, or could not, and why. Printed, it is one line.

    Attributes:
        kind: "changed", "skipped" (an increase past the limit), "limited" (less than the schedule wants) or
            "kept".
        size_before: the global size before.
        size_after: the global size from now on.
        progress: how far the run had come.
        why: the reason, as a sentence.
        unit: what the schedule counts: "epoch", "step", "samples" or "tokens".
        lr_factors: factor of each parameter group's learning rate, against the initial batch size.
    """

    kind: EventKind
    size_before: int
    size_after: int
    progress: Progress
    why: str
    unit: str = "epoch"
    lr_factors: tuple[float, ...] = ()  # of each parameter group, against the initial batch size

    def __str__(self) -> str:
        at = where(self.progress, self.unit).capitalize()
        if self.kind == "changed":
            return f"{at}: Updating batch size from {self.size_before} to {self.size_after}"
        return f"{at}: batch size stays {self.size_after}: {self.why}"


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a run with one batch size; `to_epoch` is the last one that it touches.

    No updates: epochs that have no batch, since theirs would not be full and such ones are dropped.
    """

    size: int
    begins: Progress
    to_epoch: int
    updates: int
    samples: int
    short_batches: int = 0

    @property
    def from_epoch(self) -> int:
        """The epoch in which it begins."""
        return self.begins.epoch


@final
@dataclass(frozen=True, slots=True)
class Constant:
    """No schedule: one size."""

    unit: str = "epoch"
    max_batch_size: int | None = None
    multiple_of: int = 1
    rounding: Rounding = "down"

    def wanted(self, progress: Progress, initial_batch_size: int) -> float:
        """Always the same."""
        return initial_batch_size

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        """None: it never changes."""
        return None

    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None:
        """The only one."""
        return "initial_batch_size", initial_batch_size


class Foreseen(Protocol):
    """A plan that can be followed without training."""

    @property
    def unit(self) -> str:
        """What `steady_until` counts."""

    @property
    def tokens_per_sample(self) -> int | None:
        """None where nobody counts tokens."""

    def size_at(self, progress: Progress) -> int:
        """The size of the batch that comes next."""

    def steady_until(self, progress: Progress) -> int | None:
        """The count from which the size may be another; None: never."""


def phases(
    plan: Foreseen, *, samples: int, epochs: int, drop_last: bool = False, world_size: int = 1
) -> tuple[Phase, ...]:
    """The phases of `epochs` epochs of `samples` samples each."""
    whole(samples, name="samples", at_least=1)
    check_whole("epochs", epochs, at_most=MOST_EPOCHS)
    found: list[Phase] = []
    at = Progress(tokens=0 if plan.tokens_per_sample is not None else None)
    for epoch in range(epochs):
        at = replace(at, epoch=epoch)
        left = samples
        while left > 0:
            size = plan.size_at(at)
            batches = _whole_batches(size, left, world_size, drop_last=drop_last)
            if batches:
                batches = int(min(batches, _batches_alike(plan, at, size)))
            taken = batches * size
            if batches == 0:
                batches, taken = 1, cut(size, left, world_size=world_size, drop_last=drop_last)
                if taken == 0:
                    if left == samples:  # no batch in this epoch
                        _add(found, size, at, 0, 0, short=False)
                    break
            _add(found, size, at, batches, taken, short=taken < size)
            left -= taken
            at = _after(at, batches, taken, plan.tokens_per_sample)
    return tuple(found)


def updates_of(found: tuple[Phase, ...]) -> int:
    """Optimizer steps of all phases."""
    return sum(phase.updates for phase in found)


def _whole_batches(size: int, left: int, world_size: int, *, drop_last: bool) -> int:
    """How many batches of `size` can be taken before the end of the epoch is near."""
    return left // size if drop_last else max(left - world_size, 0) // size


def _batches_alike(plan: Foreseen, at: Progress, size: int) -> float:
    """How many batches of `size` come before the size may be another; the epoch may end before."""
    until, unit = plan.steady_until(at), plan.unit
    if until is None:
        return math.inf
    counts = until - count_in(at, unit)
    if unit == "epoch":
        return math.inf if counts > 0 else 1
    per_batch = {"step": 1, "samples": size, "tokens": size * (plan.tokens_per_sample or 1)}[unit]
    return max(1, -(-counts // per_batch))


def _add(found: list[Phase], size: int, at: Progress, batches: int, taken: int, *, short: bool) -> None:
    if found and found[-1].size == size:
        last = found[-1]
        found[-1] = replace(
            last,
            to_epoch=at.epoch,
            updates=last.updates + batches,
            samples=last.samples + taken,
            short_batches=last.short_batches + short,
        )
    else:
        found.append(Phase(size, at, at.epoch, batches, taken, int(short)))


def _after(at: Progress, batches: int, taken: int, tokens_per_sample: int | None) -> Progress:
    tokens = None if at.tokens is None else at.tokens + taken * (tokens_per_sample or 0)
    return replace(at, step=at.step + batches, samples=at.samples + taken, tokens=tokens)
