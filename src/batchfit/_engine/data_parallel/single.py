"""One process, or models that are not wrapped: there is no rank to agree with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from batchfit._engine.data_parallel.interface import BatchWork, Collectives, Outcome
    from batchfit._engine.device.device import Device


@final
class SingleProcess:
    """A `DataParallel` of this process alone."""

    shards = None

    def takes_empty(self, *, trains: bool) -> bool:
        return False

    def check_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """All leaves belong to this process."""

    def batch(self, device: Device) -> AbstractContextManager[SingleProcessBatch]:
        return nullcontext(_BATCH)

    evaluation = batch

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """All gradients belong to this process."""


@final
class SingleProcessBatch:
    """A `RankBatch` without other ranks."""

    scale: Final = 1.0
    is_alone: Final = True
    collectives: Final[Collectives] = "none"

    def run(self, work: BatchWork) -> Outcome:
        # Without a process group there are no wrapped models that the user's function could run.
        if work.is_new_function and dist.is_available() and dist.is_initialized():
            from batchfit._engine.data_parallel.strategy import refuse_wrapped

            refuse_wrapped(work.modules_held())
        work.run_until_it_fits()
        return "kept" if work.weight else "nothing"

    def begin_microbatch(self) -> None: ...

    def last_microbatch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_collectives(self) -> None: ...

    def end_pass(self, work: BatchWork) -> None:
        work.undo.keep()


_BATCH: Final = SingleProcessBatch()
SINGLE_PROCESS: Final = SingleProcess()
