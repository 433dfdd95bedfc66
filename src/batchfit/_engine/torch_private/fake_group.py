"""A process group of many ranks in one process: collectives return at once, and send nothing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist

from batchfit._engine.torch_private import needs

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
