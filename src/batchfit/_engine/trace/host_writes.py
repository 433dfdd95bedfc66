"""Tensors of the program on the host that a traced step really writes into, restored after the trace."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from batchfit._engine.snapshot.undo import UndoStack
from batchfit._engine.trace.block_log import address_of


@final
class HostWrites:
    """Memory that is about to be written into, as it was: in the order in which that happened."""

    def __init__(self) -> None:
        self._known: dict[int, torch.UntypedStorage] = {}  # by address; kept, so that no other gets it
        self._undo = UndoStack()

    def __contains__(self, address: int) -> bool:
        return address in self._known

    def note(self, tensor: Tensor) -> None:
        """Remember what is in the memory of `tensor`, and which of it the tensor looks at."""
        storage = tensor.untyped_storage()
        self._known[address_of(tensor)] = storage
        before = _bytes_of(storage).clone()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()

        def restore() -> None:
            with torch.no_grad():
                if storage.nbytes() != before.numel():
                    storage.resize_(before.numel())
                _bytes_of(storage).copy_(before)
                now = tensor.storage_offset(), tensor.shape, tensor.stride()
                if now != place or address_of(tensor) != int(storage._cdata):
                    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)

        self._undo.push("a tensor on the host", restore)

    def restore(self) -> None:
        """All tensors as they were before the first write."""
        self._undo.run()
        self._known.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
