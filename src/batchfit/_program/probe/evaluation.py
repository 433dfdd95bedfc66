"""Whether a program that trains has evaluated within its steps: then its peaks are in what was read.

Rules: a pass counts where it has no gradients and is of a module in evaluation mode that trains; what has no
parameters to train (a teacher, a reference model) is no evaluation. Passes are seen up to the second step;
from the first step on `eval()` of such a module counts, which costs a step nothing.
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
        self._steps = False
        plain = nn.Module.eval

        @functools.wraps(plain)
        def watched(module: nn.Module) -> Any:
            self.seen = self.seen or (self._steps and _trains(module))
            return plain(module)

        nn.Module.eval = watched  # type: ignore[assignment,method-assign]

    def take_pass(self, module: nn.Module) -> None:
        """A pass of an outermost module is over."""
        if not (self.seen or module.training or torch.is_grad_enabled()):
            self.seen = _trains(module)

    def take_step(self) -> None:
        """The program has taken a step of an optimizer."""
        self._steps = True


def _trains(module: nn.Module) -> bool:
    return any(one.requires_grad for one in module.parameters())
