"""The memory of tensors: by address, by weak references, and by how many hold it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from batchfit._engine.torch_private.dispatch import modes_disabled
from batchfit._engine.torch_private.lookup import attribute, needed, optional

# Which storage it is: the same number for all that stand for one, and for no other that lives.
storage_address: Callable[[Any], int] = attribute(torch.UntypedStorage, "_cdata")

_of_address: Callable[[int], torch.UntypedStorage | None] = needed("torch.UntypedStorage._new_with_weak_ptr")
_use_count: Callable[[Tensor], int] | None = optional("torch.Tensor._use_count")
_storage_use_count: Callable[[int], int] | None = optional("torch._C._storage_Use_Count")


def address_of(tensor: Tensor) -> int:
    """Which storage a tensor looks into, fake ones too."""
    return storage_address(tensor.untyped_storage())


def use_counts(tensor: Tensor) -> tuple[int, int] | None:
    """How often a tensor is held, and its storage; None where torch does not say."""
    if _use_count is None or _storage_use_count is None:
        return None
    storage = tensor.untyped_storage()
    return _use_count(tensor), _storage_use_count(storage_address(storage))


@functools.cache
def wrapper_outlives_memory() -> bool:
    """Whether torch's own weak reference keeps the Python object of a dead storage: torch 2.6 does.

    Who counts storages by these objects would then count freed memory.
    """
    with modes_disabled(), torch.inference_mode(False):
        tensor = torch.empty(8, dtype=torch.uint8, device="cpu")
        wrapper, torchs_own = weakref.ref(tensor.untyped_storage()), _torchs_weak(tensor.untyped_storage())
        del tensor  # the last that holds the memory: its Python object should go with it
        gone = wrapper() is None
        del torchs_own
    return not gone


def _torchs_weak(storage: torch.UntypedStorage) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    make: Any = StorageWeakRef  # has no annotations
    return make(storage)


@final
class WeakStorage:
    """Remembers a storage and does not keep it alive."""

    __slots__ = ("_torchs", "_wrapper")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        plain = wrapper_outlives_memory()
        self._wrapper = weakref.ref(storage) if plain else None
        self._torchs: Any = None if plain else _torchs_weak(storage)

    def live(self) -> torch.UntypedStorage | None:
        """The storage, if somebody still has it."""
        return _of_address(self._torchs.cdata) if self._wrapper is None else self._wrapper()

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor` looks into this storage."""
        if self._wrapper is None:
            return bool(address_of(tensor) == self._torchs.cdata)
        return self._wrapper() is tensor.untyped_storage()
