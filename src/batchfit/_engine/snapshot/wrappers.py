"""DDP and FSDP2 after a step that was cut off: the wrapper's record of that step, reset by torch's own code.

Rules: both keep a record of the step that they are in, out of reach of any snapshot. After a step that
failed, DDP refuses the next one, and FSDP2 goes on with parameters half unsharded and gradients missing,
without a word. So the record is reset by torch's own code, and where torch has none that is an error.
Gradients that FSDP2 accumulates unsharded (`set_requires_gradient_sync(False)`) are dropped by its reset.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private import ddp, fsdp2, needs
from batchfit.errors import SnapshotError


def check(module: DistributedDataParallel, path: str) -> None:
    """Refuse a module that no step may fail in."""
    if module.static_graph:
        # Seen with torch 2.13: a forward that fails, and the next backward is a segmentation fault.
        raise SnapshotError(
            f"{path} is DistributedDataParallel with static_graph=True: after a step that fails in it, torch "
            "crashes. Search with static_graph=False, or with the module that it wraps."
        )


def settle(module: nn.Module) -> None:
    """Make the module forget the step that it was in."""
    if isinstance(module, DistributedDataParallel):
        ddp.reset(module)
        if _lost_buckets(module):
            raise SnapshotError(
                "a step failed while DistributedDataParallel laid out its buckets, which it does in the "
                "second step, and torch cannot undo that"
            )
    elif fsdp2.is_root(module):
        _settle_sharded(module)


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
