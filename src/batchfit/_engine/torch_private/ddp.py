"""DistributedDataParallel: its reducer, its hooks, and the record of the step that it is in.

Rules: what a model has been asked for (a hook, a join, delayed parameters) is read or refused: where it is
overlooked, ranks send what others do not wait for.
"""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private import needs
from batchfit.errors import SnapshotError

# What a model has had since it was made.
_STATE: Final = ("_comm_hooks", "_delay_all_reduce_params", "_has_rebuilt_buckets", "_join_config")


def check(model: DistributedDataParallel) -> None:
    """Refuse a model of a torch that keeps these elsewhere."""
    known = all(name in vars(model) for name in _STATE) and hasattr(model._join_config, "enable")
    if not (known and hasattr(model.reducer, "_rebuild_buckets")):
        raise needs.DDP_STATE.refusal()


def reset(model: DistributedDataParallel) -> None:
    """Back to rest after a step that failed."""
    forget = getattr(model.reducer, "_reset_state", None)
    if forget is None or not hasattr(model.reducer, "_get_zeros_like_grad_buckets"):
        raise needs.DDP_RESET.refusal(SnapshotError)
    forget()


def bucket_elements(model: DistributedDataParallel) -> int | None:
    """How many elements its buckets hold; None where there is no memory to look."""
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:
        return None
    return sum(bucket.buffer().numel() for bucket in buckets)


def delays(model: DistributedDataParallel) -> bool:
    """Whether some parameters are reduced inside backward (`delay_all_reduce_named_params`)."""
    return bool(model._delay_all_reduce_params)


def has_hook(model: DistributedDataParallel) -> bool:
    """Whether a communication hook is registered."""
    return bool(model._comm_hooks)


def sends_buffers(model: DistributedDataParallel) -> bool:
    """Whether each forward begins with rank 0's buffers for all."""
    return bool(getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", True)))


def is_joining(model: DistributedDataParallel) -> bool:
    """Whether it is inside `join()`."""
    return bool(model._join_config.enable)


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Whether its buckets were rebuilt, which is a collective in a forward."""
    return bool(model._has_rebuilt_buckets)


def rebuild_buckets(model: DistributedDataParallel) -> None:
    """What the next forward would do, if it is due."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


def reduced_parameters(model: DistributedDataParallel) -> int | None:
    """How many parameters it has reduced since it was made; None where it does not say."""
    logging_data: Any = getattr(model, "_get_ddp_logging_data", None)
    found = None if logging_data is None else logging_data().get("num_parameter_tensors")
    return None if found is None else int(found)


def can_reset() -> bool:
    """Whether this torch's reducer can be reset."""
    kind = getattr(dist, "Reducer", None)
    return hasattr(kind, "_reset_state") and hasattr(kind, "_get_zeros_like_grad_buckets")


def missing() -> list[str]:
    """What is read here, and DistributedDataParallel of this torch nowhere uses."""
    codes = [
        one.__code__
        for kind in DistributedDataParallel.__mro__
        for one in vars(kind).values()
        if hasattr(one, "__code__")
    ]
    used = {name for code in codes for name in code.co_names}
    rebuilds = hasattr(getattr(dist, "Reducer", None), "_rebuild_buckets")
    return [*(name for name in _STATE if name not in used), *([] if rebuilds else ["_rebuild_buckets"])]
