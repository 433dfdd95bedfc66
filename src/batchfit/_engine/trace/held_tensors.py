"""What is on the device before the first step: weights, gradients, optimizer state, and their parts.

Some are made of several tensors, of which there are fakes:
- torchao's weights and states in 4 and 8 bits: codes, scales, a table. The fake is one of the same class,
  made of fakes; its own code says what it does, and its parts are what is counted.
- bitsandbytes' weights are parameters with more beside them (`Params4bit.quant_state`, `Int8Params.SCB`, a
  layer's `MatmulLtState`): objects of its own that hold tensors, of which there are twins with fakes.
- A DTensor is this rank's part of a tensor, and the way in which it is spread: its fake has a fake part.

Rules: the program's objects are not written into.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private.dispatch import is_wrapper
from batchfit._engine.torch_private.fsdp2 import is_sharded, local_part

_LIBRARY = "bitsandbytes"
LEAST_PAGED = 1e5  # elements: bitsandbytes pages no smaller state


@final
class HeldTensors:
    """What is on `device` before the first step, by name and kind, and which of it learns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: list[tuple[str, Tensor, str]] = []
        self._learning: dict[int, Tensor] = {}
        self._spread: dict[int, str] = {}  # names of parameters that are spread over ranks, by id

    def add(self, name: str, tensor: Tensor, kind: str) -> None:
        """One tensor more; what is elsewhere (shards that FSDP2 keeps on the host) is not counted."""
        if tensor.device == self._device:
            self._entries.append((name, tensor, kind))

    def learns(self, name: str, parameter: Tensor) -> None:
        """It gets gradients."""
        self._learning[id(parameter)] = parameter
        if isinstance(parameter, DTensor):
            self._spread[id(parameter)] = name

    def exchange(self, name: str, before: Tensor, after: Tensor) -> None:
        """A parameter was spread over ranks: from now on this rank has a part of it, and no gradient."""
        self._entries = [one for one in self._entries if one[1] is not before]
        for part in parts_of(after):
            self.add(name, part, "weights")
        if self._learning.pop(id(before), None) is not None:
            self.learns(name, after)

    def entries(self) -> Iterator[tuple[str, Tensor, str]]:
        """Name, tensor, kind of each."""
        for name, tensor, kind in self._entries:
            # Asked for here and not kept, so that an old gradient goes when the step lets it go.
            if tensor.is_leaf and tensor.grad is not None:
                yield name, tensor.grad, "gradients"
            yield name, tensor, kind

    def parameters(self) -> list[Tensor]:
        """What learns."""
        return list(self._learning.values())

    def names_of_spread(self) -> dict[int, str]:
        """The names of parameters that are spread over ranks, by their ids."""
        return dict(self._spread)

    def clear(self) -> None:
        """Only the program holds them from now on."""
        self._entries.clear()


def put_gradient(real: Tensor, before: Tensor | None) -> None:
    """The gradient as it was, if the step reached the tensor by a way of its own and took it."""
    if real.grad is not before:
        real.grad = before


def can_fake_ranks(module: nn.Module) -> bool:
    """Whether a step with it can be traced under a process group that only pretends to have other ranks."""
    return is_sharded(module) or isinstance(module, DistributedDataParallel)


def clear_if_filled(cached: Any, misses: int) -> None:
    """Forget what a cache was given in a trace: fakes; what it held before is made again when asked for."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def on_host(tensor: Tensor) -> bool:
    """Counters and learning rates: torch keeps them on the CPU, beside parameters on a GPU."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def dense_bytes(tensor: Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


# -- tensors that are made of tensors


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
