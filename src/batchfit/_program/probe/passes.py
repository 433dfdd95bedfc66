"""Forward passes of the outermost modules: their number, their batch, and where a generation begins.

Rules:
- torch's global hooks see every module, so they are there only as long as they are needed: until the second
  optimizer step. In a program that only evaluates they stay.
- What has no weights (a loss, a transform of the data) makes no pass, and nothing does in a loader's worker.
- What backward runs again (activation checkpointing) is no pass.
- A token of a `generate` loop is no step: a pass that goes on with the batch before it (one token more, or
  one token with a cache) belongs to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from batchfit._engine.device.tensors import tensors_in
from batchfit._engine.torch_private.autograd import in_backward
from batchfit._engine.torch_private.modules import remove_keyword_hook
from batchfit._program.probe.evaluation import EvaluationWatch

_WEIGHTS = 10_000  # numbers in a buffer, of quantized modules that have no parameters


@final
class PassCounter:
    """Counts passes.

    `before_pass` is called with the module and its arguments; `on_pass` after it, with whether it begins a
    step of an evaluation.
    """

    def __init__(self, before_pass: Callable[[Any, Any], None], on_pass: Callable[[bool], None]) -> None:
        self.count = 0
        self.samples = 0  # the most samples that a pass had, since the one before `forget`
        self.elements = 0  # the most numbers that a pass was given, since then
        self._last = 0, 0  # samples and numbers of the last pass
        self._root: nn.Module | None = None  # the outermost module, while it runs
        self._depth = 0  # how often it was called within itself
        self._shape: tuple[int, ...] = ()
        self._prompt = 0  # how long the sequence of the generation's first pass is
        self.evaluation = EvaluationWatch()
        self._before_pass, self._on_pass = before_pass, on_pass
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def stop(self) -> None:
        """Take the hooks away: from now on a module's call costs what it always does."""
        for handle in self._handles:
            remove_keyword_hook(handle)
        self._handles = []
        self._root = None

    def forget(self) -> None:
        """What passes had before the last one counts no more: it may have been an evaluation before training.

        The last one is of the step that has ended, and may be larger than the next: the dataset's rest.
        """
        self.samples, self.elements = self._last

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._root is None:
            if has_weights(module) and not in_loader_worker() and not in_backward():
                self._root, self._depth = module, 1
                self._before_pass(module, args)
        elif module is self._root:
            self._depth += 1

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        # After a pass that raises, torch calls it without the keywords.
        if module is not self._root:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._root = None
        self.count += 1
        self.evaluation.take_pass(module)
        tensors = [one for one in tensors_in((args, kwargs)) if one.dim()]
        shape = tuple(tensors[0].shape) if tensors else ()
        if shape:
            self._last = shape[0], sum(one.numel() for one in tensors)
            self.samples, self.elements = map(max, (self.samples, self.elements), self._last)
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


def has_weights(module: nn.Module) -> bool:
    """Whether it computes with weights of its own."""
    if next(module.parameters(), None) is not None:
        return True
    return any(one.numel() >= _WEIGHTS for one in module.buffers())


def in_loader_worker() -> bool:
    data: Any = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
