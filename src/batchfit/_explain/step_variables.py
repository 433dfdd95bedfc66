"""The variables that a step closes over, and what it does with them in a trace.

Rules: a variable is changed for the time of a trace only; noting what a step does changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any, final

import torch
from torch import Tensor, nn

from batchfit._engine.batch.structure import children, rebuilt
from batchfit._engine.torch_private.replaced import replaced
from batchfit.workload import Workload


@final
class StepTraits:
    """Notes whether a traced step runs under autocast, how long its sequences are, and which modules' outputs
    need gradients (`learning`, by their id). Changes nothing.
    """

    def __init__(self) -> None:
        self.autocast = False
        self.length = 0
        self.learning: set[int] = set()

    @contextlib.contextmanager
    def __call__(self, workload: Workload, faked: Any) -> Iterator[None]:
        entered = torch.autocast.__enter__

        def enter(context: Any) -> Any:
            self.autocast = self.autocast or bool(context._enabled)
            return entered(context)  # type: ignore[no-untyped-call]

        def ran(module: nn.Module, _: Any, output: Any) -> None:
            if any(leaf.requires_grad for leaf in _leaves(output)):
                self.learning.add(id(module))

        with (
            nn.modules.module.register_module_forward_hook(ran),
            replaced(torch.autocast, "__enter__", enter),
            changed_variable(workload, "source", lambda source: lambda size: self._seen(source(size))),
        ):
            yield

    def _seen(self, batch: Any) -> Any:
        lengths = [leaf.shape[1] for leaf in _leaves(batch) if _is_tokens(leaf)]
        self.length = max([self.length, *lengths])
        return batch


def step_variable(workload: Workload, name: str) -> CellType | None:
    """The variable of that name that the step of `training` or `inference` closes over, or what it runs for
    each of its batches.
    """
    step = workload.step
    if workload.kind == "step" or not isinstance(step, FunctionType):
        return None
    variables = _closed_over(step)
    each = variables.get("run")  # `each_batch`
    if name not in variables and each is not None:
        variables = _closed_over(each.cell_contents)
    return variables.get(name)


def _closed_over(function: FunctionType) -> dict[str, CellType]:
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


@contextlib.contextmanager
def changed_variable(workload: Workload, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """The step's variable with another value inside; nothing happens where it has no such variable."""
    cell = step_variable(workload, name)
    if cell is None:
        yield
        return
    before = cell.cell_contents
    cell.cell_contents = change(before)
    try:
        yield
    finally:
        cell.cell_contents = before


def _is_tokens(leaf: Tensor) -> bool:
    return leaf.dim() == 2 and not leaf.is_floating_point() and leaf.dtype is not torch.bool


def _leaves(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
        return
    for _, value in children(node) or ():
        yield from _leaves(value)


def mapped(node: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with `function` done to each of its tensors; tensors that were one stay one."""
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, Tensor):
            if id(node) not in done:
                done[id(node)] = (node, function(node))
            return done[id(node)][1]
        items = children(node)
        return node if items is None else rebuilt(node, [walk(value) for _, value in items])

    return walk(node)
