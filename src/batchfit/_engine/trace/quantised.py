"""Weights and optimizer state in 4 and 8 bits: what they are made of, as fakes.

- torchao's are tensors made of tensors: codes, scales, a table. The fake is one of the same class, made of
  fakes; its own code says what it does, and its parts are what is counted.
- bitsandbytes' weights are parameters with more beside them (`Params4bit.quant_state`, `Int8Params.SCB`, a
  layer's `MatmulLtState`): objects of its own that hold tensors, of which there are twins with fakes.

A DTensor is this rank's part of a tensor, and the way in which it is spread: its fake is one of a fake part.

Rules:
- The program's objects are not written into.
- torchao updates one parameter after the other, in a hundred operations each. Of a parameter that is like
  one before it (shapes, dtypes, numbers) only the highest moment is written down again, and its update does
  not run: the rest is what the first one did. An update that leaves a block behind, or frees one that was
  there, is never repeated.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchfit._engine.cuda_model.dispatch import replaced
from batchfit._engine.torch_private.dispatch import is_wrapper, unseen
from batchfit._engine.torch_private.fake import FakeTensor, device_of
from batchfit._engine.torch_private.fsdp2 import local_part

if TYPE_CHECKING:
    from batchfit._engine.allocator.footprint import Origin
    from batchfit._engine.trace.blocks import Blocks

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


@contextlib.contextmanager
def like_updates_repeated(log: Blocks, adopt: Callable[[list[Tensor]], object]) -> Iterator[None]:
    """Inside, torchao's update of a parameter that is like one before it is written down without running.

    `adopt` sees tensors of the host that stand for the device, so that no update is the first to see them.
    """
    module: Any = sys.modules.get("torchao.optim.adam")
    name = "single_param_adam"
    own = getattr(module, name, None)
    if own is None:
        yield
        return
    known: dict[Any, _Update | None] = {}

    def update(*args: Any) -> None:
        with unseen():
            adopt([one for value in args for one in parts_of(value) if one.dim()])
        key = _form_of(args)
        done = None if key is None else known.get(key)
        if done is not None:
            _repeat(log, done)
            return
        begins = log.position()
        own(*args)
        if key is not None and key not in known:
            known[key] = _update_since(log, begins)

    with replaced(module, name, update):
        yield


_Update = list[tuple[int, "Origin"]]  # the blocks of its highest moment, in order: bytes, where from


def _update_since(log: Blocks, begins: int) -> _Update | None:
    """The highest moment of what was written down since; None where not all of it is gone, or more is.

    What an update frees before and takes after that moment lies in memory that the first one has reserved.
    """
    found = log.written(0, 0, ())
    events = found.events[begins:]
    if {one for one in events if one >= 0} != {~one for one in events if one < 0}:
        return None
    living: dict[int, int] = {}
    highest: list[int] = []
    now = most = 0
    for event in events:
        if event >= 0:
            living[event] = found.sizes[event]
            now += living[event]
        else:
            now -= living.pop(~event)
        if now > most:
            most, highest = now, list(living)
    return [(found.sizes[block], found.origins[block]) for block in highest]


def _repeat(log: Blocks, update: _Update) -> None:
    log.free([log.allocate(size, origin) for size, origin in update][::-1])


def _form_of(value: Any) -> Any:
    """All that decides what an update of these arguments allocates; None where that is not known."""
    if isinstance(value, tuple | list):
        forms = tuple(_form_of(one) for one in value)
        return None if None in forms else forms
    if not isinstance(value, Tensor):
        return type(value).__name__, value
    if is_made_of_tensors(value):
        names, context = value.__tensor_flatten__()
        parts = _form_of([getattr(value, name) for name in names])
        return None if parts is None else (type(value), str(context), parts)
    if type(value) not in (FakeTensor, Tensor):
        return None
    device = device_of(value) if type(value) is FakeTensor else value.device
    return value.shape, value.stride(), value.dtype, device, value.storage_offset(), value.requires_grad


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
