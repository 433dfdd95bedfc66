"""How to test code that uses batchfit, and code that must survive an OOM.

    from batchfit.testing import virtual_memory, fail_at, faulty, FakeDevice, simulated_oom

- `virtual_memory("64MiB")`: a CPU that raises OOMs like a GPU.
- `fail_at(7)`: the eighth torch operation raises an OOM, whatever it is. With `count_operations()` a
  loop can place the fault at every point of a program, one after the other.
- `faulty(step, {3: "oom"})`: a step that fails in the calls that you name.
- `FakeDevice("1GiB", peak=...)`: a device without hardware and without tensors, to search on.
- `simulated_oom("cudnn")`: the exception that such a failure raises, to try a handler of your own.

Rules: no clock and no randomness, so that a failure is reproducible; what a block patches, its end restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch

from batchfit._engine.device.device import Peaks, check_budget
from batchfit._engine.torch_private.dispatch import TorchDispatchMode
from batchfit._engine.virtual_memory.memory import virtual_memory
from batchfit._units import format_bytes, parse_bytes

__all__ = [
    "FakeDevice",
    "FaultSchedule",
    "Operations",
    "count_operations",
    "fail_at",
    "faulty",
    "simulated_oom",
    "virtual_memory",
]

# What to raise: "oom", "error", "interrupt", a kind of `simulated_oom`, an exception, or what makes one.
Fault = str | BaseException | Callable[[], BaseException]

_OOM_TEXTS: dict[str, tuple[str, str]] = {
    "cuda": ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full."),
    "cuda_api": ("AcceleratorError", "CUDA error: out of memory"),
    "cublas": ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "triton": ("RuntimeError", "Triton Error [CUDA]: out of memory"),
    "hip": ("OutOfMemoryError", "HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 is full."),
    "xpu": ("OutOfMemoryError", "XPU out of memory. Tried to allocate 2.00 GiB. GPU 0 is full."),
    "mps": ("RuntimeError", "MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.07 GiB)."),
    "cpu": (
        "RuntimeError",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes.",
    ),
    "python": ("MemoryError", ""),
}


def simulated_oom(kind: str = "cuda") -> Exception:
    """The exception that an OOM raises: its type and its text.

    Examples:
        >>> "out of memory" in str(simulated_oom("mps"))
        True

    Args:
        kind: "cuda", "cuda_api", "cublas", "cudnn", "triton", "hip", "xpu", "mps", "cpu" or "python".

    Returns:
        The exception, to be raised.

    Raises:
        ValueError: `kind` is none of these.
    """
    if kind not in _OOM_TEXTS:
        raise ValueError(f"kind must be one of {', '.join(_OOM_TEXTS)}, not {kind!r}")
    name, text = _OOM_TEXTS[kind]
    text += " (simulated by batchfit.testing)" if text else ""
    if name == "OutOfMemoryError":
        return torch.OutOfMemoryError(text)
    if name == "MemoryError":
        return MemoryError(text) if text else MemoryError()
    # torch before 2.8 raises a plain RuntimeError where later ones have a type for it
    kinds: dict[str, type[Exception]] = {"AcceleratorError": getattr(torch, "AcceleratorError", RuntimeError)}
    return kinds.get(name, RuntimeError)(text)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fault(fault: object) -> None:
    if isinstance(fault, BaseException) or callable(fault):
        return
    if not (isinstance(fault, str) and fault in ("oom", "error", "interrupt", *_OOM_TEXTS)):
        raise ValueError(
            f"error must be 'oom', 'error', 'interrupt', a kind of simulated_oom, an exception "
            f"or a function that makes one, not {fault!r}"
        )


def _made(fault: Fault) -> BaseException:
    if isinstance(fault, BaseException):
        return fault
    if not isinstance(fault, str):
        return fault()
    if fault == "interrupt":
        return KeyboardInterrupt()
    if fault == "error":
        return RuntimeError("an error that is not memory (simulated by batchfit.testing)")
    return simulated_oom("cuda" if fault == "oom" else fault)


@final
@dataclass(slots=True)
class Operations:
    """What `fail_at` and `count_operations` have seen.

    Attributes:
        operations: how many ran.
        last: the last one that was asked for, whether it ran or not.
        fired: whether the fault has been raised.
    """

    operations: int = 0  # how many ran
    last: str = ""  # the last one that was asked for, whether it ran or not
    fired: bool = False  # whether the fault has been raised


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Operations, fail_before: int | None, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._fail_before = fail_before
        self._fault = fault

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would put a frame of its own around ours, and that one keeps the tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "profiler":  # marks in a trace: no work, and nothing to fail
            return func(*args, **(kwargs or {}))
        self._seen.last = str(func)
        if self._seen.operations == self._fail_before and not self._seen.fired:
            self._seen.fired = True
            del args, kwargs  # the error's traceback holds this frame, and must not hold the tensors with it
            raise _made(self._fault)
        self._seen.operations += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def fail_at(n: int, *, error: Fault | None = None) -> Iterator[Operations]:
    """Let `n` torch operations run and raise before the next one, once; what comes after runs again.

    Examples:
        >>> with fail_at(2) as seen:
        ...     try:
        ...         torch.ones(3).add(1).sub(1)
        ...     except torch.OutOfMemoryError:
        ...         print(seen.operations, seen.last)
        2 aten.sub.Tensor

    Operations are counted where torch carries them out, those of backward and of optimizers included; a view
    is one too. Only this thread is watched, and nothing is compiled meanwhile. `error` is raised in place of
    `torch.OutOfMemoryError`; `FaultSchedule` says what it can be.

    Args:
        n: how many operations run before it.
        error: what is raised in place of `torch.OutOfMemoryError`; `FaultSchedule` says what it can be.

    Yields:
        The count of operations.

    Raises:
        ValueError: `n` is no integer of at least 0.
    """
    if not _is_whole(n) or n < 0:
        raise ValueError(f"n must be an integer of at least 0, not {n!r}")
    fault: Fault = "oom" if error is None else error
    _check_fault(fault)
    seen = Operations()
    with _Watch(seen, n, fault):
        yield seen


@contextmanager
def count_operations() -> Iterator[Operations]:
    """Count the torch operations of a block: the points at which `fail_at` can fail.

    Examples:
        >>> with count_operations() as seen:
        ...     _ = torch.ones(3).add(1).sub(1)
        >>> seen.operations
        3

    Yields:
        The count of operations.
    """
    seen = Operations()
    with _Watch(seen, None, "oom"):
        yield seen


@final
@dataclass(frozen=True)
class FaultSchedule:
    """Faults by number: of a step, a call, an epoch, whatever the test counts.

    Examples:
        >>> faults = FaultSchedule({3: "oom", 5: ValueError("bad row")})
        >>> faults.check(5)
        Traceback (most recent call last):
        ValueError: bad row

    A fault is "oom", "error" (one that is not memory), "interrupt" (Ctrl-C), a kind of `simulated_oom`, an
    exception, or a function that makes one. It comes every time that its number does.

    Attributes:
        faults: the fault of each number.
    """

    faults: Mapping[int, Fault]

    def __post_init__(self) -> None:
        for number, fault in self.faults.items():
            if not _is_whole(number):
                raise TypeError(f"faults must map integers to errors, not {number!r}")
            _check_fault(fault)

    def check(self, number: int) -> None:
        """Raise the fault of that number, if it has one.

        Args:
            number: of the step, the call, the epoch.
        """
        if number in self.faults:
            raise _made(self.faults[number])


@final
class faulty:  # noqa: N801 - used like a function: faulty(step, {...})
    """The step, but failing in the calls named: 0 is the first call.

    Examples:
        >>> step = faulty(lambda batch_size: batch_size * 2, {0: "oom"})
        >>> step(8)
        Traceback (most recent call last):
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. ...
        >>> step(8), step.calls
        (16, 2)

    With `after=True` the step runs and fails at its end, when it has changed what it changes.

    Args:
        step: the step, or any callable.
        faults: the fault of each call, from 0.
        after: run the step first and fail at its end, when it has changed what it changes.

    Attributes:
        calls: how often it was called.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        faults: Mapping[int, Fault] | FaultSchedule,
        *,
        after: bool = False,
    ) -> None:
        self.calls = 0
        self._step = step
        self._schedule = faults if isinstance(faults, FaultSchedule) else FaultSchedule(faults)
        self._after = after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = self.calls
        self.calls += 1
        if not self._after:
            self._schedule.check(number)
        result = self._step(*args, **kwargs)
        if self._after:
            self._schedule.check(number)
        return result


@final
@dataclass
class FakeDevice:
    """A device without hardware: its memory is a row of numbers, so that a search needs no tensors.

    Examples:
        >>> MiB = 2**20
        >>> device = FakeDevice("1GiB", peak=lambda size: 200 * MiB + size * 3 * MiB)
        >>> device.step(274)
        >>> device.peaks().allocated_bytes // MiB
        1022
        >>> device.step(275)
        Traceback (most recent call last):
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. ...

    and `find_batch_size(Workload(device.step, state=()), device=device)` answers 274. A step of your own
    calls `device.use(bytes)` at its peak, and `hold` and `release` for what outlives it.

    Args:
        capacity_bytes: the memory of the device, in bytes or as text ("1GiB").
        peak: size -> live bytes at the peak of a step of that size, what is held included.
        split: share of the live bytes that lies beside them in remainders which cannot be given back.
        cached: share that lies beside them in blocks which can: past the limit the allocator gives them back
            and tries again, which counts as a retry.
        settles_after: steps after `reset()` in which such retries happen; None: in every one.
        creep_bytes: what each step since `reset()` adds to the remainders, so that a soak can fail.
        reserves: False for a device like a CPU, that reads nothing but live bytes.
        name: what it is called in results.
    """

    capacity_bytes: int | str
    peak: Callable[[int], int] | None = field(default=None, kw_only=True)
    split: float = field(default=0.0, kw_only=True)
    cached: float = field(default=0.0, kw_only=True)
    settles_after: int | None = field(default=3, kw_only=True)
    creep_bytes: int = field(default=0, kw_only=True)
    reserves: bool = field(default=True, kw_only=True)
    name: str = field(default="fake:0", kw_only=True)

    def __post_init__(self) -> None:
        self._total = parse_bytes(self.capacity_bytes, name="capacity_bytes")
        self._limits = [self._total]
        self._held = 0
        self._retries = 0
        self._uses = 0
        self._highest = Peaks(0, 0, 0)

    def use(self, count_bytes: int) -> None:
        """Take that much beside what is held, for a moment: the peak of a step.

        Args:
            count_bytes: how many bytes.

        Raises:
            OutOfMemoryError: the limit does not allow it.
            ValueError: `count_bytes` is negative.
        """
        if count_bytes < 0:
            raise ValueError(f"count_bytes must not be negative, not {count_bytes!r}")
        self._uses += 1
        live = self._held + count_bytes
        stuck = int(live * self.split) + self.creep_bytes * self._uses if self.reserves else 0
        limit = self._limits[-1]
        if live + stuck > limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(count_bytes)}. {self.name} has a total "
                f"capacity of {format_bytes(limit)} (batchfit.testing.FakeDevice)"
            )
        reserved = live + stuck + (int(live * self.cached) if self.reserves else 0)
        if reserved > limit:
            reserved = limit
            self._retries += self.settles_after is None or self._uses <= self.settles_after
        self._highest = Peaks(
            max(self._highest.allocated_bytes, live),
            max(self._highest.reserved_bytes or 0, reserved),
            max(self._highest.split_bytes or 0, stuck),
        )

    def hold(self, count_bytes: int) -> None:
        """Take that much until `release`: weights, optimizer state.

        Args:
            count_bytes: how many bytes.
        """
        self.use(count_bytes)
        self._uses -= 1  # no step
        self._held += count_bytes

    def release(self, count_bytes: int) -> None:
        """Free what `hold` took.

        Args:
            count_bytes: how many bytes.

        Raises:
            ValueError: it is more than is held.
        """
        if not 0 <= count_bytes <= self._held:
            raise ValueError(f"count_bytes must be at most the {self._held} held, not {count_bytes!r}")
        self._held -= count_bytes

    def step(self, size: int) -> None:
        """A step of that size: uses what `peak` says.

        Args:
            size: the batch size.

        Raises:
            TypeError: the device has no `peak`.
        """
        if self.peak is None:
            raise TypeError("peak must be given for FakeDevice.step, not None")
        self.use(self.peak(size) - self._held)

    def total_bytes(self) -> int:
        """All memory of the device."""
        return self._total

    def budget_bytes(self) -> int:
        """The limit in force."""
        return self._limits[-1]

    def held_bytes(self) -> int:
        """What `hold` took."""
        return self._held

    def reset(self) -> None:
        """Start new peaks."""
        self._uses = 0
        self._highest = Peaks(self._held, self._held, 0)

    def peaks(self) -> Peaks:
        """The highest readings since `reset()`."""
        return self._highest if self.reserves else Peaks(self._highest.allocated_bytes)

    def alloc_retries(self) -> int:
        """How often the allocator released its cache and tried again."""
        return self._retries

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Inside, the limit is `budget_bytes`.

        Args:
            budget_bytes: the limit; it can only go down.
        """
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        self._limits.append(min(budget_bytes, self._limits[-1]))
        try:
            yield
        finally:
            self._limits.pop()
