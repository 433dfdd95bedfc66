"""Finds the models, optimizers and tensors that a step uses, from its functions' variables and objects.

Modules and optimizers that nobody declared (a frozen teacher) are found where the step finds them: in what
its functions close over, in globals that they name, on the object whose method they are.
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from batchfit._engine.snapshot.contents import is_array, is_installed, is_own, items_of, tables_of
from batchfit._engine.torch_private.autograd import gradient_hooks
from batchfit.workload import Workload

_PARTS = (
    nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)
_CONTAINERS = (list, dict, set, deque)
_SMALL_BYTES = 2**24
_SEARCHED = 4  # how deep a step's surroundings are searched for these
_FEW = 64  # a longer list is data
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL")


@final
class NameBinding(NamedTuple):
    """A name that a function uses, by which a program may hold a tensor: of an outer function or a module."""

    holder: CellType | dict[str, Any]
    name: str = ""

    def held(self) -> Any:
        """What is there; `UNBOUND` where nothing is."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, UNBOUND)
        try:
            return self.holder.cell_contents
        except ValueError:
            return UNBOUND

    def put(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            if value is UNBOUND:
                self.holder.pop(self.name, None)
            else:
                self.holder[self.name] = value
        elif value is not UNBOUND:
            self.holder.cell_contents = value
        elif self.held() is not UNBOUND:
            del self.holder.cell_contents


UNBOUND: Any = object()


@final
class Reached(NamedTuple):
    """What a function can reach."""

    parts: list[Any]  # of a training program
    containers: list[Any]  # what else holds things there: lists, tables, objects of the program's own
    places: list[NameBinding]


@final
@dataclass(frozen=True, slots=True)
class StepReach:
    """What the step of a workload can reach; walked once, and passed on to all who ask."""

    workload: Workload
    parts: tuple[Any, ...]  # its declared state, and what its functions close over
    parts_of_hooks: tuple[Any, ...]  # what else the hooks on its parameters reach
    containers: tuple[Any, ...]
    places: tuple[NameBinding, ...]


def reach_of(workload: Workload) -> StepReach:
    """Walk what the step of a workload can reach, and what the hooks on its parameters can."""
    by_step = reached(workload.step)
    given = (*workload.state, workload.model, workload.optimizer, *by_step.parts)
    parts = {id(part): part for whole in given for part in _with_inner(whole) if part is not None}
    more = [reached(hook) for hook in hooks_of(list(parts.values()))]
    hooked = {id(part): part for one in more for part in one.parts if id(part) not in parts}
    return StepReach(
        workload,
        tuple(parts.values()),
        tuple(hooked.values()),
        tuple(held for one in (by_step, *more) for held in one.containers),
        tuple(place for one in (by_step, *more) for place in one.places),
    )


def _with_inner(part: Any) -> Iterator[Any]:
    """A part, and the optimizers inside an optimizer (SAM, Lookahead)."""
    yield part
    if isinstance(part, torch.optim.Optimizer):
        for value in vars(part).values():
            if isinstance(value, torch.optim.Optimizer) and value is not part:
                yield from _with_inner(value)


def reached(step: Any) -> Reached:
    """What a function can reach, its own and its helpers'."""
    found: dict[int, Any] = {}
    containers: list[Any] = []
    places: list[NameBinding] = []
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, _PARTS):
            found.setdefault(id(value), value)
            return
        if depth > _SEARCHED or id(value) in seen:
            return
        seen.add(id(value))
        if _keeps_things(value):
            containers.append(value)
        if isinstance(value, FunctionType):
            places.extend(_places_of(value))
        for one in _reached_from(value, depth):
            visit(one, depth + 1)

    visit(step, 0)
    return Reached(list(found.values()), containers, places)


def _keeps_things(value: Any) -> bool:
    if isinstance(value, (*_CONTAINERS, functools._lru_cache_wrapper)):
        return True
    if is_array(value):  # a larger one is data, which a trace does not copy
        return bool(value.nbytes <= _SMALL_BYTES)
    if is_own(value):
        return bool(tables_of(value))
    # A library's object that moves its tables to the device when it is first used: a noise schedule.
    tables = [] if isinstance(value, Tensor | ModuleType) else tables_of(value)
    return any(isinstance(one, Tensor) for table in tables for one in table.values())


def _places_of(function: FunctionType) -> Iterator[NameBinding]:
    yield from (NameBinding(cell) for cell in function.__closure__ or ())
    if not is_installed(function.__module__):
        yield from (NameBinding(function.__globals__, name) for name in _globals_in(function.__code__))


def _reached_from(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from (held for place in _places_of(value) if (held := place.held()) is not UNBOUND)
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield value.__wrapped__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, list | tuple):
        yield from (items_of(value) if isinstance(value, list) else value)[:_FEW]
    elif isinstance(value, dict):
        yield from (one for _, one in items_of(value)[:_FEW])
    if not isinstance(value, type | Tensor | FunctionType) and not is_installed(type(value).__module__):
        for table in tables_of(value):
            yield from list(table.values())
        if depth == 0 and callable(value):
            yield type(value).__call__


def hooks_of(parts: list[Any]) -> list[Any]:
    """What a program has hung on its parameters: an optimizer that steps in backward."""
    tensors = (one for part in parts if isinstance(part, nn.Module) for one in part.parameters())
    tables = (table for one in tensors for table in gradient_hooks(one))
    return list({id(hook): hook for table in tables for hook in table}.values())


def kept_by_classes(kind: type) -> Iterator[Any]:
    """What the program's own classes keep for all their instances: tables of masks, cached functions."""
    for one in kind.__mro__:
        if is_installed(one.__module__):
            continue
        for value in vars(one).values():
            inner = getattr(value, "__func__", value)  # of a static method
            used = [inner]
            if isinstance(inner, FunctionType):
                used = [inner.__globals__.get(name) for name in _globals_in(inner.__code__)]
            yield from (held for held in used if isinstance(held, functools._lru_cache_wrapper))
            if isinstance(value, _CONTAINERS):
                yield value


@functools.lru_cache(maxsize=1024)
def _globals_in(code: CodeType) -> tuple[str, ...]:
    """The names that a function asks for beyond its own, its inner functions' too."""
    own = tuple(one.argval for one in dis.get_instructions(code) if one.opname in _GLOBAL)
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return (*own, *(name for one in inner for name in _globals_in(one)))
