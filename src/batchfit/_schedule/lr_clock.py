"""Whether an LR scheduler counts batches, of which there are fewer the larger they are.

Rules: said once, as soon as it is seen, with the remedy; nothing is changed. A scheduler that listens to a
metric (ReduceLROnPlateau) has no clock.
"""

from __future__ import annotations

import logging
from typing import Any, final

from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchfit._loader.pure.progress import Progress

log = logging.getLogger("batchfit")


@final
class LRClock:
    """Watches how far a run comes between two steps of an LR scheduler."""

    def __init__(self, unit: str, *, counts: bool) -> None:
        self._by_epoch = counts or unit == "epoch"  # whether the epoch of each step is known
        self._at: dict[int, Progress] = {}
        self._told = False

    def stepped(self, lr_scheduler: Any, now: Progress, size: int) -> None:
        """It has stepped, at a batch size that will change."""
        before = self._at.get(id(lr_scheduler))
        self._at[id(lr_scheduler)] = now
        if before is None or self._told or isinstance(lr_scheduler, ReduceLROnPlateau):
            return
        if self._by_epoch:
            often = now.epoch == before.epoch
        else:
            often = 0 < now.step - before.step <= 1 or 0 < now.samples - before.samples <= 2 * size
        if often:
            self._told = True
            log.warning(
                "%s",
                f"{type(lr_scheduler).__name__} is stepped once a batch, and the batch size changes: it will "
                "get another number of steps than with a constant size. Step it once an epoch, or make it "
                "for the number of steps that there will be, scheduler.updates(samples=..., epochs=...), and "
                "say so with updates_known=True",
            )
