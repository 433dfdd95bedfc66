"""Which of the three strategies the models of a Microbatcher need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.data_parallel.interface import DataParallel
from batchfit._engine.data_parallel.single import SINGLE_PROCESS
from batchfit._engine.distributed.fsdp_reset import sharded_modules
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import BatchfitError

# As long as nccl waits by default: a rank may compile its model while the others wait for its vote.
TIMEOUT_S: Final = 600.0


def data_parallel_of(
    modules: Sequence[nn.Module], *, sums: bool, sync: Literal["safe", "overlap"], timeout_s: float | None
) -> DataParallel:
    """The strategy for these modules; refuses what ranks cannot do together."""
    if sync not in ("safe", "overlap"):
        raise ValueError(f"sync must be one of 'safe', 'overlap', not {sync!r}")
    if timeout_s is not None:
        Ranks.current(timeout_s)  # refuses what is no time
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    if sharded_modules(modules):
        if sync != "safe":
            raise ValueError(
                f"sync must be 'safe' for models under FSDP2, which overlap anyhow, not {sync!r}"
            )
        from batchfit._engine.data_parallel.fsdp import FsdpRanks

        return FsdpRanks(modules, sums=sums, timeout_s=limit_s)
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if not wrapped:
        return SINGLE_PROCESS
    from batchfit._engine.data_parallel.ddp import DdpRanks

    return DdpRanks(wrapped, sums=sums, sync=sync, timeout_s=limit_s)


def refuse_wrapped(modules: Iterable[nn.Module]) -> None:
    """Refuse a function that runs a wrapped model which was not given: it would reduce by itself."""
    for module in modules:
        if sharded_modules(module.modules()):
            raise BatchfitError(
                "fn runs a model under FSDP2 that Microbatcher was not given: it has collectives in every "
                "microbatch, and a rank that retries would leave the others waiting. Pass it too"
            )
        if isinstance(module, DistributedDataParallel):
            raise BatchfitError(
                "fn runs a model in DistributedDataParallel, and Microbatcher was given the one inside: it "
                "would reduce in every microbatch, and a rank that retries would leave the others waiting. "
                "Pass the wrapped model"
            )
