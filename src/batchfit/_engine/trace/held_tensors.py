"""The tensors that are on the device before the first step: weights, gradients, optimizer state, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private.fsdp2 import is_sharded
from batchfit._engine.trace.quantised import parts_of


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
