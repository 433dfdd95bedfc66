"""What a running program keeps: its models and optimizers, and where else their parameters are held.

Rules: a program does not declare these, so Python's garbage collector is asked for them, once. Only what has
a parameter among its own items is looked into: lists of parameters to clip, tables by parameter, closures.
"""

from __future__ import annotations

import gc
from collections import deque
from types import CellType
from typing import Any, NamedTuple

import torch
from torch import nn

from batchfit._engine.torch_private.modules import datasets_of_iterators
from batchfit._engine.workload.reachable import NameBinding

_PARTS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_CONTAINERS = (list, dict, set, deque)


class ProgramState(NamedTuple):
    """The state of a program, as a trace asks for it."""

    parts: list[Any]
    containers: list[Any]
    places: list[NameBinding]


def program_state() -> ProgramState:
    """All of it that lives in this process."""
    found = gc.get_objects()
    modules = [one for one in found if issubclass(type(one), nn.Module)]
    parts = [one for one in found if issubclass(type(one), _PARTS)]
    del found
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [one for one in modules if id(one) not in inner]
    parameters = {
        id(one): one for module in modules for one in module._parameters.values() if one is not None
    }
    known = {id(module._parameters) for module in modules} | {id(parameters)}
    for optimizer in parts:
        for group in getattr(optimizer, "param_groups", ()):
            known |= {id(group), id(group["params"])}
            parameters |= {id(one): one for one in group["params"]}
        known.add(id(getattr(optimizer, "state", None)))
    listed = list(parameters.values())
    known |= {id(listed), id(parts), id(modules), id(roots)}
    holders = [one for one in gc.get_referrers(*listed) if id(one) not in known] if listed else []
    containers = [one for one in holders if type(one) in _CONTAINERS]
    places = [NameBinding(one) for one in holders if type(one) is CellType]
    return ProgramState([*roots, *parts], containers, places)


def optimizers() -> list[Any]:
    """The optimizers that the program has made, wrappers of them included."""
    return [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]


def dataset_samples() -> int | None:
    """How many samples the largest dataset has that a loader of the program reads; None without one."""
    found = gc.get_objects()
    loaders = [one for one in found if issubclass(type(one), torch.utils.data.DataLoader)]
    datasets = [*(one.dataset for one in loaders), *datasets_of_iterators(found)]
    return max((len(one) for one in datasets if hasattr(type(one), "__len__")), default=None)
