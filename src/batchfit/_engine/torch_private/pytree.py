"""Containers of values, walked as torch walks the arguments of an operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchfit._engine.torch_private.lookup import optional


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Lists, tuples and dicts: what the arguments of operations are made of."""
    if type(values) in (list, tuple):
        return type(values)(_mapped(function, one) for one in values)
    if type(values) is dict:
        return {name: _mapped(function, one) for name, one in values.items()}
    return function(values)


# The same containers with `function` of each value in them.
tree_map: Callable[[Callable[[Any], Any], Any], Any] = optional("torch.utils._pytree.tree_map") or _mapped
