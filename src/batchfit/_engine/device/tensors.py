"""What a program holds: tensors and their bytes, closures, and the loss that its functions return."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from batchfit._engine.torch_private.dispatch import is_wrapper

_NUMBERS = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def tensors_in(things: Iterable[object], *, depth: int = 4) -> Iterator[torch.Tensor]:
    """Parameters, buffers and tensors of the modules, optimizers and containers among `things`."""
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, torch.nn.Module):
            yield from chain(thing.parameters(), thing.buffers())
        elif isinstance(groups := getattr(thing, "param_groups", None), list):
            yield from chain.from_iterable(group["params"] for group in groups)
        elif depth and isinstance(thing, Mapping):
            yield from tensors_in(thing.values(), depth=depth - 1)
        elif depth and isinstance(thing, list | tuple | set | frozenset):
            yield from tensors_in(thing, depth=depth - 1)


def trained_in(things: Iterable[object]) -> list[torch.Tensor]:
    """The tensors among `things` that require gradients, each once."""
    return list({id(one): one for one in tensors_in(things) if one.requires_grad}.values())


def own_bytes(things: Sequence[object], *, on: torch.device) -> int:
    """What tensors among `things`, gradients and optimizer states hold on a device, each storage once.

    Tensors that do not say (sparse gradients, lazy parameters) are left out.
    """
    moments = [list(one.state.values()) for one in things if isinstance(one, torch.optim.Optimizer)]
    held: dict[int, int] = {}
    for tensor in tensors_in((*things, moments)):
        for whole in (tensor, tensor.grad if tensor.is_leaf else None):
            for one in () if whole is None else plain_parts(whole):
                if one.device == on:
                    storage = one.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def top_holders(
    things: Sequence[object],
    *,
    on: torch.device,
    live_bytes: int | None = None,
    batch: Sequence[torch.Tensor] = (),
    most: int = 3,
) -> list[tuple[str, int]]:
    """What among `things` holds the most on a device: modules with their gradients, optimizer states.

    Alike modules are one ("layers.*.linear"); each storage counts once; the tensors of a batch are one. Of
    `live_bytes`, what is live there, the rest is a holder of its own.
    """
    counted: set[int] = set()
    held: Counter[str] = Counter()

    def count(name: str, tensors: Iterable[torch.Tensor | None]) -> None:
        for one in (part for tensor in tensors if tensor is not None for part in plain_parts(tensor)):
            storage = one.untyped_storage()
            if one.device.type == on.type and storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                held[name] += storage.nbytes()

    for thing in things:
        if isinstance(thing, nn.Module):
            for path, module in thing.named_modules():
                own = list(module.parameters(recurse=False))
                name = _NUMBERS.sub("*", path)
                name = name if name.strip("*.") else type(module).__name__
                count(name, [*own, *module.buffers(recurse=False), *(one.grad for one in own)])
        elif isinstance(thing, torch.optim.Optimizer):
            count(f"state of {type(thing).__name__}", tensors_in([list(thing.state.values())]))
    count("the batch", batch)
    if live_bytes is not None:
        held["activations and other tensors"] = max(0, live_bytes - sum(held.values()))
    return [(name, size) for name, size in held.most_common(most) if size]


def ram_bytes(things: Sequence[object]) -> int:
    """`own_bytes` in RAM."""
    return own_bytes(things, on=torch.device("cpu"))


def count_elements(state: object) -> int:
    """How many numbers a state holds: a cheap way to distinguish models."""
    return sum(tensor.numel() for tensor in {id(one): one for one in tensors_in([state])}.values())


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own under a wrapper (DTensor, quantized weights), or the tensor."""
    if is_wrapper(tensor):
        inner = (getattr(tensor, name) for name in cast("Any", tensor).__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, torch.Tensor):
                yield from plain_parts(part)
    elif tensor.layout is torch.strided and not tensor.is_nested and not is_lazy(tensor):
        yield tensor


def optimizers_in(things: Iterable[object]) -> list[Any]:
    """The optimizers among `things` that have parameters to update."""
    every = [one for one in things if isinstance(getattr(one, "param_groups", None), list)]
    return [one for one in every if any(tensor.requires_grad for tensor in tensors_in([one]))]


def leaves_of(models: Iterable[object]) -> tuple[list[torch.Tensor], list[dict[str, Any]], list[nn.Module]]:
    """The tensors that get gradients, the tables of buffers, and the modules: each once, in one walk."""
    leaves: dict[int, torch.Tensor] = {}
    tables: list[Any] = []
    modules: dict[int, nn.Module] = {}
    # Once per batch, so not through `modules()`, whose nested generators take four times as long, and with
    # one access to each module's attributes.
    for model in models:
        if isinstance(model, torch.Tensor):
            if model.requires_grad:
                leaves[id(model)] = model
            continue
        waiting: list[Any] = [model]
        while waiting:
            module = waiting.pop()
            key = id(module)
            if module is None or key in modules:
                continue
            modules[key] = module
            inside = module.__dict__
            own = inside.get("_parameters")
            if own is None:  # a scripted module keeps them elsewhere
                own, buffers, below = module._parameters, module._buffers, module._modules
            else:
                buffers, below = inside["_buffers"], inside["_modules"]
            if own:
                for parameter in own.values():
                    if parameter is not None and parameter.requires_grad:
                        leaves[id(parameter)] = parameter
            if buffers:
                tables.append(buffers)
            if below:
                waiting.extend(reversed(below.values()))
    return list(leaves.values()), tables, list(modules.values())


def closure_of(fn: Any) -> list[Any]:
    """What the cells of a function hold, in the order of its free variables; None for an empty one."""
    found = []
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            found.append(None)
    return found


def check_loss(loss: Any, name: str) -> None:
    """Refuse what the user's function `name` returned where it is no scalar tensor that requires grad."""
    check_scalar(loss, name)
    if not loss.requires_grad:
        raise without_graph(name)


def check_scalar(loss: Any, name: str) -> None:
    """Refuse a loss that is no scalar tensor; one without a graph may be that of masked samples only."""
    if not isinstance(loss, torch.Tensor):
        hint = " (return its .loss)" if isinstance(getattr(loss, "loss", None), torch.Tensor) else ""
        raise TypeError(f"{name} must return the loss as a tensor, not {type(loss).__name__}{hint}")
    if loss.numel() != 1:
        raise ValueError(f"{name} must return a scalar loss, not a tensor of shape {tuple(loss.shape)}")


def without_graph(name: str) -> ValueError:
    """The error where nothing that the user's function `name` returned has a graph."""
    return ValueError(
        f"{name} must return a loss that requires grad, not one without: is the model frozen, or the "
        "loss detached or made under torch.no_grad?"
    )


def loss_and_outputs(found: Any) -> tuple[Any, Any]:
    """What the user's function returned: its loss, and the outputs beside it (None: it returned no pair)."""
    if type(found) is tuple and len(found) == 2:
        return found
    return found, None
