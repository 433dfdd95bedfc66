"""The memory of a device, behind one small interface: readings, budgets and limits. GPUs are in `gpu.py`.

Rules
- A wrong budget is a `ValueError` before anything is allocated on a device.
- Readings are this process' own: live tensor bytes (`allocated`), and what the caching allocator reserved
  on the device to serve them (`reserved`). `budget_bytes()` also sees what other processes left free.
- `limit` never allows more than its budget, never more than a limit that is around it, and restores what
  was set before. No device but its own is touched.
- The memory of a CPU is counted by `virtual_memory`, which `limit` enters: `held_bytes`, `peaks` and `reset`
  work inside `limit` only, and outside they raise rather than answer 0.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol, final, runtime_checkable

from batchfit._engine.virtual_memory.memory import VirtualMemory, active, virtual_memory
from batchfit._units import format_bytes

log = logging.getLogger("batchfit")

RAM_PART = 4  # without a budget a CPU's is at most this part of the free RAM ...
RAM_MOST_BYTES = 4 * 2**30  # ... and no more than that


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest readings since `reset()`.

    Attributes:
        allocated_bytes: live tensor bytes.
        reserved_bytes: what the caching allocator reserved on the device; None where the device has no such
            thing.
        split_bytes: its inactive split blocks, which it cannot release; None where the device has no such
            thing.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    split_bytes: int | None = None


@runtime_checkable
class Device(Protocol):
    """What a search needs of a device. `batchfit.testing.FakeDevice` is one without hardware."""

    @property
    def name(self) -> str:
        """`cuda:0`, `cpu`."""

    def total_bytes(self) -> int:
        """The memory of the device; no budget may exceed it."""

    def budget_bytes(self) -> int:
        """The most this program may use now: what it holds and what is free, under any limit already set."""

    def held_bytes(self) -> int:
        """Live tensor bytes now."""

    def reset(self) -> None:
        """Release cached memory to the device and begin new peaks."""

    def peaks(self) -> Peaks:
        """The highest readings since `reset()`."""

    def alloc_retries(self) -> int:
        """How often the allocator had to release its cache to serve a request; only ever grows."""

    def synchronize(self) -> None:
        """Wait until the device has finished all kernels."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Inside, no more than that can be used; what was set before is restored."""


def check_budget(device: Device, budget_bytes: int) -> None:
    """Refuse a budget that is no number of bytes or that exceeds the device."""
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int):
        raise TypeError(f"budget must be a number of bytes, not {budget_bytes!r}")
    if budget_bytes <= 0:
        raise ValueError(f"budget must be positive, not {budget_bytes!r}")
    total = device.total_bytes()
    if budget_bytes > total:
        raise ValueError(
            f"budget must not exceed the {format_bytes(total)} of {device.name}, "
            f"not {budget_bytes!r} ({format_bytes(budget_bytes)})"
        )


class BudgetedDevice(Protocol):
    """What there is to know of a device before a search."""

    @property
    def name(self) -> str: ...
    def total_bytes(self) -> int: ...
    def budget_bytes(self) -> int: ...


def usable_bytes(
    device: BudgetedDevice,
    asked: int | str | None,
    asked_bytes: int | None,
    *,
    held_bytes: int = 0,
    says: bool = True,
) -> int:
    """The budget asked for, checked against the device; where none was, `without_budget`."""
    available = device.budget_bytes()
    if asked_bytes is None:
        modest = without_budget(device.name, available, held_bytes=held_bytes)
        if says and modest < available:
            log.warning(
                "no budget is given and the workload runs on the CPU: using %s of %s of free RAM. Name a "
                "budget (budget=, --budget) for more or less; for a GPU that is not here, predict the size "
                "(batchfit.predict_batch_size, batchfit predict)",
                *(format_bytes(modest), format_bytes(available)),
            )
        return modest
    total = device.total_bytes()
    if asked_bytes > total:
        raise ValueError(f"budget must not exceed the {format_bytes(total)} of {device.name}, not {asked!r}")
    if asked_bytes > available:
        log.warning(
            "only %s of the budget of %s is free on %s now; searching within that",
            format_bytes(available),
            format_bytes(asked_bytes),
            device.name,
        )
    return min(asked_bytes, available)


def without_budget(device: str, available_bytes: int, *, held_bytes: int = 0) -> int:
    """What is used where no budget is named: all that is free on a GPU or in a virtual memory.

    Of RAM it is a modest part beside what the workload holds (`held_bytes`): taking all of it would make the
    machine swap, or have the system kill programs, for an answer about memory that nobody trains with.
    """
    if device != "cpu" or active() is not None:
        return available_bytes
    return min(available_bytes, held_bytes + min(available_bytes // RAM_PART, RAM_MOST_BYTES))


@final
@dataclass(frozen=True)
class CpuDevice:
    """The CPU, which raises OOMs like a GPU inside `limit`. Nothing is reserved, nothing is retried.

    Outside any virtual memory `budget_bytes()` is the RAM that the system and the container leave to new
    allocations. What the process' tensors hold already is not added, though a virtual memory will count it:
    exhausted RAM kills the process, so the figure errs on the low side.
    """

    name: ClassVar[str] = "cpu"

    def total_bytes(self) -> int:
        memory = active()
        return read_ram().total_bytes if memory is None else memory.limit_bytes

    def budget_bytes(self) -> int:
        memory = active()
        return read_ram().available_bytes * 9 // 10 if memory is None else memory.limit_bytes

    def held_bytes(self) -> int:
        return self._counted().allocated_bytes

    def reset(self) -> None:
        self._counted().reset_peak()

    def peaks(self) -> Peaks:
        return Peaks(self._counted().peak_bytes)

    def alloc_retries(self) -> int:
        return 0

    def synchronize(self) -> None:
        """A CPU has done its work when the call returns."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        memory = active()
        with virtual_memory(budget_bytes) if memory is None else memory.lowered(budget_bytes):
            yield

    def _counted(self) -> VirtualMemory:
        memory = active()
        if memory is None:
            raise RuntimeError(
                "the memory of a CPU is only counted inside device.limit(...) or virtual_memory(...), "
                "in the thread that entered it"
            )
        return memory


def counts_memory(device: Device) -> bool:
    """Whether the device's memory can be read now: a CPU's only under `virtual_memory`."""
    return not isinstance(device, CpuDevice) or active() is not None


@dataclass(frozen=True, slots=True)
class Ram:
    """The machine's RAM, as far as this process may use it."""

    total_bytes: int
    available_bytes: int


def read_ram(root: Path = Path("/")) -> Ram:
    """RAM under the limits of the control groups (containers) around this process; `root` is for tests."""
    lines = _read(root / "proc/meminfo").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest}
    total = kib["MemTotal"] * 1024 if "MemTotal" in kib else physical_bytes()
    available = kib["MemAvailable"] * 1024 if "MemAvailable" in kib else total
    for limit, used in _control_groups(root):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Ram(total, available)


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of each memory control group around this process."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, used_file, cache = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_file, used_file = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        inner = Path(path.strip("/"))
        for group in (inner, *inner.parents):  # every group around ours limits it too
            limit = _read(base / group / limit_file).strip()
            used = _read(base / group / used_file).strip()
            if limit.isdigit() and used.isdigit():
                stat = dict(one.split() for one in _read(base / group / "memory.stat").splitlines())
                yield int(limit), max(0, int(used) - int(stat.get(cache, 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def physical_bytes() -> int:
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kib = ctypes.c_ulonglong()  # Windows
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kib))  # type: ignore[attr-defined]
    return kib.value * 1024
