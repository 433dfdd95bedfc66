"""The memory of a device, behind one small interface: readings and limits.

`cuda.py` holds the devices with torch's caching allocator (cuda, xpu), `cpu.py` the others.

Rules
- A wrong budget is a `ValueError` before anything is allocated on a device.
- Readings are this process' own: live tensor bytes (`allocated`), and what the caching allocator reserved
  on the device to serve them (`reserved`). `budget_bytes()` also sees what other processes left free.
- `limit` never allows more than its budget, never more than a limit that is around it, and restores what
  was set before. No device but its own is touched.
- cuda and cpu are tested on real hardware; mps and xpu only against a fake that counts memory, and say so.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from batchfit._units import format_bytes


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest readings since `reset()`.

    `reserved_bytes` is what the caching allocator reserved on the device, `split_bytes` its inactive split
    blocks, which it cannot release; None where the device has no such thing.
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


# The fraction that a limit of ours has set, for a torch that cannot read it: (back-end, index) -> fraction.
limits_set_by_us: dict[tuple[Any, int], float] = {}


def fraction_of(budget_bytes: int, total_bytes: int) -> float:
    """The fraction for which the allocator's `int(fraction * total)` is the budget, and never more."""
    fraction = math.nextafter(budget_bytes / total_bytes, 1.0)  # upwards: rounded down twice, a byte is lost
    while int(fraction * total_bytes) > budget_bytes:
        fraction = math.nextafter(fraction, 0.0)
    return fraction
