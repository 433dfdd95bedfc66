"""Which storages are alive, and how many bytes each takes.

Rules that this module keeps:
- A storage counts once, as long as it lives, with the block that the CUDA caching allocator would take.
- It is followed by a weak reference. The callback only appends to a queue, so it may fire in any thread, at
  any moment, also while the lock is held; whoever reads the count drains the queue first.
- The count never exceeds the limit, unless more was alive at entry or the limit was lowered below the count.
- An interrupt between two lines leaves the count right.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from batchfit._engine.torch_private.dispatch import plain_functions
from batchfit._engine.torch_private.storage import storage_address
from batchfit._engine.virtual_memory import op_sizes
from batchfit._engine.virtual_memory.history import active_history
from batchfit._engine.virtual_memory.op_sizes import block_bytes
from batchfit._units import format_bytes


class LiveStorage(weakref.ref[torch.UntypedStorage]):
    """One live storage: a weak reference that knows what it weighs."""

    __slots__ = ("address", "size")
    address: int
    size: int


@final
class Ledger:
    """The count of live bytes under a limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.allocated = 0
        self.peak = 0
        self.held: dict[int, LiveStorage] = {}  # by the address of the StorageImpl
        self.freed: deque[LiveStorage] = deque()
        # Reentrant: a garbage collection may run a finalizer that reads us while we hold the lock.
        self.lock = threading.RLock()
        self.off = False  # in a forked child: what it allocates is not this device's
        self.history = active_history()  # None unless it was asked for
        self.on_refused: Callable[[torch.OutOfMemoryError], None] | None = None

    def drain(self) -> None:
        """Take the storages that have died off the count. With the lock held."""
        freed = self.freed
        while freed:
            held = freed[0]
            # An entry weighs nothing once it is off the count, so that it may be met twice: after Ctrl-C, or
            # when a garbage collection in here runs a finalizer that drains. No call stands between these
            # lines, and the interpreter does neither except around calls.
            size = held.size
            held.size = 0
            self.allocated -= size
            if self.held.get(held.address) is held:
                self.held.pop(held.address, None)
                if self.history is not None:
                    self.history.freed(held.address)
            if freed and freed[0] is held:
                freed.popleft()

    def hold(self, storage: torch.UntypedStorage, size: int) -> None:
        """Put a storage on the count. With the lock held."""
        held = LiveStorage(storage, self.freed.append)
        held.address = address = storage_address(storage)
        held.size = size
        self.held[address] = held
        self.allocated += size
        if self.allocated > self.peak:
            self.peak = self.allocated
        if self.history is not None:
            self.history.held(address, size)

    def admit(self, unknown: list[torch.UntypedStorage], asked: int) -> int:
        """0 when the bytes fit (storages not seen so far are then on the count); else the bytes wanted."""
        with self.lock:
            if self.freed:
                self.drain()
            if not unknown:
                return asked if asked and self.allocated + asked > self.limit else 0
            new = {storage_address(storage): storage for storage in unknown}
            sizes = {address: block_bytes(storage.nbytes()) for address, storage in new.items()}
            wanted = asked + sum(sizes.values())
            if wanted and self.allocated + wanted > self.limit:
                return wanted
            for address, storage in new.items():
                self.hold(storage, sizes[address])
            return 0

    def admit_result(self, result: Any, granted: int) -> int:
        """Count what a call has made: its bytes, or minus them where more than granted does not fit."""
        fresh: list[torch.UntypedStorage] = []
        with self.lock:
            if self.freed:
                self.drain()
            op_sizes.unknown_storages((result,), self.held, fresh)
            if len(fresh) == 1:
                sizes = [block_bytes(fresh[0].nbytes())]
            else:
                fresh = list({storage_address(storage): storage for storage in fresh}.values())
                sizes = [block_bytes(storage.nbytes()) for storage in fresh]
            size = sum(sizes)
            if size > granted and self.allocated + size > self.limit:
                return -size
            for storage, block in zip(fresh, sizes, strict=True):
                self.hold(storage, block)
        return size

    def admit_resize(self, unknown: list[torch.UntypedStorage], asked: int) -> int:
        """As `admit`; a longer storage lives beside the one that it replaces until the data is copied."""
        wanted = self.admit(unknown, asked)
        if not wanted:
            with self.lock:
                self.peak = max(self.peak, self.allocated + asked)
        return wanted

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage again after its length may have changed."""
        with self.lock:
            self.drain()
            held = self.held.get(storage_address(storage))
            size = block_bytes(storage.nbytes())
            if held is None:
                self.hold(storage, size)
            else:
                self.allocated += size - held.size
                held.size = size
                if self.history is not None:
                    self.history.freed(held.address)
                    self.history.held(held.address, size)

    def count_living(self) -> None:
        """Count the tensors that are alive now. Those that only an autograd graph holds have no Python
        object to be found by: they are counted when backward first uses them."""
        with self.lock, plain_functions():
            for thing in gc.get_objects():
                if not issubclass(type(thing), Tensor):
                    continue
                storage = op_sizes.storage_of(thing)
                if storage is None:
                    continue
                gradient = thing.grad if thing.is_leaf else None
                for one in (storage, None if gradient is None else op_sizes.storage_of(gradient)):
                    if one is not None and storage_address(one) not in self.held:
                        self.hold(one, block_bytes(one.nbytes()))

    def close(self) -> None:
        """Let go of every storage; the last figures stay readable."""
        with self.lock:
            self.drain()
            # A weak reference that is gone never calls back.
            self.held.clear()
            self.freed.clear()

    def error(self, wanted: int) -> torch.OutOfMemoryError:
        # Begins as the CUDA allocator's message does, for code that reads the text and not the type.
        free = max(0, self.limit - self.allocated)
        if self.history is not None:
            self.history.refused(wanted, free)
        error = torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted)}. This is virtual memory on the "
            f"CPU, no GPU is involved: it has a total capacity of {format_bytes(self.limit)} of which "
            f"{format_bytes(free)} is free; live tensors hold {format_bytes(self.allocated)}. "
            "(batchfit.virtual_memory)"
        )
        if self.on_refused is not None:
            self.on_refused(error)
        return error
