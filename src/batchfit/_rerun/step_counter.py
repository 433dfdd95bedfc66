"""Counting the steps of a program from outside, and stopping it after a few.

Rules
- A step is what an optimizer does: every optimizer of torch's is seen, in whatever loop it runs, and of
  several (a GAN's, one for each parameter) the one that has stepped most often counts. Where a probe asks for
  it, so does a forward pass without gradients of the module that made the first one (an evaluation).
- A program is stopped by an exception that `except Exception` does not catch, raised where a step has just
  ended, so that nothing is left half done. It may be caught all the same: `raised` says that it was raised.
- What is put in is taken out when the block ends. A run that is not a probe pays for one counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

# An evaluation allocates all that it will in its first batches; a few more make a longer sample likely.
FORWARDS_A_STEP = 3


@final
class EnoughSeen(BaseException):
    """Raised inside the program that is probed: it has run for long enough for `by`, who counts."""

    def __init__(self, by: Steps) -> None:
        super().__init__("the probe has seen enough (batchfit.run_largest)")
        self.by = by


@final
class Steps:
    """How far the program has come."""

    def __init__(self, limit: int | None, *, forwards: bool) -> None:
        self.count = 0
        # Whatever the program makes of it, from then on it is not what it would have been.
        self.raised = False
        self._counts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._limit = limit
        self._forwards_left = FORWARDS_A_STEP * limit if forwards and limit is not None else None
        self._root: int | None = None

    def stepped(self, optimizer: Any, *_: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        self.count = max(self.count, self._counts[optimizer])
        if self._limit is not None and self.count >= self._limit:
            self._stop()

    def begins(self, module: torch.nn.Module, _: Any) -> None:
        if self._root is None and not torch.is_grad_enabled():
            self._root = id(module)

    def ended(self, module: torch.nn.Module, *_: Any) -> None:
        if self._forwards_left is None or id(module) != self._root or torch.is_grad_enabled():
            return
        self._forwards_left -= 1
        if self._forwards_left <= 0 and self.count == 0:
            self._stop()

    def _stop(self) -> None:
        self.raised = True
        raise EnoughSeen(self)


@contextmanager
def counted(limit: int | None, *, forwards: bool) -> Iterator[Steps]:
    """Count the steps of the block; with a `limit`, raise `EnoughSeen` in it after that many."""
    steps = Steps(limit, forwards=forwards)
    hooks: list[Any] = [register_optimizer_step_post_hook(steps.stepped)]
    if limit is not None and forwards:
        hooks.append(register_module_forward_pre_hook(steps.begins))
        hooks.append(register_module_forward_hook(steps.ended))
    try:
        yield steps
    finally:
        for hook in hooks:
            hook.remove()
