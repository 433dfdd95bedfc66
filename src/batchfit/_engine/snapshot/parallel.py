"""Modules under DDP or FSDP2, brought to rest after a step that was cut off.

Rules: both keep a record of the step that they are in, out of reach of any snapshot. After a step that
failed, DDP refuses the next one, and FSDP2 goes on with parameters half unsharded and gradients missing,
without a word. So the record is reset by torch's own code, and where torch has none that is an error.
Gradients that FSDP2 accumulates unsharded (`set_requires_gradient_sync(False)`) are dropped by its reset.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private import ddp, fsdp2, needs
from batchfit.errors import SnapshotError


def check(module: nn.Module, path: str) -> None:
    """Refuse a module that no step may fail in."""
    if isinstance(module, DistributedDataParallel) and module.static_graph:
        # Seen with torch 2.13: a forward that fails, and the next backward is a segmentation fault.
        raise SnapshotError(
            f"{path} is DistributedDataParallel with static_graph=True: after a step that fails in it, torch "
            "crashes. Search with static_graph=False, or with the module that it wraps."
        )


def is_parallel(module: Any) -> bool:
    """Whether a step through the module talks to other ranks, and keeps a record of that outside Python."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return isinstance(module, (DistributedDataParallel, *(kind for kind in kinds if kind is not None)))


def settle(module: nn.Module, *, cut_off: bool = True) -> None:
    """Make the module forget the step that it was in. Not `cut_off`: all steps have ended, it is at rest."""
    if not cut_off:
        return
    if isinstance(module, DistributedDataParallel):
        ddp.reset(module)
        if _lost_buckets(module):
            raise SnapshotError(
                "a step failed while DistributedDataParallel laid out its buckets, which it does in the "
                "second step, and torch cannot undo that"
            )
    elif fsdp2.is_root(module):
        _settle_sharded(module)


def arranges(module: nn.Module) -> bool:
    """Whether the module, once reset, sends something more in its second step than in the others."""
    return isinstance(module, DistributedDataParallel)


def _lost_buckets(module: Any) -> bool:
    """Whether DDP was stopped while it laid out its buckets: then it has fewer than its parameters need.

    It takes memory for them. Seen in 2.13: a backward with such a layout fails an assertion inside torch, or
    worse; and a layout that is not that of all ranks is a segmentation fault.
    """
    needed = sum(one.numel() for one in module.parameters() if one.requires_grad)
    held = ddp.bucket_elements(module)
    return held is not None and held < needed


def _settle_sharded(root: Any) -> None:
    if fsdp2.can_reset():
        fsdp2.reset(root)
    elif fsdp2.at_rest(root):
        root.reshard()
    else:
        raise SnapshotError(f"a step failed inside FSDP2. {needs.FSDP2_RESET.why()}")
