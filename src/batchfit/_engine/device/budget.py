"""How many bytes a search may use: the budget asked for, checked against the device."""

from __future__ import annotations

import logging
from typing import Protocol

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
