"""torch.cuda without a GPU, with honest books, for tests of devices and of searches on them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MiB = 2**20
SEGMENT = 2 * MiB


class FakeCuda:
    """torch.cuda with one allocator a device: segments of 2 MiB, a cache, a fraction, peaks and retries."""

    def __init__(self, total: int = 1000 * MiB, *, used_by_others: int = 0, count: int = 2) -> None:
        self.total = total
        self.others = used_by_others
        self.count = count
        self.opened: set[int] = set()  # devices on which anything was done that opens a context
        self.current = 0
        self.allowed: dict[int, int] = {}
        self.live = dict.fromkeys(range(count), 0)
        self.reserved = dict.fromkeys(range(count), 0)
        self.peak = {index: [0, 0] for index in range(count)}
        self.retries = dict.fromkeys(range(count), 0)
        self.requested = {index: [0, 0] for index in range(count)}  # how often, and how many bytes
        self.dead = False
        self.segments: list[dict[str, Any]] = []  # for `memory_snapshot`, as a test sets them

    # what a program does

    def allocate(self, size: int, index: int = 0) -> None:
        segments = -(-(self.live[index] + size) // SEGMENT) * SEGMENT
        if segments > self.reserved[index]:
            if not self.may_reserve(segments, index):
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}")
            self.reserved[index] = segments
        self.live[index] += size
        requested = self.requested[index]
        requested[:] = [requested[0] + 1, requested[1] + size]
        self._note(index)

    def free(self, size: int, index: int = 0) -> None:
        self.live[index] -= size

    def may_reserve(self, segments: int, index: int) -> bool:
        return segments <= min(self.total - self.others, self.allowed.get(index, self.total))

    def _note(self, index: int) -> None:
        peak = self.peak[index]
        peak[:] = [max(peak[0], self.live[index]), max(peak[1], self.reserved[index])]

    def _open(self, index: int) -> None:
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.opened.add(index)

    # torch's own functions

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self._open(index)
        return self.total - self.others - self.reserved[index], self.total

    def get_device_properties(self, index: int) -> Any:
        return types.SimpleNamespace(total_memory=self.total, uuid=f"{index:08}-fa4e")

    def memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    def memory_allocated(self, index: int) -> int:
        return self.live[index]

    def memory_stats(self, index: int) -> dict[str, int]:
        return {
            "allocated_bytes.all.peak": self.peak[index][0],
            "reserved_bytes.all.peak": self.peak[index][1],
            "inactive_split_bytes.all.peak": 77,
            "num_alloc_retries": self.retries[index],
            "allocation.all.allocated": self.requested[index][0],
            "requested_bytes.all.current": self.live[index],
            "requested_bytes.all.allocated": self.requested[index][1],
        }

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak[index] = [0, 0]
        self._note(index)

    def synchronize(self, index: int) -> None:
        self._open(index)

    def get_allocator_backend(self) -> str:
        return "native"

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def empty_cache(self) -> None:
        self._open(self.current)
        self.segments = [one for one in self.segments if one["device"] != self.current]
        self.reserved[self.current] = -(-self.live[self.current] // SEGMENT) * SEGMENT

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 1
        self._open(index)
        self.allowed[index] = int(fraction * self.total)

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.allowed.get(index, self.total) / self.total


class OldCuda(FakeCuda):
    """torch 2.6: the fraction can be set, not read."""

    get_per_process_memory_fraction: Any = property()


class OldXpu(FakeCuda):
    """An xpu without free memory, limit and retries."""

    mem_get_info: Any = property()
    set_per_process_memory_fraction: Any = property()
    get_per_process_memory_fraction: Any = property()

    def memory_stats(self, index: int) -> dict[str, int]:
        stats = super().memory_stats(index)
        return {key: stats[key] for key in ("allocated_bytes.all.peak", "reserved_bytes.all.peak")}


class AsyncCuda(FakeCuda):
    """backend:cudaMallocAsync: the limit counts live tensors, a pool of the driver's stands beside it."""

    def get_allocator_backend(self) -> str:
        return "cudaMallocAsync"

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.allowed.get(index, 2**64 - 1) / self.total  # none is set: the largest number there is

    def may_reserve(self, segments: int, index: int) -> bool:
        return True

    def allocate(self, size: int, index: int = 0) -> None:
        if self.live[index] + size > min(self.allowed.get(index, self.total), self.total - self.others):
            raise torch.OutOfMemoryError(
                "Allocation on device 0 would exceed allowed memory. (out of memory)"
            )
        super().allocate(size, index)
