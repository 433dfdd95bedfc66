"""A batch size that a user's function increases, epoch by epoch.

Rules: the function is asked once for each epoch, in order, with the size that the epoch before left; an
increase past the limit is left out, or goes to the limit where that was asked for. What it said is kept, so
that asking about an epoch again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from batchfit._decide.bound import fitted
from batchfit._decide.counts import Rounding
from batchfit._decide.progress import Progress


class Told(NamedTuple):
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
        self._told: list[Told] = []  # one for each epoch

    def size_at(self, progress: Progress) -> int:
        """The size of an epoch; asks the function for those that it was not asked for."""
        return self.told_at(progress.epoch).size

    def steady_until(self, progress: Progress) -> int | None:
        """It may change with every epoch."""
        return progress.epoch + 1

    def told_at(self, epoch: int) -> Told:
        """What became of the function's answer for an epoch."""
        while len(self._told) <= epoch:
            before = self._told[-1].size if self._told else self._initial
            self._told.append(self._next(len(self._told), before))
        return self._told[epoch]

    def _next(self, epoch: int, size: int) -> Told:
        increase = self._increase(epoch, size)
        wanted = size + increase
        if wanted < self._world_size:
            raise ValueError(
                f"function must leave no rank without a sample: it wants a batch of {wanted} for "
                f"{self._world_size} ranks (epoch {epoch})"
            )
        if increase == 0:
            return Told(epoch, size)
        if self._cap is not None and wanted > self._cap:
            why = f"an increase by {increase} to {wanted} is more than the limit of {self._cap}"
            if not self._clamp or size >= self._cap:
                return Told(epoch, size, why)
            return Told(epoch, fitted(self._cap, self._cap, self._multiple_of, "down"), why)
        rounded = fitted(wanted, self._cap, self._multiple_of, self._rounding)
        why = (
            f"{wanted} is rounded {self._rounding} to a multiple of {self._multiple_of}"
            if rounded != wanted
            else ""
        )
        return Told(epoch, rounded, why)

    def sizes(self, *, before_epoch: int) -> list[int]:
        """The sizes of the epochs before one, for a checkpoint."""
        return [told.size for told in self._told[:before_epoch]]

    def restore(self, sizes: Sequence[int]) -> None:
        """Go on from the sizes of a checkpoint."""
        self._told = [Told(epoch, size) for epoch, size in enumerate(sizes)]
