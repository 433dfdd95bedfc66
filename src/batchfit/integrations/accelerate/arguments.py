"""What a decorated function is given and uses: Accelerators, and state that training changes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler

_LONGEST: Final = 1000  # items of a container that is searched
_MOST: Final = 20_000  # objects that are searched


def accelerators_of(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], named: Accelerator | None
) -> list[Accelerator]:
    """The Accelerator that was named, or all that the function is given or uses, directly or indirectly."""
    if named is not None:
        return [named]
    found: list[Accelerator] = []
    waiting: deque[Any] = deque([function, *args, *kwargs.values()])
    seen: dict[int, Any] = {}  # with the object, so that no other gets its id
    while waiting and len(seen) < _MOST:  # breadth first: a library's functions refer to all of the library
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        inside = _inside(one)
        if isinstance(one, Accelerator):
            found.append(one)
        elif inside is not None:
            waiting += inside
        elif inspect.ismethod(one):
            waiting += [one.__func__, one.__self__]
        elif inspect.isfunction(one):
            waiting += _used_by(inspect.unwrap(one))
        elif not isinstance(one, torch.nn.Module | torch.Tensor | type):
            waiting += [
                held for held in getattr(one, "__dict__", {}).values() if isinstance(held, Accelerator)
            ]
    return found


def _inside(value: Any) -> list[Any] | None:
    """The values in a partial, a container or a dataclass; none of long containers, which are data."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):  # dict's own methods: tables of libraries import what is read from them
        return list(dict.values(value)) if dict.__len__(value) <= _LONGEST else []
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) <= _LONGEST else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def bound_arguments(function: Any) -> list[Any]:
    """The arguments of a `functools.partial`, which are passed in like those of the call."""
    return [*function.args, *function.keywords.values()] if isinstance(function, functools.partial) else []


def _used_by(function: Any) -> list[Any]:
    """The values of a function's defaults, closure and globals; those not set yet are left out."""
    values = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # set later, or never
            continue
    names, codes = set(), [function.__code__]
    while codes:  # nested functions and comprehensions, too
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    near = [function.__globals__[name] for name in names if name in function.__globals__]
    return values + [value for value in near if _is_near(value, function.__module__)]


def _is_near(value: Any, module: str) -> bool:
    """Whether a value is no function of another module, whose variables would be a library's."""
    return not inspect.isfunction(value) or value.__module__ == module


def state_of(values: Iterable[Any]) -> list[Any]:
    """The arguments that training changes, prepared or not, also those in containers."""
    kinds = (
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
        AcceleratedScheduler,
    )
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = list(values)[::-1]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, kinds):
            found.append(one)
        else:
            waiting += (_inside(one) or [])[::-1]
    return found
