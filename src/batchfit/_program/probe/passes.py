"""Forward passes of the outermost modules: their number, their batch, and where a generation begins.

Rules: torch's global hooks see every module, so they are there only as long as they are needed: until the
second optimizer step. In a program that only evaluates they stay. A token of a `generate` loop is no step:
a pass that goes on with the batch before it (one token more, or one token with a cache) belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@final
class PassCounter:
    """Counts passes; `on_pass` is called after each with whether it begins a step of an evaluation."""

    def __init__(self, on_first: Callable[[], None], on_pass: Callable[[bool], None]) -> None:
        self.count = 0
        self.samples = 0  # the most samples that a pass had
        self.with_gradients = 0
        self._depth = 0
        self._shape: tuple[int, ...] = ()
        self._prompt = 0  # how long the sequence of the generation's first pass is
        self._on_first, self._on_pass = on_first, on_pass
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def stop(self) -> None:
        """Take the hooks away: from now on a module's call costs what it always does."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._depth = 0

    def _before(self, module: Any, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self.count == 0:
            self._on_first()

    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._depth = 0
        self.count += 1
        self.with_gradients += torch.is_grad_enabled()
        shape = next(_shapes((args, kwargs)), ())
        if shape:
            self.samples = max(self.samples, shape[0])
        begins = not self._goes_on(shape)
        self._shape = shape
        if begins and len(shape) > 1:
            self._prompt = shape[1]
        self._on_pass(begins)

    def _goes_on(self, shape: tuple[int, ...]) -> bool:
        """Whether this pass makes the next token of the pass before it."""
        before = self._shape
        if len(shape) < 2 or len(before) != len(shape) or shape[0] != before[0]:
            return False
        return shape[1] == before[1] + 1 or (shape[1] == 1 and self._prompt > 1)


def _shapes(value: Any, depth: int = 3) -> Iterator[tuple[int, ...]]:
    """The shapes of the tensors in there, the first ones first."""
    if isinstance(value, Tensor):
        if value.dim():
            yield tuple(value.shape)
    elif depth and isinstance(value, Mapping):
        for one in value.values():
            yield from _shapes(one, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for one in value:
            yield from _shapes(one, depth - 1)
