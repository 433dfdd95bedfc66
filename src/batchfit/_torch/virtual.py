"""A CPU that runs out of memory like a GPU: `with virtual_memory("2GiB"): ...`.

Rules that this module keeps:
- What counts is the memory of live CPU tensors: each storage once, as long as it lives, in the blocks that
  the CUDA caching allocator would take for it. What was alive at entry counts too.
- The out-of-memory error comes before the operation runs: nothing has been written, drawn or allocated.
  (`opsizes` says which few operations can only be counted after they ran.)
- The count never exceeds the limit, unless more was alive at entry or a limit was lowered below the count.
- Storages are followed by weak references; the callback only appends to a queue, so it may fire in any
  thread, at any moment, also while the ledger's lock is held.
- The end of the block undoes everything: no reference, patch or mode stays behind.
- The mode belongs to the thread that entered it. Other threads allocate uncounted.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit._decide.units import format_bytes, parse_bytes
from batchfit._torch import opsizes
from batchfit._torch.opsizes import PLANS, SIZES, block_bytes

_COMPOSITE_KEY = torch._C.DispatchKey.CompositeImplicitAutograd
_frames: Any = getattr(torch._C._dynamo, "eval_frame", None)


class _Held(weakref.ref[torch.UntypedStorage]):
    """One live storage: a weak reference that knows what it weighs."""

    __slots__ = ("address", "size")
    address: int
    size: int


class _Refused:
    """What a call answers instead of a result when its memory was not granted."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


@final
class VirtualMemory:
    """The ledger of one `virtual_memory` block; readable inside the block and after it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limits = [limit_bytes]
        self._limit = limit_bytes
        self._allocated = 0
        self._peak = 0
        self._held: dict[int, _Held] = {}  # by the address of the StorageImpl
        self._freed: deque[_Held] = deque()
        # Reentrant: a garbage collection may run a finalizer that reads us while we hold the lock.
        self._lock = threading.RLock()
        self._off = False  # in a forked child: what it allocates is not this device's

    @property
    def limit_bytes(self) -> int:
        """The limit in force now: the lowest of the nested ones."""
        return self._limit

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors now."""
        with self._lock:
            self._drain()
            return self._allocated

    @property
    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` has been since entry or `reset_peak()`."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        with self._lock:
            self._drain()
            self._peak = self._allocated

    @contextmanager
    def lowered(self, limit_bytes: int | str) -> Iterator[VirtualMemory]:
        """Inside, the limit is `limit_bytes`; it can only go down."""
        limit = parse_bytes(limit_bytes, name="limit")
        if limit > self._limit:
            raise ValueError(
                f"limit must be at most that of the enclosing virtual memory ({self._limit} bytes), "
                f"not {limit_bytes!r}"
            )
        self._limits.append(limit)
        self._limit = min(self._limits)
        try:
            yield self
        finally:
            self._limits.remove(limit)
            self._limit = min(self._limits)

    def __repr__(self) -> str:
        return (
            f"VirtualMemory({format_bytes(self.allocated_bytes)} of {format_bytes(self._limit)}, "
            f"peak {format_bytes(self._peak)})"
        )

    def _drain(self) -> None:
        """Take the storages that have died off the count. With the lock held."""
        freed = self._freed
        while freed:
            held = freed[0]
            # Looked up, not trusted: an interrupt (Ctrl-C) may have left an entry in the queue.
            if self._held.get(held.address) is held:
                self._allocated -= held.size
                del self._held[held.address]
            freed.popleft()

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        """Put a storage on the count. With the lock held."""
        held = _Held(storage, self._freed.append)
        held.address = address = storage._cdata
        held.size = size
        self._held[address] = held
        self._allocated += size
        if self._allocated > self._peak:
            self._peak = self._allocated

    def _admit(self, unknown: list[torch.UntypedStorage], asked: int) -> int:
        """0 when the bytes fit (storages not seen so far are then on the count); else the bytes wanted."""
        with self._lock:
            self._drain()
            if not unknown:
                return asked if asked and self._allocated + asked > self._limit else 0
            new = {storage._cdata: storage for storage in unknown}
            sizes = {address: block_bytes(storage.nbytes()) for address, storage in new.items()}
            wanted = asked + sum(sizes.values())
            if wanted and self._allocated + wanted > self._limit:
                return wanted
            for address, storage in new.items():
                self._hold(storage, sizes[address])
            return 0

    def _admit_result(self, result: Any, granted: int) -> int:
        """Count what a call has made: its bytes, or minus them where more than granted does not fit."""
        fresh: list[torch.UntypedStorage] = []
        with self._lock:
            self._drain()
            opsizes.unknown_storages((result,), self._held, fresh)
            if len(fresh) > 1:
                fresh = list({storage._cdata: storage for storage in fresh}.values())
            size = sum(block_bytes(storage.nbytes()) for storage in fresh)
            if size > granted and self._allocated + size > self._limit:
                return -size
            for storage in fresh:
                self._hold(storage, block_bytes(storage.nbytes()))
        return size

    def _admit_resize(self, unknown: list[torch.UntypedStorage], asked: int) -> int:
        """As `_admit`; a longer storage lives beside the one that it replaces until the data is copied."""
        wanted = self._admit(unknown, asked)
        if not wanted:
            with self._lock:
                self._peak = max(self._peak, self._allocated + asked)
        return wanted

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage anew after its length may have changed."""
        with self._lock:
            self._drain()
            held = self._held.get(storage._cdata)
            size = block_bytes(storage.nbytes())
            if held is None:
                self._hold(storage, size)
            else:
                self._allocated += size - held.size
                held.size = size

    def _count_living(self) -> None:
        """Count the tensors that are alive now. Those that only an autograd graph holds have no Python
        object to be found by: they are counted when backward first uses them."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            for thing in gc.get_objects():
                if not issubclass(type(thing), Tensor):
                    continue
                storage = opsizes.storage_of(thing)
                if storage is None:
                    continue
                gradient = thing.grad if thing.is_leaf else None
                for one in (storage, None if gradient is None else opsizes.storage_of(gradient)):
                    if one is not None and one._cdata not in self._held:
                        self._hold(one, block_bytes(one.nbytes()))

    def _close(self) -> None:
        """Let go of every storage; the last figures stay readable."""
        with self._lock:
            self._drain()
            # A weak reference that is gone never calls back.
            self._held.clear()
            self._freed.clear()

    def _error(self, wanted: int) -> torch.OutOfMemoryError:
        # Begins as the CUDA allocator's message does, for code that reads the text and not the type.
        free = max(0, self._limit - self._allocated)
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted)}. This is virtual memory on the CPU, "
            f"no GPU is involved: it has a total capacity of {format_bytes(self._limit)} of which "
            f"{format_bytes(free)} is free; live tensors hold {format_bytes(self._allocated)}. "
            "(batchfit.virtual_memory)"
        )


@final
class _CountingMode(TorchDispatchMode):
    """Sees every operation of its thread before it runs."""

    supports_higher_order_operators = True

    def __init__(self, memory: VirtualMemory) -> None:
        super().__init__()
        self.memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch then wraps our dispatch, whose frame keeps the arguments alive in the error's traceback, and
        # which imports dynamo: only where `_skipped_by_dynamo` can't do the same.
        return not (hasattr(_frames, "set_code_exec_strategy") or hasattr(_frames, "skip_code"))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if types and not all(map(opsizes.is_plain, types)):
            # A subclass's own dispatch runs first, and we see what it does with the tensors inside.
            return func(*args, **kwargs) if opsizes.tracing() else NotImplemented
        plan = PLANS.get(func) or opsizes.plan_of(func)
        if plan == opsizes.VIEW or self.memory._off:
            return func(*args, **kwargs)
        if plan == opsizes.COMPOSITE:
            with self:  # not func.decompose(): where it has a Python twin, that one rounds differently
                return func._op_dk(_COMPOSITE_KEY, *args, **kwargs)
        if plan == opsizes.NEW or plan == opsizes.NEW_BY_SHAPE:
            result = self._run_sized(func, args, kwargs, plan == opsizes.NEW_BY_SHAPE)
        else:
            result = self._run_other(plan, func, args, kwargs)
        if type(result) is _Refused:
            # The error's traceback holds this frame: it must not hold the tensors with it.
            del args, kwargs
            raise self.memory._error(result.size)
        return result

    def _run_sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_shape: bool) -> Any:
        memory = self.memory
        if memory._freed:  # a dead storage's address may be in use again
            with memory._lock:
                memory._drain()
        unknown: list[Any] = []
        parts = [func, torch.get_default_dtype()]
        try:
            opsizes.describe(parts, args, memory._held, unknown, by_shape)
            for name, value in kwargs.items():
                parts.append(name)
                opsizes.describe(parts, (value,), memory._held, unknown, by_shape)
            key = tuple(parts)
            asked = SIZES.get(key)
        except (opsizes.Unsizable, NotImplementedError, RuntimeError, TypeError, ValueError):
            return self._run_unsized(func, args, kwargs)
        proven = asked is not None
        if asked is None:
            asked = opsizes.computed_bytes(func, args, kwargs)
            if asked is None:
                opsizes.remember(key, -1)
                asked = -1
        if asked < 0:
            return self._run_unsized(func, args, kwargs)
        wanted = memory._admit(unknown, asked)
        if wanted and opsizes.tracing():
            return func(*args, **kwargs)
        if wanted:
            return _Refused(wanted)
        result = func(*args, **kwargs)
        size = memory._admit_result(result, asked)
        if size < 0:
            return _Refused(-size)
        if (not proven or size != asked) and not opsizes.tracing():
            opsizes.remember(key, size)
        return result

    def _run_other(self, plan: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan == opsizes.DATA:
            if not opsizes.depends_on_data(func, args):
                return self._run_sized(func, args, kwargs, False)
            return self._run_unsized(func, args, kwargs, opsizes.counted_bytes(func, args, kwargs) or 0)
        if plan == opsizes.RESIZE:
            return self._run_resizing(func, args, kwargs)
        if plan == opsizes.OPAQUE:
            return self._run_unsized(func, args, kwargs)
        unknown = self._unknown(args, kwargs)
        wanted = self.memory._admit(unknown, 0) if unknown else 0
        return _Refused(wanted) if wanted else func(*args, **kwargs)

    def _run_unsized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: int = 0) -> Any:
        """Run a call of which at least `asked` bytes are known, and count what it made."""
        wanted = self.memory._admit(self._unknown(args, kwargs), asked)
        if wanted:
            return _Refused(wanted)
        result = func(*args, **kwargs)
        size = self.memory._admit_result(result, asked)
        return _Refused(-size) if size < 0 else result

    def _run_resizing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = self.memory
        unknown = self._unknown(args, kwargs)
        wanted = memory._admit_resize(unknown, opsizes.computed_bytes(func, args, kwargs) or 0)
        if wanted:
            return _Refused(wanted)
        result = func(*args, **kwargs)
        for tensor in opsizes.tensors_in([*args, *kwargs.values()]):
            storage = opsizes.storage_of(tensor)
            if storage is not None:
                memory._resized(storage)
        return result

    def _unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.UntypedStorage]:
        """The storages among the arguments that are not on the count so far."""
        memory = self.memory
        if memory._freed:  # a dead storage's address may be in use again
            with memory._lock:
                memory._drain()
        unknown: list[torch.UntypedStorage] = []
        opsizes.unknown_storages(args, memory._held, unknown)
        if kwargs:
            opsizes.unknown_storages(kwargs.values(), memory._held, unknown)
        return unknown


def _skipped_by_dynamo(functions: Iterable[Any]) -> None:
    """Keep dynamo from compiling our frames where the user's are under torch.compile."""
    for code in filter(None, (getattr(function, "__code__", None) for function in functions)):
        if hasattr(_frames, "set_code_exec_strategy"):
            skip = _frames._FrameAction.SKIP
            _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
        elif hasattr(_frames, "skip_code"):
            _frames.skip_code(code)


_skipped_by_dynamo([*vars(_CountingMode).values(), *vars(VirtualMemory).values(), *vars(opsizes).values()])


class _Active(threading.local):
    memory: VirtualMemory | None = None


_active = _Active()
_patch_lock = threading.Lock()
_patches = 0


def active() -> VirtualMemory | None:
    """The virtual memory that this thread runs in, if any."""
    return _active.memory


def _forget_in_child() -> None:
    # The worker of a DataLoader forks with our mode on: on a GPU machine it would be host memory.
    if _active.memory is not None:
        _active.memory._off = True


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def _storage_resizes_counted() -> Iterator[None]:
    """`storage.resize_()`, which FSDP frees and refills parameters with, is no operation: no mode sees it."""
    global _patches
    storage_type: Any = torch.UntypedStorage
    plain = torch._C.StorageBase.resize_  # type: ignore[attr-defined]

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        memory = _active.memory
        if memory is None or memory._off or storage.device.type != "cpu":
            return plain(storage, size)
        wanted = memory._admit_resize([], block_bytes(size))
        if wanted:
            raise memory._error(wanted)
        plain(storage, size)
        memory._resized(storage)
        return storage

    with _patch_lock:
        _patches += 1
        if _patches == 1:
            storage_type.resize_ = resize_
    try:
        yield
    finally:
        with _patch_lock:
            _patches -= 1
            if _patches == 0:
                del storage_type.resize_


@contextmanager
def virtual_memory(limit: int | str) -> Iterator[VirtualMemory]:
    """Inside, the CPU is a device with `limit` bytes (`"2GiB"`): beyond it `torch.OutOfMemoryError` is raised.

    >>> with virtual_memory("64MiB") as memory:
    ...     try:
    ...         torch.randn(600_000_000)
    ...     except torch.OutOfMemoryError:
    ...         print("out of memory, as on a GPU")
    out of memory, as on a GPU

    The error comes before the operation runs. Live tensors are counted with those alive at entry;
    `memory.allocated_bytes`, `memory.peak_bytes` and `memory.reset_peak()` read the count. Nested blocks
    share one count, and an inner one can only lower the limit. Only this thread is counted.
    """
    limit_bytes = parse_bytes(limit, name="limit")
    outer = active()
    if outer is not None:
        with outer.lowered(limit_bytes):
            yield outer
        return
    memory = VirtualMemory(limit_bytes)
    memory._count_living()
    _active.memory = memory
    try:
        with _storage_resizes_counted(), _CountingMode(memory):
            yield memory
    finally:
        _active.memory = None
        memory._close()
