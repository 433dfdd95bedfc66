"""Optimizer state made before the first step, without a step.

Rules:
- State is made by `_init_group`, which is how the steps of torch's own optimizers make it: the step then
  finds it, and ends bit for bit as it would have.
- Only where nothing comes between now and the step that would make other state: no step hook of the user's.
- What was made can be removed: the optimizer is then as it was, with the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch.optim import Optimizer

from batchfit._engine.torch_private import optimizers

# What their new state holds depends on the learning rate of the moment at which it is made.
_LR_IN_STATE: Final = (torch.optim.Rprop, torch.optim.ASGD)

Undo = Callable[[], None]


def can_make_state(optimizer: Optimizer, *, scaled: bool) -> bool:
    """Whether state made now is what the step would make; `scaled`: a scaler may skip that step.

    SGD counts: its buffers are made inside the step, but it is known how large they are.
    """
    return (
        optimizers.makes_state_in_init_group(optimizer)
        and not optimizers.has_step_hook(optimizer)
        and not (scaled and isinstance(optimizer, _LR_IN_STATE))
    )


def remembered(optimizer: Optimizer) -> Undo:
    """What takes away state and attributes that are new by then. Nothing is copied."""
    attributes = dict(vars(optimizer))
    state = {parameter: (held, dict(held)) for parameter, held in optimizer.state.items()}

    def undo() -> None:
        for parameter in [parameter for parameter in optimizer.state if parameter not in state]:
            del optimizer.state[parameter]
        for held, items in state.values():
            held.clear()
            held.update(items)
        vars(optimizer).clear()
        vars(optimizer).update(attributes)

    return undo


def undo_all(made: Iterable[Undo]) -> None:
    for undo in made:
        undo()
