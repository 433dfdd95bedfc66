"""What callers use of the three strategies for one batch: single process (`single`), `ddp` and `fsdp`.

A Microbatcher holds one `DataParallel`. It opens a `RankBatch` for each batch, which runs a `BatchWork`:
what this rank does with its samples, alone. A strategy decides when, how often and together with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from batchfit._engine.sizing.interface import Pass, SizedBatch

if TYPE_CHECKING:
    from torch import nn

    from batchfit._engine.batch.pure.microbatch import Microbatch
    from batchfit._engine.data_parallel.step_vote import RankStep
    from batchfit._engine.device.device import Device
    from batchfit._engine.device.oom import Failure
    from batchfit._engine.snapshot.batch_undo import BatchUndo
    from batchfit.errors import NothingFitsError

Outcome = Literal["kept", "nothing"]  # gradients were added, or the batch has no weight on any rank
Collectives = Literal["none", "last", "every"]


class PlannedPass(Pass, Protocol):
    """A pass over the microbatches of a plan, ready to run."""

    count: int  # microbatches that run: those without weight do not


class BatchWork(Protocol):
    """A batch of this rank during one call of `Microbatcher`."""

    undo: BatchUndo
    sized: SizedBatch | None  # None: this rank has no samples
    shared_leaves: Sequence[torch.Tensor]  # of the models, the same on all ranks
    weight: float  # of this rank's batch, once a pass was prepared
    is_new_function: bool  # the user's function has not run so far
    device: torch.device | None  # where microbatches go

    def modules_held(self) -> Iterable[nn.Module]:
        """The modules that the user's functions can reach by name."""

    def run_until_it_fits(self) -> None:
        """Run passes, each in smaller microbatches than the one before, until one ends without an OOM."""

    def run_once(self) -> Failure | None:
        """Run one pass: None, or how it failed with an OOM."""

    def is_proven(self) -> bool:
        """Whether the batch runs in microbatches that have run before."""

    def weigh(self) -> float:
        """The weight of this rank's batch. It cuts the batch, and may need memory."""

    # For ranks that have collectives in every microbatch (FSDP2):

    @property
    def key(self) -> Hashable:
        """The user's function, and what else decides on the collectives of a microbatch."""

    @property
    def least_samples(self) -> int:
        """Samples that a microbatch must have: BatchNorm trains on two at least."""

    def limits(self) -> AbstractContextManager[None]:
        """What is set while passes run: the budget, and the attention back-end."""

    def prepare(self, plan: Sequence[Microbatch]) -> PlannedPass | None:
        """A pass over a plan; None where it has no weight."""

    def finish(self, plan: tuple[Microbatch, ...], made: Any) -> None:
        """This pass (of `prepare`) counts."""

    def sample(self) -> Any:
        """One sample that has weight, as a microbatch; None where there is none."""

    def run_without_weight(self, micro: Any, gathered: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Run a microbatch for its collectives alone: it adds nothing to gradients.

        `gathered`: after forward, the tensors that stand for sharded parameters in the graph.
        """

    def shortage(self, what: str, message: str) -> NothingFitsError:
        """The error for `what` that does not fit."""


class RankBatch(Protocol):
    """One batch on one rank, from its first sample to the reduced gradients."""

    @property
    def scale(self) -> float:
        """What losses are multiplied by, so that all ranks together have the mean of the global batch."""

    @property
    def is_alone(self) -> bool:
        """No other rank may have the gradients that this one lacks."""

    @property
    def collectives(self) -> Collectives:
        """Which microbatches have collectives of the models in this batch."""

    def run(self, work: BatchWork) -> Outcome:
        """Run the batch, together with all ranks: afterwards gradients are those of the global batch."""

    def begin_microbatch(self) -> None:
        """A microbatch of this rank's batch begins."""

    def last_microbatch(self) -> AbstractContextManager[None]:
        """Around the last microbatch of a pass."""

    def check_collectives(self) -> None:
        """Raise where a new function has had collectives of its own so far."""

    def end_pass(self, work: BatchWork) -> None:
        """A pass ran: allocate what the reduction needs, which belongs to the pass since it may be an OOM."""


class DataParallel(Protocol):
    """The ranks that share the batches of one Microbatcher."""

    @property
    def shards(self) -> int | None:
        """Over how many ranks each parameter is sharded; None where parameters are not sharded (no FSDP2)."""

    def takes_empty(self, *, trains: bool) -> bool:
        """Whether a rank without samples takes part in a call."""

    def check_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse leaves whose gradients would not be reduced."""

    def batch(self, device: Device) -> AbstractContextManager[RankBatch]:
        """One batch with gradients; an error inside is reported to the other ranks."""

    def evaluation(self, device: Device) -> AbstractContextManager[RankBatch]:
        """One batch without gradients."""

    def step(self) -> AbstractContextManager[RankStep | None]:
        """One optimizer step, with the votes on it; None where there is no other rank."""

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse to step on gradients that differ from rank to rank."""
