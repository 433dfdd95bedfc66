"""Epochs of a training whose batch size follows a schedule, as the Trainer's loop counts them.

Rules
- The Trainer assumes that all epochs have one number of steps. Its numbers are upper bounds here, and an
  epoch ends with its last batch (`get_batch_samples` sets `control.should_epoch_stop`).
- An epoch is entered when the Trainer calls `set_epoch` of its loader: all versions do, before they iterate.
- A resumed run continues in the checkpoint's epoch, at the sample that the loader stands at.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import Any, final

from torch.utils.data import IterableDataset


@final
class ScheduledLoader:
    """A `ResizableLoader` as the Trainer's loop uses it."""

    def __init__(self, run: Any, loader: Any) -> None:
        self._run = run
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        self._run.enter_epoch(epoch)

    def __len__(self) -> int:
        """Batches of this epoch. At its end: of any later one, since transformers before 5.3 asks then."""
        length = len(self._loader)
        return max(length, self._run.steps) if is_at_end(self._loader) else length

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)


@final
class ResumedSteps(int):
    """Steps per epoch, by which the Trainer divides its global step to find the epoch to continue in."""

    epoch: int

    def __new__(cls, steps: int, *, epoch: int) -> ResumedSteps:
        self = super().__new__(cls, steps)
        self.epoch = epoch
        return self

    def __rfloordiv__(self, global_step: int) -> int:
        return self.epoch

    def __rmod__(self, global_step: int) -> int:
        return 0  # no batches to skip: the loader knows where in the epoch it is


def is_at_end(loader: Any) -> bool:
    """Whether all batches of the loader's epoch are handed out; no stream knows."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    return not is_stream and loader.state_dict()["batches"] >= len(loader)


def plan_epochs(trainer: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `Trainer.set_initial_training_values` returns, by the sizes of the schedule."""
    run, args = trainer._batchfit, trainer.args
    epochs, _, examples, samples, other, _, steps = values
    length = len(run.loader.dataset if run.loader.sampler is None else run.loader.sampler)
    plan = run.new_scheduler(trainer)

    def updates(count: int) -> int:
        if count == 0:
            return 0
        return int(plan.updates(samples=length, epochs=count, drop_last=run.drop_last))

    if args.max_steps > 0:
        enough = next(count for power in range(64) if updates(count := 2**power) >= steps)
        epochs = bisect.bisect_left(range(enough + 1), steps, key=updates)
    else:
        whole, rest = int(args.num_train_epochs), args.num_train_epochs % 1
        steps = updates(whole) + math.ceil(rest * (updates(whole + 1) - updates(whole)))
    run.steps = steps
    run.find_largest_batch(plan, epochs=epochs, steps=steps, length=length)
    return epochs, steps, examples, samples, other, updates(1), steps
