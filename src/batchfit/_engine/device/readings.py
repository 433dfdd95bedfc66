"""What is asked of any device's memory: how much a search may use, what is live, what an OOM has left."""

from __future__ import annotations

import gc
import logging
from typing import Any, NamedTuple, Protocol

import torch

from batchfit._engine.device.device import CpuDevice, Device
from batchfit._engine.device.gpu import CachingDevice, CudaDevice
from batchfit._engine.device.pure.allocator_state import AllocatorState
from batchfit._engine.virtual_memory.memory import active
from batchfit._units import format_bytes

log = logging.getLogger("batchfit")

RAM_PART = 4  # without a budget a CPU's is at most this part of the free RAM ...
RAM_MOST_BYTES = 4 * 2**30  # ... and no more than that


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


class DeviceReading(NamedTuple):
    """A device's live bytes and allocation retries; None where they are not counted."""

    held_bytes: int | None
    retries: int | None


def recover(device: Device) -> None:
    """Release what a failed call left: cycles, cast copies of weights, cached blocks."""
    torch.clear_autocast_cache()
    gc.collect()
    if counts_memory(device):
        device.reset()


def read(device: Device) -> DeviceReading:
    """Live bytes now and allocation retries so far: tens of microseconds, no synchronization."""
    if isinstance(device, CudaDevice):
        # Not `memory_stats`, which flattens the same table in Python (100 us).
        stats: Any = torch.cuda.memory_stats_as_nested_dict(device.index)
        if not stats:  # nothing has been allocated there so far
            return DeviceReading(0, 0)
        held = int(stats["allocated_bytes"]["all"]["current"])
        return DeviceReading(held, int(stats.get("num_alloc_retries", 0)))
    if not counts_memory(device):
        return DeviceReading(None, None)
    return DeviceReading(device.held_bytes(), device.alloc_retries())


def begin_peak(device: Device) -> None:
    """Begin a new peak; unlike `Device.reset`, the cache stays."""
    if isinstance(device, CudaDevice):
        torch.cuda.reset_peak_memory_stats(device.index)
    elif isinstance(device, CpuDevice):
        memory = active()
        if memory is not None:
            memory.reset_peak()
    else:
        device.reset()


def peak(device: Device) -> int | None:
    """The most that was live since `begin_peak`; None where it is not counted."""
    return device.peaks().allocated_bytes if counts_memory(device) else None


def counts_memory(device: Device) -> bool:
    """Whether the device's memory can be read now: a CPU's only under `virtual_memory`."""
    return not isinstance(device, CpuDevice) or active() is not None


def largest_bytes(device: Device) -> int | None:
    """The largest block of the steps that just ran, while their cache is there; None where it cannot be read.

    A large block that no cached segment can hold gets a segment of its own size. Reading them all costs
    milliseconds, which is why it is not one of the peaks.
    """
    return device.largest_bytes() if isinstance(device, CachingDevice) else None


def allocator_mark(device: Device) -> AllocatorState | None:
    """The caching allocator as it is now; None where there is none to be read."""
    return device.mark() if isinstance(device, CachingDevice) else None


def is_capped(device: Device, budget_bytes: int) -> bool:
    """Whether a program that is held to a budget on this device runs under torch's memory fraction."""
    return isinstance(device, CachingDevice) and device.is_capped(budget_bytes)
