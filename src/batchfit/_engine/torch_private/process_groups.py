"""Process groups: all that there are, what each has begun, the store they share; and a fake one.

In a fake group one process pretends to be many: collectives return at once, and send nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Final

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


# -- a fake one

_BACKEND: Final = "fake"
_MODULE: Final = "torch.testing._internal.distributed.fake_pg"


def is_fake() -> bool:
    """Whether the default process group only pretends to have other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == _BACKEND


@contextlib.contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Inside, the default process group has that many ranks, and this process is one of them."""
    if not can_fake():
        raise needs.FAKE_GROUP.refusal()
    store: Any = importlib.import_module(_MODULE).FakeStore()
    dist.init_process_group(_BACKEND, rank=rank, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def can_fake() -> bool:
    """Whether this torch has such a group."""
    if not dist.is_available():
        return False
    try:
        return hasattr(importlib.import_module(_MODULE), "FakeStore")
    except ImportError:
        return False
