"""How far a run has come: epoch, step, samples and tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come. All counts are of what was handed to workers before the batch in question.

    Attributes:
        epoch: epochs that are over.
        step: optimizer steps (= batches) so far, over all epochs.
        samples: samples so far, over all epochs and all ranks.
        tokens: tokens so far; None where they are not counted.
    """

    epoch: int = 0
    step: int = 0  # optimizer steps (= batches) so far, over all epochs
    samples: int = 0  # over all epochs and all ranks
    tokens: int | None = None  # None where nobody counts them


class EpochPlan(Protocol):
    """What `ResizableLoader(schedule=)` takes."""

    def size_at(self, progress: Progress) -> int:
        """The global batch size of the batch that comes next; pure, and cheap (microseconds)."""


@runtime_checkable
class Schedule(Protocol):
    """A schedule for any run, which `bind` makes a plan for one run."""

    @property
    def starts_by_itself(self) -> bool:
        """Whether it has a first size of its own."""

    def bind(
        self,
        initial_batch_size: int | None = None,
        *,
        world_size: int = 1,
        tokens_per_sample: int | None = None,
    ) -> EpochPlan:
        """The plan of one run, for its first size and its number of ranks."""


@runtime_checkable
class SizeLimits(Protocol):
    """What every batch-size config has, those with state among them, which only a scheduler can follow."""

    @property
    def max_batch_size(self) -> int | None: ...
    @property
    def multiple_of(self) -> int: ...
