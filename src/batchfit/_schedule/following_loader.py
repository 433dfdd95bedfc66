"""The loader that follows a schedule: it gets the plan, or each new size.

Rules
- The size is its `max_tokens` where its batches are by tokens, else its `batch_size`.
- A loader that takes a plan (it has an attribute `schedule`) gets it, and changes sizes by itself; any other
  gets the size at the change. What somebody else sets stays until the schedule changes the size again.
- What a loader counts (`progress`) goes before what the caller says, for its batches are made by that.
- A loader and a caller that are at different epochs or sizes get one warning each.
"""

from __future__ import annotations

import logging
from typing import Any, final

import torch

from batchfit._loader.pure.progress import EpochPlan, Progress

log = logging.getLogger("batchfit")


@final
class FollowingLoader:
    """A `ResizableLoader`, any object with an attribute `batch_size`, or None."""

    def __init__(self, loader: Any) -> None:
        _check(loader)
        self._loader = loader
        self._name = "batch_size" if getattr(loader, "max_tokens", None) is None else "max_tokens"
        self._plan: EpochPlan | None = None
        self._warned_of_epochs = self._warned_of_late_rate = False

    @property
    def batch_size(self) -> Any:
        """Its size now; None where there is no loader."""
        return getattr(self._loader, self._name, None)

    @property
    def world_size(self) -> int | None:
        """Over how many ranks it shares a batch out, where it says so."""
        size = getattr(self._loader, "world_size", None)
        return size if isinstance(size, int) else None

    @property
    def drop_last(self) -> bool:
        """Whether it leaves out the short last batch of an epoch."""
        return getattr(self._loader, "drop_last", None) is True

    @property
    def progress(self) -> Progress | None:
        """How far the run has come, where it counts that."""
        counted = getattr(self._loader, "progress", None)
        return counted if isinstance(counted, Progress) else None

    @property
    def last_began(self) -> Progress | None:
        """How far the run had come when the last batch began, where it says so."""
        began = getattr(self._loader, "current_progress", None)
        return began if isinstance(began, Progress) else None

    @property
    def has_plan(self) -> bool:
        """Whether it changes sizes by itself, by the plan that it was given."""
        return self._plan is not None and getattr(self._loader, "schedule", None) is self._plan

    def take(self, plan: EpochPlan | None, size: int) -> None:
        """Follow `plan` from now on; without one, or where it cannot, begin with `size`."""
        if self._loader is None:
            return
        plans = hasattr(self._loader, "schedule")
        if plans:
            self._loader.schedule = plan
            self._plan = plan
        if plan is None or not plans:
            self.move(size)

    def move(self, size: int) -> None:
        """Set the changed size on a loader that follows no plan."""
        if self._loader is None or self.has_plan:
            return
        if self.batch_size != size:
            setattr(self._loader, self._name, size)

    def restore(self, size: int) -> None:
        """Set a size that somebody else had set before; the schedule's next change replaces it."""
        if self._loader is not None:
            setattr(self._loader, self._name, size)

    def set_by_others(self, size: int) -> int | None:
        """The size that somebody else has given it, if it has another one than the schedule's `size`."""
        loader = self._loader
        if loader is None or getattr(loader, "schedule", None) is not None or self.batch_size == size:
            return None
        return int(self.batch_size)

    def compare_epochs(self, epoch: int | None) -> None:
        """One that asks the plan by its own count must not be at another epoch than the caller."""
        counted = self.progress
        if epoch is None or counted is None or self._warned_of_epochs or not self.has_plan:
            return
        if epoch - counted.epoch not in (0, 1):
            self._warned_of_epochs = True
            log.warning(
                "%s",
                f"step({epoch}) was called, and the loader is at epoch {counted.epoch}: it takes its sizes "
                "from there. Load the loader's state too, or call its set_epoch",
            )

    def compare_sizes(self, before: int) -> None:
        """One that changes by itself must not have had another size than `before`, which the rates are of."""
        began = self.last_began
        if self._warned_of_late_rate or self._plan is None or not self.has_plan or began is None:
            return
        if (size := self._plan.size_at(began)) != before:
            self._warned_of_late_rate = True
            log.warning(
                "%s",
                f"the loader was at a batch size of {size} before step() was called: until now the learning "
                f"rate was that of {before}. A size may change in the middle of an epoch here: call "
                "scheduler.step() after each optimizer.step()",
            )


def _check(loader: Any) -> None:
    if loader is None or hasattr(loader, "schedule"):
        return
    if isinstance(loader, torch.utils.data.DataLoader):
        raise TypeError(
            "loader must be one whose batch_size can be set, not a DataLoader. Use batchfit.ResizableLoader, "
            "or leave loader out and make a new DataLoader when step() says that the size has changed"
        )
    if not hasattr(loader, "batch_size") and not hasattr(loader, "max_tokens"):
        raise TypeError(f"loader must have an attribute batch_size, not {loader!r:.80}")
