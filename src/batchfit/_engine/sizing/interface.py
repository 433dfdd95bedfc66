"""What callers use of a batch that runs in microbatches: `SizedBatch`, and who watches its passes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from batchfit._engine.batch.pure.microbatch import Microbatch
    from batchfit._engine.batch.split import Batch
    from batchfit._engine.device.oom import Failure


class PassWatch(Protocol):
    """Is called around each microbatch of a pass."""

    def begin(self, index: int) -> None:
        """A microbatch begins."""

    def end(self, index: int) -> None:
        """It ran."""


@final
class _NoWatch:
    """Reads nothing."""

    def begin(self, index: int) -> None: ...

    def end(self, index: int) -> None: ...


NO_WATCH = _NoWatch()


class Pass(Protocol):
    """One pass over the microbatches of a plan; calling it runs them."""

    @property
    def at(self) -> int:
        """The microbatch that runs; -1 before the first one."""

    def __call__(self) -> None: ...


class SizedBatch(Protocol):
    """One batch during one call: decides on its microbatches, and learns from how they ran."""

    whole: Batch
    retries: int  # passes after an OOM
    peak_bytes: int | None  # of the pass that ran, where it was measured
    compiled: bool  # torch.compile makes new code for each new size

    @property
    def watch(self) -> PassWatch | None:
        """What reads the memory of each microbatch; None where nothing is to be read."""

    def plan(self, done: Sequence[Microbatch] = ()) -> tuple[Microbatch, ...]:
        """Microbatches for the samples that `done` leaves."""

    def plan_finer(self, count: int, least: int) -> tuple[Microbatch, ...]:
        """A plan of `count` microbatches where this batch needs fewer, each of `least` samples or more.

        Other ranks need that many. It says nothing about this rank's memory, so nothing is learned from it.
        """

    def limit_untested(self, headroom: float) -> None:
        """Where no OOM can be retried: begin with one sample, then grow, with a share of memory left free."""

    def is_proven(self) -> bool:
        """Whether the microbatches of the plan have run before."""

    def limited(self) -> AbstractContextManager[None]:
        """Inside, no more than the budget can be allocated, where the plan is not proven."""

    def attempt(self, run: Pass) -> Failure | None:
        """Call `run`: None, or how it failed with an OOM."""

    def shrink(self, failure: Failure, at: int) -> None:
        """After an OOM in microbatch `at` was undone: release memory, and choose smaller microbatches."""

    def finish(self, plan: Sequence[Microbatch]) -> None:
        """Learn from a batch that ran."""
