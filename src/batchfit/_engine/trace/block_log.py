"""The blocks of a trace: what was allocated and freed, in order, and what each block is for.

Rules: a block lives as long as its storage; storages that are distinguished by address are known while they
live, and what dies after the trace was taken is not the step's doing.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from batchfit._engine.allocator.footprint import Origin, Trace
from batchfit._engine.allocator.generation import TokenLoop, with_all_passes


@final
class Blocks:
    """Events, sizes and origins while they are written down."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._origins: list[Origin] = []
        self._events: list[int] = []
        self._step_ends: list[int] = []
        self._loops: list[TokenLoop] = []
        self._begins = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._shared: dict[int, int] = {}  # how many storages more hold a block

    def __contains__(self, tensor: Tensor) -> bool:
        return address_of(tensor) in self._known

    def see(self, tensor: Tensor, origin: Origin, size: int | None = None) -> None:
        """A tensor is there; its storage is a block from now on until it is freed."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        self._hold(storage, self.allocate(storage.nbytes() if size is None else size, origin))

    def take_over(self, tensor: Tensor, from_: Tensor) -> None:
        """A tensor is there that lies where another one does: their block is freed with the last of them."""
        block = self._known[address_of(from_)][1]
        self._shared[block] = self._shared.get(block, 0) + 1
        self._hold(tensor.untyped_storage(), block)

    def _hold(self, storage: Any, block: int) -> None:
        address = storage._cdata

        def freed(_: Any) -> None:
            if self._known.pop(address, None) is None:
                return
            others = self._shared.pop(block, 0)
            if others:
                self._shared[block] = others - 1
            else:
                self._events.append(~block)

        self._known[address] = (weakref.ref(storage, freed), block)

    def allocate(self, size: int, origin: Origin) -> int:
        """A block that no tensor holds; it stays until it is freed."""
        block = len(self._sizes)
        self._sizes.append(size)
        self._origins.append(origin)
        self._events.append(block)
        return block

    def free(self, blocks: list[int]) -> None:
        """Blocks that no tensor held are gone."""
        self._events.extend(~block for block in blocks)

    def briefly(self, sizes: tuple[int, ...], origin: Origin) -> None:
        """Blocks that are there together for a moment."""
        self.free([self.allocate(size, origin) for size in sizes][::-1])

    def mark(self, tensor: Tensor, kind: str, name: str = "") -> None:
        """Say what the block of a tensor turned out to be for. Weights stay weights."""
        entry = self._known.get(address_of(tensor))
        if entry is not None:
            block = entry[1]
            origin = self._origins[block]
            if origin.kind != "weights" and (origin.kind != kind or (name and origin.module != name)):
                self._origins[block] = replace(origin, kind=kind, module=name)

    def begin(self) -> None:
        """What was there before the first step ends here."""
        self._begins = len(self._events)

    def end_step(self) -> None:
        self._step_ends.append(self.position())

    def position(self) -> int:
        """How many events there are so far."""
        return len(self._events)

    def looped(self, loop: TokenLoop) -> None:
        """What was written down since has some passes of a loop, and stands for all of them."""
        self._loops.append(loop)

    def trace(self, size: int) -> Trace:
        found = Trace(
            size,
            tuple(self._sizes),
            tuple(self._origins),
            tuple(self._events),
            self._begins,
            tuple(self._step_ends),
        )
        self._known.clear()
        return (with_all_passes(found, self._loops) if self._loops else found).ordered()


def address_of(tensor: Tensor) -> int:
    """Which storage it is, fake ones too."""
    return int(tensor.untyped_storage()._cdata)
