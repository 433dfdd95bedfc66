"""The memory of devices without a caching allocator that can be read: mps (Apple) and the CPU.

A CPU has no such allocator. Its memory is counted by `virtual_memory`, which `limit` enters: `held_bytes`,
`peaks` and `reset` work inside `limit` only, and outside they raise rather than answer 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch

from batchfit._engine.device.interface import Peaks, check_budget, fraction_of, limits_set_by_us
from batchfit._engine.device.ram import read_ram
from batchfit._engine.virtual_memory.memory import VirtualMemory, active, virtual_memory


@final
class MpsDevice:
    """An Apple GPU. Written against a fake: untested on real hardware.

    Metal keeps no peak. `allocated_bytes` is therefore the highest reading (one after each step), and
    understates what a step needs in its middle; `reserved_bytes` is nearly true, for the allocator keeps
    what it reserved until `reset()`. The bracket of a search is right all the same: an OOM is an OOM.
    The budget is what Metal recommends; torch alone would go 1.7 times as far, into swapping.
    """

    name = "mps"

    def __init__(self, *, backend: Any = torch.mps) -> None:
        self.backend = backend
        self._highest = Peaks(0, 0)

    def total_bytes(self) -> int:
        return int(self.backend.recommended_max_memory())

    def budget_bytes(self) -> int:
        total = self.total_bytes()
        return min(total, int(limits_set_by_us.get((self.backend, 0), 1.0) * total))

    def held_bytes(self) -> int:
        self._read()
        return int(self.backend.current_allocated_memory())

    def reset(self) -> None:
        self.synchronize()
        self.backend.empty_cache()
        self._highest = Peaks(0, 0)
        self._read()

    def peaks(self) -> Peaks:
        self._read()
        return self._highest

    def alloc_retries(self) -> int:
        return 0

    def synchronize(self) -> None:
        self.backend.synchronize()
        self._read()

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        self.reset()
        before = limits_set_by_us.get((self.backend, 0))
        fraction = fraction_of(min(budget_bytes, self.budget_bytes()), self.total_bytes())
        self.backend.set_per_process_memory_fraction(fraction)
        limits_set_by_us[self.backend, 0] = fraction
        try:
            yield
        finally:
            if before is None:
                del limits_set_by_us[self.backend, 0]
                # what torch starts with; it cannot be read back
                before = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.7"))
            else:
                limits_set_by_us[self.backend, 0] = before
            self.backend.set_per_process_memory_fraction(before)

    def _read(self) -> None:
        self._highest = Peaks(
            max(self._highest.allocated_bytes, int(self.backend.current_allocated_memory())),
            max(self._highest.reserved_bytes or 0, int(self.backend.driver_allocated_memory())),
        )


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
