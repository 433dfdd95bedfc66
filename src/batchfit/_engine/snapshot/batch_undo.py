"""What is restored before a batch is retried: gradients, random numbers, buffers, the scaler.

Rules
- A retried pass begins where the first one began; a call that fails leaves all of this as it was. Nothing
  here synchronizes with the device.
- Gradients that were there before are set aside and new ones start from None, so that a pass is undone
  without a copy. At the end the new ones are added to the old ones, in place. Cost: while a batch runs on
  top of gradients of an earlier one, both exist; with none before (`zero_grad()`), there is no cost.
- Buffers are copied into twins on their own device, which stay allocated; a restored table of buffers holds
  the very tensors it had. Cost: the size of the buffers, and one grouped copy per batch.
- All global generators are covered (`rng`), and those that a module keeps, that the user's function can
  reach by name (`rng.generators_held`), or that were declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, final

import torch

from batchfit._engine.snapshot import rng
from batchfit._engine.torch_private import foreach, optimizers


@final
class Buffers:
    """The buffers of some modules, and their twins."""

    __slots__ = ("_groups", "_tables", "_tensors", "_twins", "busy")

    def __init__(self) -> None:
        self.busy = False  # a call may still restore what it copied: another one needs twins of its own
        self._tables: list[tuple[Any, dict[str, Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._twins: list[torch.Tensor] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def take(self, tables: Iterable[dict[str, Any]]) -> None:
        """Copy the buffers in these tables as they are now."""
        self._tables = [(table, dict(table)) for table in tables if table]
        tensors = [
            value
            for _, held in self._tables
            for value in held.values()
            if isinstance(value, torch.Tensor) and _can_change(value)
        ]
        same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        # Not in inference mode, where `map` takes them: no later call could write into such twins.
        with torch.inference_mode(mode=False), torch.no_grad():
            if not same:
                self._tensors, self._twins, self._groups = [], [], []
                twins = [tensor.detach().clone() for tensor in tensors]
                self._twins, self._groups = twins, _grouped(tensors, twins)
            else:
                for live, twins in self._groups:
                    foreach.copy_(twins, live)
        self._tensors = tensors

    def restore(self) -> None:
        """Bind the tensors again, and write their copied values into them."""
        for table, held in self._tables:
            if not isinstance(table, dict):  # a scripted module's cannot be rebound
                continue
            if len(table) != len(held) or any(table.get(name) is not held[name] for name in held):
                table.clear()
                table.update(held)
        with torch.no_grad():
            for live, twins in self._groups:
                foreach.copy_(live, twins)

    def forget(self) -> None:
        """Keep nothing of the modules but the twins until the next `take`."""
        self._tables = []


def _can_change(tensor: torch.Tensor) -> bool:
    """Whether a step can write into it at all (torch refuses to write into the others)."""
    if tensor.is_meta or tensor.is_inference() or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return all(stride or extent < 2 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))


def _grouped(
    tensors: Sequence[torch.Tensor], twins: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """By device and type: torch copies such lists in one call."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor, twin in zip(tensors, twins, strict=True):
        live, copies = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        live.append(tensor)
        copies.append(twin)
    return list(groups.values())


@final
class BatchUndo:
    """Undoes what passes over one batch have changed.

    buffers.take(tables)
    with BatchUndo(leaves, buffers=buffers, scaler=scaler) as undo:
        ...               # a pass
        undo.restore()    # as if it had not run
        ...               # another one
        undo.keep()       # its gradients are added to those that were there

    Leaving the block without `keep` restores everything, gradients too.
    """

    __slots__ = ("_buffers", "_kept", "_own", "_scaler", "_scaler_state", "_undos", "leaves", "old")

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        buffers: Buffers,
        scaler: Any = None,
        generators: Sequence[object] = (),
        more: Sequence[rng.Undo] = (),
    ) -> None:
        self.leaves = leaves
        self._buffers = buffers
        self._scaler = scaler
        self._own = generators
        self._undos = [*self.random_states(), *more]
        self._scaler_state = optimizers.scaler_attributes(scaler)
        self.old: list[torch.Tensor | None] = []
        self._kept = False

    def random_states(self) -> list[rng.Undo]:
        """All generators as they are now, global ones and the user's: each as a function that restores it."""
        states = [undo for _, undo in rng.global_states()]
        own = [rng.undo_generator(generator) for generator in self._own]
        return [*states, *(undo for undo in own if undo is not None)]

    def __enter__(self) -> BatchUndo:
        self._buffers.busy = True
        self.old = [leaf.grad for leaf in self.leaves]
        for leaf, old in zip(self.leaves, self.old, strict=True):
            if old is not None:
                leaf.grad = None
        return self

    def restore(self, *, gradients: bool = True) -> None:
        """Restore the state in which the call began. Frees first, then copies; allocates nothing."""
        if gradients:
            for leaf in self.leaves:
                leaf.grad = None
        self._buffers.restore()
        for undo in self._undos:
            undo()
        if self._scaler_state is not None:
            for name, value in self._scaler_state.items():
                setattr(self._scaler, name, value)

    def restore_buffers(self) -> None:
        """Restore the buffers alone: a second forward of the same samples must not update them twice."""
        self._buffers.restore()

    def keep(self, *, instead: Sequence[int] = ()) -> None:
        """The pass stands: new gradients are added to old ones, or replace those numbered `instead`."""
        if any(old is not None for old in self.old):
            self._merge(set(instead))
        self._kept = True

    def _merge(self, instead: set[int]) -> None:
        old_grads, new_grads = [], []
        replaced: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        sums: list[tuple[torch.Tensor, torch.Tensor]] = []
        waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for at, (leaf, old) in enumerate(zip(self.leaves, self.old, strict=True)):
                new = leaf.grad
                if old is None:
                    continue
                waiting.append((leaf, old))
                if new is None:
                    continue
                if at in instead:
                    replaced[0].append(old)
                    replaced[1].append(new)
                    continue
                if old.layout is torch.strided and new.layout is torch.strided and not old.requires_grad:
                    old_grads.append(old)
                    new_grads.append(new)
                else:  # sparse: the sum allocates, so it is made before anything is changed
                    sums.append((leaf, old + new))
            if old_grads:
                foreach.add_(old_grads, new_grads)
            if instead:
                foreach.copy_(*replaced)
        # From here on nothing can fail.
        self._kept = True
        for leaf, old in waiting:
            leaf.grad = old
        for leaf, total in sums:
            leaf.grad = total

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if not self._kept:
                for leaf, old in zip(self.leaves, self.old, strict=True):
                    leaf.grad = old
                if not _is_dead(error):
                    self.restore(gradients=False)
        finally:
            self._buffers.busy = False
            self._buffers.forget()
            self.old = []


def _is_dead(error: BaseException | None) -> bool:
    from batchfit._engine.device import oom

    return error is not None and oom.classify(error) == "fatal"
