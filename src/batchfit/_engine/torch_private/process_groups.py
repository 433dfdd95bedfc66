"""Process groups: all that there are, how many collectives each has begun, and the store they share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from batchfit._engine.torch_private import needs


def counts() -> dict[str, int]:
    """How many collectives each process group of this process has begun, by its name."""
    return {group.group_name: _count(group) for group in _all()}


def names() -> set[str]:
    """The names of all process groups of this process."""
    return {group.group_name for group in _all()}


def can_count() -> bool:
    """Whether groups and their counters can be read."""
    c10d = getattr(dist, "distributed_c10d", None)
    listed = hasattr(getattr(c10d, "_world", None), "pg_map")
    return listed and hasattr(dist.ProcessGroup, "_get_sequence_number_for_group")


def default_store() -> Any:
    """The key-value store of the default group; None where it has none."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get is None:
        raise needs.GROUP_STORE.refusal()
    return get()


def can_reach_store() -> bool:
    """Whether the store can be reached."""
    return hasattr(getattr(dist, "distributed_c10d", None), "_get_default_store")


def wait(tensor: torch.Tensor) -> None:
    """Until a functional collective that made this tensor has ended."""
    torch.ops._c10d_functional.wait_tensor(tensor)


def name_of(value: torch.ScriptObject) -> str | None:
    """The name of the group that an operation was given; None where it is no group, "" where it has none."""
    kind = getattr(value, "_type", None)
    if kind is None or "ProcessGroup" not in str(kind()):
        return None
    unbox = getattr(dist.ProcessGroup, "unbox", None)
    return "" if unbox is None else str(unbox(value).group_name)


def _all() -> list[Any]:
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)
    if groups is None:
        raise needs.GROUP_COUNTERS.refusal()
    return list(groups)


def _count(group: Any) -> int:
    count = getattr(group, "_get_sequence_number_for_group", None)
    if count is None:
        raise needs.GROUP_COUNTERS.refusal()
    return int(count())
