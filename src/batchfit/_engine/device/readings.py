"""The memory of any device, read around a pass and released after an OOM."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch

from batchfit._engine.device.device import CpuDevice, Device
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.virtual_memory.memory import active


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
