"""Weights and optimizer state in 4 and 8 bits: what they are made of, as fakes.

- torchao's are tensors made of tensors: codes, scales, a table. The fake is one of the same class, made of
  fakes; its own code says what it does, and its parts are what is counted.
- bitsandbytes' weights are parameters with more beside them (`Params4bit.quant_state`, `Int8Params.SCB`, a
  layer's `MatmulLtState`): objects of its own that hold tensors, of which there are twins with fakes.

A DTensor is this rank's part of a tensor, and the way in which it is spread: its fake is one of a fake part.

Rules: the program's objects are not written into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchfit._engine.torch_private.dispatch import is_wrapper
from batchfit._engine.torch_private.fsdp2 import local_part

_LIBRARY = "bitsandbytes"
LEAST_PAGED = 1e5  # elements: bitsandbytes pages no smaller state


def is_made_of_tensors(value: object) -> bool:
    """Whether it is a tensor that holds others and no memory of its own."""
    return is_wrapper(value) and not isinstance(value, DTensor)


def kind_is_made_of_tensors(kind: type) -> bool:
    """The same of a class of tensors; a DTensor too."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(value: Any) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor, or an object of bitsandbytes, is made of."""
    if isinstance(value, DTensor):
        yield from parts_of(local_part(value))
    elif is_made_of_tensors(value):
        for name in value.__tensor_flatten__()[0]:
            yield from parts_of(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
        if holds_tensors(value):
            for one in vars(value).values():
                yield from parts_of(one)
    elif holds_tensors(value):
        for one in vars(value).values():
            yield from parts_of(one)


def rebuilt_with(value: Any, fake_of: Callable[[Tensor], Tensor]) -> Any:
    """A tensor of the same class, made of fakes."""
    names, context = value.__tensor_flatten__()
    parts = {name: fake_of(getattr(value, name)) for name in names}
    made = type(value).__tensor_unflatten__(parts, context, value.size(), value.stride())
    return made.requires_grad_(value.requires_grad) if value.is_leaf else made


def holds_tensors(value: object) -> bool:
    """Whether it is an object of bitsandbytes that may hold tensors beside a weight."""
    return type(value).__module__.partition(".")[0] == _LIBRARY and not callable(value)


def twin_of(value: Any, fake_of: Callable[[Tensor], Tensor]) -> Any:
    """A twin of such an object, with fakes in place of its tensors; of a tensor its fake."""
    if isinstance(value, Tensor):
        return fake_of(value)
    if not holds_tensors(value):
        return value
    twin = copy.copy(value)
    for name, one in vars(value).items():
        vars(twin)[name] = twin_of(one, fake_of)
    return twin


def is_paged(part: Any) -> bool:
    """Whether it is an optimizer of bitsandbytes whose state is managed memory.

    The driver moves its pages between host and GPU as they are used; torch's allocator never sees them.
    """
    return bool(getattr(part, "is_paged", False)) and hasattr(part, "get_state_buffer")


def caveats_of(part: Any) -> Iterator[str]:
    """What a trace does not know of quantised weights and states among the parts of a workload."""
    if isinstance(part, torch.optim.Optimizer):
        if type(part).__module__.startswith("torchao."):
            yield f"torchao's {type(part).__name__}: its step is compiled, and traced as if not compiled"
        return
    if not isinstance(part, nn.Module):
        return
    kinds = {type(one) for one in part.modules()}
    names = {kind.__name__ for kind in kinds if kind.__module__.startswith("bitsandbytes.nn")}
    unmeasured = sorted(names - {"Linear4bit"})
    if unmeasured:
        yield (
            f"bitsandbytes' {', '.join(unmeasured)}: their kernels' workspaces follow "
            "their source, not measured on a GPU; outlier columns of 8-bit products are not counted"
        )
    made = {type(one).__name__ for one in part.parameters() if is_made_of_tensors(one)}
    if made:
        yield f"{', '.join(sorted(made))}: traced through their own code, their kernels were not measured"
