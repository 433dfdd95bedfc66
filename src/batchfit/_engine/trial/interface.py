"""What a search needs of the runner of its trials, in this process or in child processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, final

from batchfit._engine.device.readings import BudgetedDevice
from batchfit._engine.distributed.ranks import Ranks
from batchfit.results import Trial


@final
@dataclass(frozen=True, slots=True)
class TrialRequest:
    """One trial to run.

    `may_settle`: a soak may end early, once the allocator repeats itself.
    `generation_steps`: the number of steps where each step generates; None for `steps`.
    `is_smallest`: no smaller size is allowed, so an ambiguous error is the user's and not an OOM.
    """

    size: int
    steps: int
    soak: bool = False
    may_settle: bool = False
    generation_steps: int | None = None
    is_smallest: bool = False

    def steps_of(self, kind: str) -> int:
        """How many steps a workload of that kind runs."""
        if self.generation_steps is None or kind != "generation":
            return self.steps
        return min(self.steps, self.generation_steps)


# Runs one trial; None where another rank's trial failed and this rank's was ended for it.
RunTrial = Callable[[TrialRequest], Trial | None]


class TrialRunner(Protocol):
    """Runs the trials of a search: `InProcess`, or `InChildren` with `isolate=True`."""

    @property
    def device(self) -> BudgetedDevice:
        """Where the workload runs."""

    @property
    def state_elements(self) -> int:
        """How many numbers the workload's state holds."""

    @property
    def state_bytes(self) -> int | None:
        """Bytes of weights, gradients and present optimizer state; None where they are not known."""

    @property
    def samples(self) -> int | None:
        """How many samples the workload's dataset has; None where that is not known."""

    def rehearse(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Record which collectives a step issues, at a few small sizes, on all ranks together."""

    def trying(self, budget_bytes: int) -> AbstractContextManager[RunTrial]:
        """A context with a function that runs one trial under the budget."""

    def reachable_bytes(self, least_bytes: int) -> int:
        """Bytes that the next trial may use; may wait a while for `least_bytes` to be released."""

    def reachable_after_bytes(self) -> int:
        """Bytes that were reachable when the last trial had ended."""

    def regroup(self) -> None:
        """Repair wrappers such as DDP on all ranks, after a trial that failed on any rank."""
