"""Collectives in a trace: where torch has no fake kernel of them (before 2.13), what a fake group returns.

A collective writes into a tensor that it is given, and allocates nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from batchfit._engine.torch_private.dispatch import has_fake_kernel
from batchfit._engine.torch_private.fake import unset_fake_temporarily


def _into_one(op: Any, output: torch.Tensor, given: torch.Tensor, group: Any, *rest: Any) -> Any:
    """An all-gather or reduce-scatter into one tensor; the fake group's own handle comes along."""
    least = max(min(output.numel(), given.numel()), 1)
    sizes = output.numel() // least, given.numel() // least
    with unset_fake_temporarily():
        _, work = op(*map(torch.empty, sizes), group, *rest)
    return output, work


def _in_place(op: Any, tensors: Any, group: Any, *rest: Any) -> Any:
    """A collective that changes the tensors that it is given."""
    with unset_fake_temporarily():
        _, work = op([torch.empty(1)], group, *rest)
    return tensors, work


def stand_ins() -> dict[Any, Callable[..., Any]]:
    """By operation; empty where torch has fake kernels of its own."""
    kinds: dict[str, Callable[..., Any]] = {
        "_allgather_base_": _into_one,
        "_reduce_scatter_base_": _into_one,
        "allreduce_": _in_place,
        "broadcast_": _in_place,
    }
    found: dict[Any, Callable[..., Any]] = {}
    for name, kind in kinds.items():
        packet: Any = getattr(torch.ops.c10d, name, None)
        if packet is not None and not has_fake_kernel(packet.default):
            found[packet.default] = partial(kind, packet.default)
    return found
