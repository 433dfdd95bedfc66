"""`with virtual_memory("2GiB"): ...`: a CPU that is out of memory as a GPU would be.

Rules that this module keeps:
- What counts is the memory of live CPU tensors, those alive at entry included (`ledger` keeps the count).
- The out-of-memory error comes before the operation runs: nothing has been written, drawn or allocated.
  (`op_sizes` says which few operations can only be counted after they ran.)
- The end of the block undoes everything: no reference, patch or mode stays behind.
- The mode belongs to the thread that entered it. Other threads allocate uncounted; they may free.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from batchfit._engine.torch_private import dynamo
from batchfit._engine.torch_private.dispatch import (
    COMPOSITE,
    TorchDispatchMode,
    current_mode,
    is_composite,
    kernel_of,
    tracing,
)
from batchfit._engine.torch_private.storage import storage_address
from batchfit._engine.virtual_memory import op_sizes
from batchfit._engine.virtual_memory.history import StorageHistory
from batchfit._engine.virtual_memory.ledger import Ledger
from batchfit._engine.virtual_memory.op_sizes import PLANS, SIZES, block_bytes
from batchfit._units import format_bytes, parse_bytes


class _Refused:
    """What a call answers instead of a result when its memory was not granted."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


@final
class VirtualMemory:
    """The count of one `virtual_memory` block; readable inside the block and after it.

    Args:
        limit_bytes: bytes that live tensors may take.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._ledger = Ledger(limit_bytes)
        self._limits = [limit_bytes]

    @property
    def limit_bytes(self) -> int:
        """The limit in force now: the lowest of the nested ones."""
        return self._ledger.limit

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors now."""
        with self._ledger.lock:
            self._ledger.drain()
            return self._ledger.allocated

    @property
    def peak_bytes(self) -> int:
        """The most that `allocated_bytes` has been since entry or `reset_peak()`."""
        return self._ledger.peak

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        with self._ledger.lock:
            self._ledger.drain()
            self._ledger.peak = self._ledger.allocated

    def on_refused(self, call: Callable[[torch.OutOfMemoryError], None]) -> None:
        """Have `call` called with each error, before it is raised.

        Args:
            call: gets the `torch.OutOfMemoryError`.
        """
        self._ledger.on_refused = call

    @contextmanager
    def lowered(self, limit_bytes: int | str) -> Iterator[VirtualMemory]:
        """Inside, the limit is `limit_bytes`; it can only go down.

        Args:
            limit_bytes: the lower limit, in bytes or as text ("1GiB").

        Yields:
            This count.

        Raises:
            ValueError: the limit is above the one in force.
        """
        limit = parse_bytes(limit_bytes, name="limit")
        if limit > self._ledger.limit:
            raise ValueError(
                f"limit must be at most that of the enclosing virtual memory ({self._ledger.limit} bytes), "
                f"not {limit_bytes!r}"
            )
        self._limits.append(limit)
        self._ledger.limit = min(self._limits)
        try:
            yield self
        finally:
            self._limits.remove(limit)
            self._ledger.limit = min(self._limits)

    def __repr__(self) -> str:
        return (
            f"VirtualMemory({format_bytes(self.allocated_bytes)} of {format_bytes(self.limit_bytes)}, "
            f"peak {format_bytes(self.peak_bytes)})"
        )


@final
class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of its thread before it runs."""

    supports_higher_order_operators = True

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch then wraps our dispatch, whose frame keeps the arguments alive in the error's traceback, and
        # which imports dynamo: only where `dynamo.skip` can't do the same.
        return not dynamo.SKIPS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if types and not all(map(op_sizes.is_plain, types)):
            # A subclass's own dispatch runs first, and we see what it does with the tensors inside.
            return func(*args, **kwargs) if tracing() else NotImplemented
        plan = PLANS.get(id(func)) or op_sizes.plan_of(func)
        if plan == op_sizes.VIEW or self.ledger.off:
            return func(*args, **kwargs)
        if plan == op_sizes.COMPOSITE:
            with self:  # not func.decompose(): where it has a Python twin, that one rounds differently
                return kernel_of(func)(COMPOSITE, *args, **kwargs)
        if plan == op_sizes.NEW or plan == op_sizes.NEW_BY_SHAPE:
            result = self._run_sized(func, args, kwargs, plan == op_sizes.NEW_BY_SHAPE)
        else:
            result = self._run_other(plan, func, args, kwargs)
        if type(result) is _Refused:
            # The error's traceback holds this frame: it must not hold the tensors with it.
            del args, kwargs
            raise self.ledger.error(result.size)
        return result

    def _run_sized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_shape: bool) -> Any:
        ledger = self.ledger
        if ledger.freed:  # a dead storage's address may be in use again
            with ledger.lock:
                ledger.drain()
        unknown: list[Any] = []
        parts: list[Any] = [id(func), torch.get_default_dtype()]
        try:
            op_sizes.describe(parts, args, ledger.held, unknown, by_shape)
            for name, value in kwargs.items():
                parts.append(name)
                op_sizes.describe(parts, (value,), ledger.held, unknown, by_shape)
            key = tuple(parts)
            asked = SIZES.get(key)
        except (op_sizes.Unsizable, NotImplementedError, RuntimeError, TypeError, ValueError):
            return self._run_unsized(func, args, kwargs)
        proven = asked is not None
        if asked is None:
            asked = op_sizes.computed_bytes(func, args, kwargs)
            if asked is None:
                op_sizes.remember(key, -1)
                asked = -1
        if asked < 0:
            return self._run_unsized(func, args, kwargs)
        wanted = ledger.admit(unknown, asked)
        if wanted and tracing():
            return func(*args, **kwargs)
        if wanted:
            return _Refused(wanted)
        result = func(*args, **kwargs)
        size = ledger.admit_result(result, asked)
        if size < 0:
            return _Refused(-size)
        if (not proven or size != asked) and not tracing():
            op_sizes.remember(key, size)
        return result

    def _run_other(self, plan: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan == op_sizes.DATA:
            if not op_sizes.depends_on_data(func, args):
                return self._run_sized(func, args, kwargs, False)
            return self._run_unsized(func, args, kwargs, op_sizes.counted_bytes(func, args, kwargs) or 0)
        if plan == op_sizes.RESIZE:
            return self._run_resizing(func, args, kwargs)
        if plan == op_sizes.OPAQUE:
            return self._run_unsized(func, args, kwargs)
        unknown = self._unknown(args, kwargs)
        wanted = self.ledger.admit(unknown, 0) if unknown else 0
        return _Refused(wanted) if wanted else func(*args, **kwargs)

    def _run_unsized(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: int = 0) -> Any:
        """Run a call of which at least `asked` bytes are known, and count what it made."""
        wanted = self.ledger.admit(self._unknown(args, kwargs), asked)
        if wanted:
            return _Refused(wanted)
        result = func(*args, **kwargs)
        size = self.ledger.admit_result(result, asked)
        return _Refused(-size) if size < 0 else result

    def _run_resizing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ledger = self.ledger
        unknown = self._unknown(args, kwargs)
        wanted = ledger.admit_resize(unknown, op_sizes.computed_bytes(func, args, kwargs) or 0)
        if wanted:
            return _Refused(wanted)
        result = func(*args, **kwargs)
        for tensor in op_sizes.tensors_in([*args, *kwargs.values()]):
            storage = op_sizes.storage_of(tensor)
            if storage is not None:
                ledger.resized(storage)
        return result

    def _unknown(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.UntypedStorage]:
        """The storages among the arguments that are not on the count so far."""
        ledger = self.ledger
        if ledger.freed:  # a dead storage's address may be in use again
            with ledger.lock:
                ledger.drain()
        unknown: list[torch.UntypedStorage] = []
        op_sizes.unknown_storages(args, ledger.held, unknown)
        if kwargs:
            op_sizes.unknown_storages(kwargs.values(), ledger.held, unknown)
        return unknown


dynamo.skip(
    [*vars(_CountingMode).values(), *vars(Ledger).values(), *vars(op_sizes).values(), tracing, is_composite]
)


class _Active(threading.local):
    memory: VirtualMemory | None = None


_active = _Active()
_patch_lock = threading.Lock()
_patches = 0


def active() -> VirtualMemory | None:
    """The virtual memory that this thread runs in, if any."""
    return _active.memory


def record_in(memory: VirtualMemory, history: StorageHistory | None) -> None:
    """Record what a virtual memory allocates from now on; with None no more."""
    ledger = memory._ledger
    with ledger.lock:
        ledger.drain()
        ledger.history = history
        if history is not None:
            for address, held in ledger.held.items():
                history.held_before(address, held.size)


def is_innermost() -> bool:
    """Whether this thread's virtual memory can be left now: no other dispatch mode was entered after it."""
    return isinstance(current_mode(), _CountingMode)


def _forget_in_child() -> None:
    # The worker of a DataLoader forks with our mode on: on a GPU machine it would be host memory.
    if _active.memory is not None:
        _active.memory._ledger.off = True


os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def _storage_resizes_counted() -> Iterator[None]:
    """`storage.resize_()`, which FSDP frees and refills parameters with, is no operation: no mode sees it."""
    global _patches
    storage_type: Any = torch.UntypedStorage
    plain = storage_type.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        ledger = None if _active.memory is None else _active.memory._ledger
        if ledger is None or ledger.off or storage_address(storage) not in ledger.held:
            return plain(storage, size)
        wanted = ledger.admit_resize([], block_bytes(size))
        if wanted:
            raise ledger.error(wanted)
        plain(storage, size)
        ledger.resized(storage)
        return storage

    with _patch_lock:  # one patch for all threads: it asks for the memory of the thread that calls
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
    """Inside, the CPU is a device with `limit` bytes (`"2GiB"`) that raises `torch.OutOfMemoryError` beyond.

    Examples:
        >>> with virtual_memory("64MiB") as memory:
        ...     try:
        ...         torch.randn(600_000_000)
        ...     except torch.OutOfMemoryError:
        ...         print("out of memory, as on a GPU")
        out of memory, as on a GPU

    The error comes before the operation runs. Live tensors are counted with those alive at entry;
    `memory.allocated_bytes`, `memory.peak_bytes` and `memory.reset_peak()` read the count. Nested blocks
    share one count, and an inner one can only lower the limit. Only this thread is counted.

    Args:
        limit: bytes that live tensors may take, or text ("2GiB").

    Yields:
        The count, with `allocated_bytes`, `peak_bytes` and `reset_peak()`.
    """
    limit_bytes = parse_bytes(limit, name="limit")
    outer = active()
    if outer is not None:
        with outer.lowered(limit_bytes):
            yield outer
        return
    memory = VirtualMemory(limit_bytes)
    memory._ledger.count_living()
    _active.memory = memory
    try:
        with eagerly(), _storage_resizes_counted(), _CountingMode(memory._ledger):
            yield memory
    finally:
        _active.memory = None
        memory._ledger.close()


@contextmanager
def eagerly() -> Iterator[None]:
    """Inside, compiled functions run as they were written; afterwards they compile as if never called.

    dynamo gives up for good on a function that it first meets under a dispatch mode (ours count memory, FLOPs
    or a trace): every later call, outside too, would run eagerly without a warning.
    """
    if not dynamo.is_loaded():  # nothing is compiled
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings(  # their complaint is about our hooks
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        yield
