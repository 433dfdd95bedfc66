"""Where autograd is: whether backward runs, which of its nodes, and who called an operation."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from types import CodeType
from typing import Any

import torch

from batchfit._engine.torch_private.lookup import lost_to_traces, needed, optional, refusing

_NUMBER = "torch._C._functions.AccumulateGrad._sequence_nr"  # as every node of torch's has it

# The number of the backward that runs in this thread; -1 outside.
graph_task: Callable[[], int] = needed("torch._C._current_graph_task_id")
# The node of backward that runs; only inside one.
current_node: Callable[[], Any] = needed("torch._C._current_autograd_node", lost_to_traces)
# The number that the next node of a forward pass gets.
next_number: Callable[[], int] = needed("torch.autograd._get_sequence_nr", lost_to_traces)
# The number of a node: that of the operation whose gradient it computes.
number_of: Callable[[Any], int] = (
    refusing(_NUMBER, lost_to_traces) if optional(_NUMBER) is None else methodcaller("_sequence_nr")
)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return graph_task() != -1


def engine_code() -> CodeType | None:
    """The code from which backward calls operations; None where it is not known."""
    return getattr(optional("torch.autograd.graph._engine_run_backward"), "__code__", None)


# Whether autograd holds a tensor for a view of another one.
is_view: Callable[[torch.Tensor], bool] = needed("torch.Tensor._is_view")


def gradient_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """What runs with the gradient of a tensor: before it is accumulated, and after."""
    before = getattr(tensor, "_backward_hooks", None)
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return list(dict(before or {}).values()), list(dict(after or {}).values())


def has_late_hooks(tensor: torch.Tensor) -> bool:
    """Whether something runs each time that a gradient was accumulated."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
