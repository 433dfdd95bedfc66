"""The memory of the program's device, as its probe limits and reads it: a GPU, or a CPU's virtual memory.

Rules: a GPU is limited at the first forward pass, when the program has chosen its device; what it holds by
then counts. A CPU is limited from the import of torch on. Nothing of CUDA is initialized by the probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

import torch

from batchfit._engine.virtual_memory.memory import virtual_memory


class ProbeMemory(Protocol):
    """What the probe reads of a device."""

    @property
    def name(self) -> str: ...
    def begin(self) -> None:
        """The program has chosen its device: limit it, and begin the peak."""

    def read(self) -> dict[str, Any]:
        """Peaks since `begin`, and what is held now."""

    def ooms(self) -> int:
        """How many OOMs there have been, also those that the program caught."""

    def budget_bytes(self) -> int | None:
        """What the program may use, once `begin` was called."""


@final
class CpuMemory:
    """Virtual memory on the CPU; `on_oom` is called where a request is refused, before the program sees."""

    name = "cpu"

    def __init__(self, budget_bytes: int, on_oom: Callable[[str], None]) -> None:
        self._context = virtual_memory(budget_bytes)
        self._memory = self._context.__enter__()
        self._memory.on_refused(self._refused)
        self._on_oom = on_oom
        self._ooms = 0

    def _refused(self, error: torch.OutOfMemoryError) -> None:
        self._ooms += 1
        self._on_oom(str(error))

    def begin(self) -> None:
        self._memory.reset_peak()

    def read(self) -> dict[str, Any]:
        return {"peak_bytes": self._memory.peak_bytes, "held_bytes": self._memory.allocated_bytes}

    def ooms(self) -> int:
        return self._ooms

    def budget_bytes(self) -> int | None:
        return self._memory.limit_bytes


@final
class GpuMemory:
    """One CUDA device: the one that is current at the first forward pass."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._asked = budget_bytes
        self._budget: int | None = None
        self._device: int | None = None
        self._retries = 0

    @property
    def name(self) -> str:
        return "cuda" if self._device is None else f"cuda:{self._device}"

    def begin(self) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        device = self._device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        available = free + torch.cuda.memory_reserved(device)
        self._budget = available if self._asked is None else min(self._asked, available)
        if self._asked is not None:
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._asked / total), device)
        torch.cuda.reset_peak_memory_stats(device)
        self._retries = self._stat("num_alloc_retries")

    def _stat(self, name: str) -> int:
        return int(torch.cuda.memory_stats(self._device).get(name, 0))

    def read(self) -> dict[str, Any]:
        if self._device is None:
            return {}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
            "held_bytes": torch.cuda.memory_allocated(self._device),
            "alloc_retries": self._stat("num_alloc_retries") - self._retries,
        }

    def ooms(self) -> int:
        return 0 if self._device is None else self._stat("num_ooms")

    def budget_bytes(self) -> int | None:
        return self._budget
