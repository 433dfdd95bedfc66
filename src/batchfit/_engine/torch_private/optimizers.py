"""torch's optimizers: how they make their state, the hooks of their steps, and which form they choose."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch.optim import Optimizer


def makes_state_in_init_group(optimizer: Optimizer) -> bool:
    """Whether its step is torch's own, and makes its state by torch's own `_init_group`."""
    kind = type(optimizer)
    made_by = getattr(kind, "_init_group", None)
    return made_by is not None and all(
        one.__module__.startswith("torch.optim.") for one in (kind.step, made_by)
    )


def can_make_state() -> bool:
    """Whether this torch's optimizers make their state where it can be asked for."""
    return hasattr(torch.optim.Adam, "_init_group")


@torch.no_grad()
def make_state(optimizer: Any) -> None:
    """Make the state of every parameter that has a gradient and no state."""
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(lists)))


def has_step_hook(optimizer: Any) -> bool:
    """Whether something of the user's runs before its step; so it is taken where that cannot be read."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return hooks is None or bool(hooks)


def chooses_foreach(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes its foreach form on a GPU of its own accord; torch's Adafactor does not."""
    return any(
        hasattr(sys.modules.get(kind.__module__), "_default_to_fused_or_foreach")
        for kind in type(optimizer).__mro__
        if kind is not Optimizer
    )
