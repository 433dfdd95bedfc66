"""Whether a program that trains has evaluated within its steps: then its peaks are in what was read.

Rules: a pass counts where it has no gradients and is of a module in evaluation mode that trains; what has no
parameters to train (a teacher, a reference model) is no evaluation. Passes are seen up to the second step;
from the first step on `eval()` of such a module counts, in whatever words (`train(False)`).
"""

from __future__ import annotations

import functools
from typing import Any, final

import torch
from torch import nn


@final
class EvaluationWatch:
    """`seen`: the program has evaluated."""

    def __init__(self) -> None:
        self.seen = False
        self._steps = self._inside = False
        plain = nn.Module.train

        @functools.wraps(plain)
        def watched(module: nn.Module, mode: bool = True) -> Any:
            if mode or self._inside or self.seen or not self._steps:
                return plain(module, mode)
            self.seen, self._inside = _trains(module), True  # its modules are asked in turn
            try:
                return plain(module, mode)
            finally:
                self._inside = False

        nn.Module.train = watched  # type: ignore[assignment,method-assign]

    def take_pass(self, module: nn.Module) -> None:
        """A pass of an outermost module is over."""
        if not (self.seen or module.training or torch.is_grad_enabled()):
            self.seen = _trains(module)

    def take_step(self) -> None:
        """The program has taken a step of an optimizer."""
        self._steps = True


def _trains(module: nn.Module) -> bool:
    return any(one.requires_grad for one in module.parameters())
