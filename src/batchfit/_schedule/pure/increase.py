"""A batch size that a user's function increases, epoch by epoch.

Rules: the function is called once for each epoch, in order, with the size that the epoch before left; an
increase past the limit is left out, or goes to the limit where that was asked for. The sizes that it led to
are kept, so that asking about an epoch twice changes nothing: one entry for each change, however many epochs
there are, and for the last `_CHANGES_KEPT` changes. Why a size is not what was wanted is kept for the last
epochs only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.bound_plan import fitted
from batchfit._units import Rounding

_REASONS_KEPT = 64  # epochs: a loader asks ahead of what is trained, and not that far
_CHANGES_KEPT = 1024  # a checkpoint of about 16 kB
_NOT_KEPT = 0  # in place of a size: that of the epochs before the changes that are kept


class EpochSize(NamedTuple):
    """The size from an epoch on, and why it is not what the function wanted, if it is not."""

    epoch: int
    size: int
    why: str = ""


@final
class Increases:
    """The sizes so far; `increase(epoch, size)` is the user's function, checked."""

    unit = "epoch"

    def __init__(
        self,
        increase: Callable[[int, int], int],
        initial_batch_size: int,
        *,
        cap: int | None,
        clamp: bool,
        world_size: int = 1,
        multiple_of: int = 1,
        rounding: Rounding = "down",
        tokens_per_sample: int | None = None,
    ) -> None:
        self._increase = increase
        self.initial_batch_size = initial_batch_size
        self._initial = fitted(initial_batch_size, cap, multiple_of, rounding)
        self._cap = cap
        self._clamp = clamp
        self._world_size = world_size
        self._multiple_of = multiple_of
        self._rounding = rounding
        self.tokens_per_sample = tokens_per_sample
        self._epochs = 0  # that the function was asked for
        self._changes: list[tuple[int, int]] = []  # an epoch, and the size from it on
        self._reasons: dict[int, str] = {}  # of the last epochs, those that have one

    def size_at(self, progress: Progress) -> int:
        """The size of an epoch; asks the function for those that it was not asked for."""
        return self.at_epoch(progress.epoch).size

    def steady_until(self, progress: Progress) -> int | None:
        """It may change with every epoch."""
        return progress.epoch + 1

    def at_epoch(self, epoch: int) -> EpochSize:
        """What became of the function's answer for an epoch."""
        while self._epochs <= epoch:
            before = self._changes[-1][1] if self._changes else self._initial
            self._keep(self._next(self._epochs, before))
        at = bisect_right(self._changes, epoch, key=lambda change: change[0]) - 1
        size = self._changes[at][1]
        if size == _NOT_KEPT:
            raise ValueError(
                f"epoch must be at least {self._changes[1][0]}, not {epoch}: only the last {_CHANGES_KEPT:,} "
                "changes of the batch size are kept"
            )
        return EpochSize(epoch, size, self._reasons.get(epoch, ""))

    def _keep(self, decided: EpochSize) -> None:
        if not self._changes or self._changes[-1][1] != decided.size:
            self._changes.append((decided.epoch, decided.size))
            if len(self._changes) > _CHANGES_KEPT + 1:
                self._changes[:2] = [(0, _NOT_KEPT)]
        self._epochs = decided.epoch + 1
        self._reasons.pop(decided.epoch - _REASONS_KEPT, None)
        if decided.why:
            self._reasons[decided.epoch] = decided.why

    def _next(self, epoch: int, size: int) -> EpochSize:
        increase = self._increase(epoch, size)
        wanted = size + increase
        if wanted < self._world_size:
            raise ValueError(
                f"function must leave no rank without a sample: it wants a batch of {wanted} for "
                f"{self._world_size} ranks (epoch {epoch})"
            )
        if increase == 0:
            return EpochSize(epoch, size)
        if self._cap is not None and wanted > self._cap:
            why = f"an increase by {increase} to {wanted} is more than the limit of {self._cap}"
            if not self._clamp or size >= self._cap:
                return EpochSize(epoch, size, why)
            return EpochSize(epoch, fitted(self._cap, self._cap, self._multiple_of, "down"), why)
        rounded = fitted(wanted, self._cap, self._multiple_of, self._rounding)
        why = (
            f"{wanted} is rounded {self._rounding} to a multiple of {self._multiple_of}"
            if rounded != wanted
            else ""
        )
        return EpochSize(epoch, rounded, why)

    def runs(self, *, before_epoch: int) -> list[list[int]]:
        """The sizes of the epochs before one, for a checkpoint: how many epochs in a row have which."""
        end = min(before_epoch, self._epochs)
        starts = [*(epoch for epoch, _ in self._changes), end]
        runs = [
            [min(after, end) - epoch, size]
            for (epoch, size), after in zip(self._changes, starts[1:], strict=True)
        ]
        return [run for run in runs if run[0] > 0]

    def restore(self, sizes: Sequence[Any]) -> None:
        """Go on from the runs of a checkpoint; an older one has a size for each epoch."""
        self._epochs, self._changes, self._reasons = 0, [], {}
        for one in sizes:
            count, size = (1, one) if isinstance(one, int) else one
            self._keep(EpochSize(self._epochs, size))
            self._epochs += count - 1
