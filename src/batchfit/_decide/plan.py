"""What a schedule will do over a run: its phases, with the updates that a loader really makes.

Rules: the size is asked before every batch, so that it changes between batches only, in the middle of an epoch
too; the last batch of an epoch is short, or dropped. Batches are counted one by one only where nobody knows how
long a size stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

from batchfit._decide.bound import BoundPlan, count_in, where
from batchfit._decide.counts import whole
from batchfit._decide.progress import Progress

EventKind = Literal["changed", "skipped", "limited", "kept"]


@final
@dataclass(frozen=True, slots=True)
class ScheduleEvent:
    """Something that a schedule did, or did not do, and why."""

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
    """A stretch of a run with one batch size; `to_epoch` is the last one that it touches."""

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
    rounding: Literal["down"] = "down"

    def wanted(self, progress: Progress, initial_batch_size: int) -> float:
        """Always the same."""
        return initial_batch_size

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        """For ever."""
        return None

    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None:
        """The only one."""
        return "initial_batch_size", initial_batch_size


def phases(plan: BoundPlan, *, samples: int, epochs: int, drop_last: bool = False) -> tuple[Phase, ...]:
    """The phases of `epochs` epochs of `samples` samples each."""
    whole(samples, name="samples", at_least=1)
    whole(epochs, name="epochs", at_least=1)
    found: list[Phase] = []
    at = Progress(tokens=0 if plan.tokens_per_sample is not None else None)
    for epoch in range(epochs):
        at = replace(at, epoch=epoch)
        left = samples
        while left > 0:
            size = plan.size_at(at)
            if left < size and drop_last:
                break
            batches = 1 if left < size else _batches_alike(plan, at, size, left)
            dealt = min(batches * size, left)
            _add(found, size, at, batches, dealt, short=left < size)
            left -= dealt
            at = _after(at, batches, dealt, plan.tokens_per_sample)
    return tuple(found)


def updates_of(found: tuple[Phase, ...]) -> int:
    """Optimizer steps of all phases."""
    return sum(phase.updates for phase in found)


def _batches_alike(plan: BoundPlan, at: Progress, size: int, left: int) -> int:
    """How many whole batches of `size` come before the size may be another, in this epoch."""
    most = left // size
    until = plan.steady_until(at)
    unit = plan.schedule.unit
    if until is None or unit == "epoch":
        return most
    counts = until - count_in(at, unit)
    per_batch = {"step": 1, "samples": size, "tokens": size * (plan.tokens_per_sample or 1)}[unit]
    return max(1, min(most, -(-counts // per_batch)))


def _add(found: list[Phase], size: int, at: Progress, batches: int, dealt: int, *, short: bool) -> None:
    if found and found[-1].size == size:
        last = found[-1]
        found[-1] = replace(
            last,
            to_epoch=at.epoch,
            updates=last.updates + batches,
            samples=last.samples + dealt,
            short_batches=last.short_batches + short,
        )
    else:
        found.append(Phase(size, at, at.epoch, batches, dealt, int(short)))


def _after(at: Progress, batches: int, dealt: int, tokens_per_sample: int | None) -> Progress:
    tokens = None if at.tokens is None else at.tokens + dealt * (tokens_per_sample or 0)
    return replace(at, step=at.step + batches, samples=at.samples + dealt, tokens=tokens)
