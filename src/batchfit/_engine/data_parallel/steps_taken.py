"""How many optimizer steps the parameters of this rank have seen: ranks that differ are no longer alike.

Rules
- A rank that raises between backward and a plain `optimizer.step()`, and goes on with the next batch, has
  left out a step that the others took. Nothing else shows it: gradients are reduced as before, of parameters
  that differ. So ranks compare counts with each batch, and parameters where the counts differ.
- Steps of `Microbatcher.step` count once, where all ranks have taken them: what is undone is not counted.
- Counting is a hook of torch's on all optimizers, which ends with this object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakKeyDictionary, WeakMethod, finalize

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


@final
class StepsTaken:
    """The steps of all optimizers that hold one of these parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.count = 0
        self._ids = {id(one) for one in parameters}
        self._is_ours: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._paused = False
        stepped = WeakMethod(self._stepped)

        def hook(optimizer: Any, *_: Any) -> None:
            call = stepped()
            if call is not None:
                call(optimizer)

        finalize(self, register_optimizer_step_post_hook(hook).remove)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Inside, steps are attempts; all together count as one step where no error is raised."""
        self._paused = True
        try:
            yield
            self.count += 1
        finally:
            self._paused = False

    def _stepped(self, optimizer: Any) -> None:
        if self._paused:
            return
        ours = self._is_ours.get(optimizer)
        if ours is None:
            ours = any(id(one) in self._ids for group in optimizer.param_groups for one in group["params"])
            self._is_ours[optimizer] = ours
        self.count += ours


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The same for the same bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
