"""Does the Microbatcher know every tensor that gets a gradient?

Rules
- What it does not know cannot be restored after an OOM: gradients of the microbatches that
  had run would count twice. So it is an error, raised before the first backward, not after the first failure.
- The graph of the loss is walked once for each function and number of parameters, not once a batch.
- A parameter counts always; a plain tensor only where `fn` holds it, for one that `fn` makes itself (a
  gradient penalty's inputs) starts again in each call. A graph that hides its inputs (reentrant activation
  checkpointing) shows none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import nn

from batchfit._engine.device.tensors import closure_of

_MOST_FUNCTIONS = 64
_MOST_NAMED = 3


@final
class Coverage:
    """Which functions have been checked."""

    def __init__(self) -> None:
        self.known: set[Hashable] = set()

    def check(
        self,
        losses: Iterable[torch.Tensor],
        *,
        key: Hashable,
        leaves: Sequence[torch.Tensor],
        fns: Sequence[Any],
    ) -> None:
        """Refuse losses of `fns` (`key`) that would leave gradients in other tensors than `leaves`."""
        given = {id(leaf) for leaf in leaves}
        missing = [leaf for leaf in _leaves(losses) if id(leaf) not in given]
        if missing:
            _refuse(missing, fns)
        if len(self.known) >= _MOST_FUNCTIONS:
            self.known.clear()
        self.known.add(key)


def modules_held(fns: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules that these functions can reach by name."""
    for fn in fns:
        for _, value in _held(fn):
            if isinstance(value, nn.Module):
                yield value


def _leaves(losses: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a backward would leave a gradient in."""
    waiting: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen, found = set(waiting), []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return found


def _refuse(missing: list[torch.Tensor], fns: Sequence[Any]) -> None:
    names: dict[int, str] = {}
    owners: dict[int, str] = {}
    for name, value in (pair for fn in fns for pair in _held(fn)):
        if isinstance(value, torch.Tensor):
            names.setdefault(id(value), name)
            owners.setdefault(id(value), name)
        elif isinstance(value, nn.Module):
            for path, parameter in value.named_parameters():
                names.setdefault(id(parameter), f"{name}.{path}")
                owners.setdefault(id(parameter), name)
    left_out = [leaf for leaf in missing if isinstance(leaf, nn.Parameter) or id(leaf) in names]
    if not left_out:
        return
    shown = ", ".join(
        f"{names.get(id(leaf), 'a parameter')} of shape {tuple(leaf.shape)}"
        for leaf in left_out[:_MOST_NAMED]
    )
    more = f" and {len(left_out) - _MOST_NAMED} more" if len(left_out) > _MOST_NAMED else ""
    unowned = any(id(leaf) not in owners for leaf in left_out)
    to_pass = list(dict.fromkeys(owners[id(leaf)] for leaf in left_out if id(leaf) in owners))
    advice = f"Microbatcher(..., {', '.join(to_pass)})" if to_pass and not unowned else "their modules too"
    raise ValueError(
        f"models must hold all that gets gradients in fn, not leave out {shown}{more}: their gradients could "
        f"not be restored after an OOM and would count twice. Pass {advice}, or freeze them"
    )


def _held(fn: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a function can reach by name: its closure, globals that it reads, attributes of its object."""
    if isinstance(fn, functools.partial):
        yield from _held(fn.func, depth)
        for value in (*fn.args, *fn.keywords.values()):
            yield from _opened(type(value).__name__.lower(), value, depth)
        return
    owner = getattr(fn, "__self__", None)
    if owner is not None:
        yield from _opened("self", owner, depth)
    if isinstance(fn, nn.Module):
        yield type(fn).__name__.lower(), fn
    elif not hasattr(fn, "__code__") and hasattr(fn, "__dict__"):
        yield from _opened(type(fn).__name__.lower(), fn, depth)
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None:
        return
    for name, value in zip(code.co_freevars, closure_of(fn), strict=False):
        yield from _opened(name, value, depth)
    table = getattr(fn, "__globals__", {})
    for name in code.co_names:
        if name in table:
            yield from _opened(name, table[name], depth)


def _opened(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The value, and what it holds directly."""
    yield name, value
    if isinstance(value, nn.Module | torch.Tensor | type) or depth:
        return
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{index}]", one) for index, one in enumerate(value))
    elif callable(value):
        yield from _held(value, depth + 1)
    elif hasattr(value, "__dict__"):
        yield from ((f"{name}.{key}", one) for key, one in vars(value).items())
