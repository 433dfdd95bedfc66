"""Spreads the models of a workload over fake ranks, for the time of its traces.

Rules:
- Inside a fake process group (`fake_ranks.py`) a program's own `fully_shard` or DistributedDataParallel is
  traced as it is. A program that wraps nothing is spread as a layout says.
- Only models that learn are spread: a frozen teacher beside them stays whole.
- A change lasts as long as a trace, and leaves the program's objects as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.sharding.ddp import Buckets
from batchfit._engine.sharding.fake_ranks import fake_ranks
from batchfit._engine.sharding.fsdp2 import FullyShard
from batchfit._engine.sharding.pure.layout import ShardLayout
from batchfit._engine.sharding.zero import OwnShares, SharedState
from batchfit._engine.snapshot.contents import is_parallel
from batchfit._engine.torch_private import ddp
from batchfit._engine.torch_private.optimizers import shares_state
from batchfit._engine.torch_private.process_groups import is_fake
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload.reachable import StepReach


@final
@dataclass(frozen=True, slots=True)
class Sharding:
    """How the traces of a workload are those of one of several ranks; `ranks` is 1 for a single process."""

    ranks: int = 1
    changes: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def on_ranks(reach: StepReach, ranks: int | None, layout: ShardLayout | None) -> Iterator[Sharding]:
    """Inside, traces of a workload with the `changes` of what is yielded are those of one rank of `ranks`.

    None: of the fake process group that is here already, or of a single process.
    """
    if ranks is None and not is_fake():
        yield Sharding()
        return
    count = dist.get_world_size() if ranks is None else ranks
    with fake_ranks(count):
        yield Sharding(count, changes_for(reach, layout), tuple(caveats(reach)))


def rules_on_ranks(reach: StepReach, gpu: Gpu | None) -> CudaRules:
    """The kernels of a GPU, traced on the CPU: those of `gpu`, or of the one that the workload is on."""
    here = rules_for(reach.workload, gpu, reach)
    return CudaRules(here.gpu, torch.device("cpu", 1))


def changes_for(reach: StepReach, layout: ShardLayout | None) -> tuple[Any, ...]:
    """The contexts in which each trace of a workload is one of a rank; `layout` None: as the program says."""
    modules = [part for part in reach.parts if isinstance(part, nn.Module)]
    wrapped = [one for part in modules for one in part.modules() if is_parallel(one)]
    if layout is None:
        if not wrapped:
            raise ValueError(
                'shard must be given with ranks ("fsdp2", "ddp"), not None: the program itself shards nothing'
            )
        unique = {id(one): one for one in wrapped if isinstance(one, DistributedDataParallel)}
        shared = tuple(part for part in reach.parts if shares_state(part))
        buckets = (Buckets(tuple(unique.values())),) if unique else ()
        return (*buckets, OwnShares(shared)) if shared else buckets
    if wrapped:
        kind = type(wrapped[0]).__name__
        raise ValueError(
            f"shard must be left out, not {layout.name!r}: the program shards its model itself ({kind})"
        )
    models = tuple(
        _outermost(part for part in modules if any(one.requires_grad for one in part.parameters()))
    )
    optimizers = tuple(part for part in reach.parts if isinstance(part, torch.optim.Optimizer))
    if layout.kind == "fsdp2":
        return (FullyShard(layout, models, optimizers),)
    if layout.kind == "ddp":
        return (Buckets(models),)
    return (Buckets(models), SharedState(layout.ranks, optimizers))


def _outermost(models: Any) -> list[nn.Module]:
    """Those that are no part of another."""
    found = list(models)
    inner = {id(part) for one in found for part in one.modules() if part is not one}
    return [one for one in found if id(one) not in inner]


def caveats(reach: StepReach) -> list[str]:
    """What a trace of one rank does not show."""
    found = [
        "several ranks: traced on one process, not confirmed on GPUs; NCCL's own buffers are not "
        "counted: they lie outside the allocator"
    ]
    for part in reach.parts:
        for one in part.modules() if isinstance(part, nn.Module) else ():
            if isinstance(one, DistributedDataParallel) and ddp.has_hook(one):
                found.append(
                    "DistributedDataParallel's communication hook: not run, what it takes is missing"
                )
    return found
