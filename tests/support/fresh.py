"""A module of `torch_private` as it would be beside a torch that lacks some names."""

from __future__ import annotations

import importlib.util
import operator
from types import ModuleType

import pytest
import torch

import batchfit._engine.torch_private as package


def without(patch: pytest.MonkeyPatch, module: str, *names: str) -> ModuleType:
    """The module loaded anew, where torch has none of these names ("torch._C._current_graph_task_id").

    The one that everybody uses stays what it is.
    """
    for name in names:
        owner, _, last = name.removeprefix("torch.").rpartition(".")
        place = operator.attrgetter(owner)(torch) if owner else torch
        if last in vars(place):
            patch.delattr(place, last)
        else:  # of a base class in C, from which nothing can be taken
            patch.setattr(place, last, None)
    spec = importlib.util.find_spec(f"{package.__name__}.{module}")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
