"""The memory of GPUs: cuda (NVIDIA, AMD) and xpu (Intel), with torch's caching allocator, and mps (Apple).

cuda is tested on real hardware; xpu and mps only against a fake that counts memory, and say so.

The limit of cuda and xpu is torch's per-process memory fraction: the allocator compares its own reserved
segments with it, so a big GPU imitates a small one exactly, whatever other processes do. On Windows, WSL
included, NVIDIA's driver does not refuse memory when the GPU is full: it takes RAM, and a step that should
have failed runs, slowly. There `limit` always sets the fraction, to what is free if that is less.

With `backend:cudaMallocAsync` the allocator is the driver's. torch compares live tensors with the fraction,
and the pool may hold more of the GPU beside them: live tensors are then the reading too, nothing else.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch

from batchfit._engine.device.device import Device, Peaks, check_budget
from batchfit._engine.device.pure.allocator_state import AllocatorState, layout_of
from batchfit._engine.torch_private import allocator
from batchfit.errors import BatchfitError

# The fraction that a limit of ours has set, for a torch that cannot read it: (back-end, index) -> fraction.
limits_set_by_us: dict[tuple[Any, int], float] = {}


def fraction_of(budget_bytes: int, total_bytes: int) -> float:
    """The fraction for which the allocator's `int(fraction * total)` is the budget, and never more."""
    fraction = math.nextafter(budget_bytes / total_bytes, 1.0)  # upwards: rounded down twice, a byte is lost
    while int(fraction * total_bytes) > budget_bytes:
        fraction = math.nextafter(fraction, 0.0)
    return fraction


def is_capped(device: Device, budget_bytes: int) -> bool:
    """Whether a program that is held to a budget on this device runs under torch's memory fraction."""
    return isinstance(device, CachingDevice) and device.is_capped(budget_bytes)


def spills_to_ram(system: str = os.name, release: str | None = None) -> bool:
    """Whether the GPU driver of this system gives out RAM when the GPU is full (Windows, WSL)."""
    return system == "nt" or "microsoft" in (platform.release() if release is None else release).lower()


# Of a `AllocatorState`. Not `allocated_bytes`: a block of 10 MiB that is asked for 9 of them counts as 10
# there, and samples that grow longer step by step would appear equal until they need another one.
_COUNTS = ("num_alloc_retries", "allocation.all.allocated", "requested_bytes.all.allocated")


def _laid(segment: dict[str, Any]) -> tuple[object, ...]:
    """A segment as its address and its blocks, in order."""
    return segment["address"], *((block["size"], block["state"]) for block in segment["blocks"])


@dataclass(frozen=True)
class CachingDevice:
    """A device with torch's caching allocator: cuda and xpu share its functions."""

    index: int
    backend: Any = field(repr=False)
    kind: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    def total_bytes(self) -> int:
        return int(self.backend.get_device_properties(self.index).total_memory)

    def budget_bytes(self) -> int:
        free, total = self._memory_info()
        reachable = free + int(self.backend.memory_reserved(self.index))
        return min(reachable, int(self._fraction() * total))

    def cap_bytes(self) -> int:
        """The GPU's memory, or the share of it that the process may use."""
        _, total = self._memory_info()
        return int(self._fraction() * total)

    def held_bytes(self) -> int:
        return int(self.backend.memory_allocated(self.index))

    def reset(self) -> None:
        self.synchronize()
        self._forget_workspaces()
        self._empty_cache()
        self.backend.reset_peak_memory_stats(self.index)

    def peaks(self) -> Peaks:
        stats = self.backend.memory_stats(self.index)
        allocated_bytes = int(stats.get("allocated_bytes.all.peak", 0))
        if not self.is_torchs_own:
            return Peaks(allocated_bytes)
        split = stats.get("inactive_split_bytes.all.peak")
        return Peaks(
            allocated_bytes,
            reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            split_bytes=None if split is None else int(split),
        )

    def largest_bytes(self) -> int | None:
        """The largest segment now; None where they grow (expandable ones) and say nothing about blocks.

        A large block that no cached segment can hold gets a segment of its own size. Reading them all costs
        milliseconds, which is why it is not one of the peaks.
        """
        segments = self._segments()
        if segments is None:
            return None
        segments = [one for one in segments if one.get("device") == self.index]
        if any(one.get("is_expandable") for one in segments):
            return None
        return max((int(one.get("total_size", 0)) for one in segments), default=None)

    def mark(self) -> AllocatorState | None:
        """Where the large blocks are, and the counts; None where the allocator is not torch's own.

        Of all devices that the process uses: layers may lie on several, and any of them may be out of memory.
        While the program records the history of its memory, a snapshot takes seconds: None as well.
        """
        # Whether history is recorded is a question that other allocators answer with an error.
        segments = None if not self.is_torchs_own or self._records_history() else self._segments()
        if segments is None:
            return None
        used = sorted({self.index, *(one["device"] for one in segments)})
        marks = [replace(self, index=index)._mark_among(segments) for index in used]
        known = [one for one in marks if one is not None]
        if len(known) < len(marks):
            return None
        return AllocatorState(
            hash(tuple(one.layout for one in known)),
            retries=sum(one.retries for one in known),
            requests=sum(one.requests for one in known),
            requested_bytes=sum(one.requested_bytes for one in known),
        )

    def _mark_among(self, segments: list[dict[str, Any]]) -> AllocatorState | None:
        """This device's mark."""
        own = [one for one in segments if one["device"] == self.index]
        stats = self.backend.memory_stats(self.index)
        if any(name not in stats for name in _COUNTS):
            return None
        small = [one for one in own if one["segment_type"] == "small"]
        layout = layout_of(
            (_laid(one) for one in own if one["segment_type"] != "small"),
            (_laid(one) for one in small),
            small_bytes=sum(one["total_size"] for one in small),
            held_bytes=self.held_bytes(),
            room_bytes=self.budget_bytes() - int(self.backend.memory_reserved(self.index)),
        )
        retries, requests, requested_bytes = (int(stats[name]) for name in _COUNTS)
        return AllocatorState(layout, retries, requests, requested_bytes)

    def _segments(self) -> list[dict[str, Any]] | None:
        """What the allocators of all devices have reserved, block by block; None where it cannot be read."""
        snapshot = getattr(self.backend, "memory_snapshot", None)
        if snapshot is None or not self.is_torchs_own:
            return None
        return list(snapshot())

    def _records_history(self) -> bool:
        return False

    def alloc_retries(self) -> int:
        return int(self.backend.memory_stats(self.index).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        self.backend.synchronize(self.index)

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    def is_capped(self, budget_bytes: int) -> bool:
        """Whether a fraction below 1 is set, or `limit` would set one."""
        return budget_bytes < self.budget_bytes() or self._spills() or self._fraction() < 1.0

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        # What lies in the cache is no longer asked for from the device, so no limit would apply to it.
        self.synchronize()
        self._empty_cache()
        available = self.budget_bytes()
        if budget_bytes >= available and not self._spills():
            yield
            return
        budget_bytes = min(budget_bytes, available)
        if not self.can_limit:
            raise BatchfitError(
                f"torch {torch.__version__} cannot limit the memory of {self.name}. "
                "Leave the budget out, or upgrade torch."
            )
        # The allocator multiplies by one of two totals, depending on the version: the larger one is safe.
        total = max(self._memory_info()[1], self.total_bytes())
        before = self._fraction()
        if before < 1.0:  # read rounded: restored as read, repeatedly, it would shrink by bytes
            before = fraction_of(round(before * total), total)
        ours_before = limits_set_by_us.get((self.backend, self.index))
        self._set_fraction(fraction_of(budget_bytes, total))
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a dead context: it must not hide the error that killed it
                self._set_fraction(before, forget=ours_before is None)
            raise
        self._set_fraction(before, forget=ours_before is None)

    def _set_fraction(self, fraction: float, *, forget: bool = False) -> None:
        if forget:
            limits_set_by_us.pop((self.backend, self.index), None)
        else:
            limits_set_by_us[self.backend, self.index] = fraction
        self.backend.set_per_process_memory_fraction(fraction, self.index)

    def _fraction(self) -> float:
        """The fraction that is set now. An older torch cannot read it: then ours, or all of it."""
        if hasattr(self.backend, "get_per_process_memory_fraction"):
            # cudaMallocAsync begins with the largest number there is, and refuses to have it restored.
            return min(1.0, float(self.backend.get_per_process_memory_fraction(self.index)))
        return limits_set_by_us.get((self.backend, self.index), 1.0)

    def _memory_info(self) -> tuple[int, int]:
        if hasattr(self.backend, "mem_get_info"):
            free, total = self.backend.mem_get_info(self.index)
            return int(free), int(total)
        total = self.total_bytes()  # an older xpu: what others use cannot be seen
        return total - int(self.backend.memory_reserved(self.index)), total

    def _forget_workspaces(self) -> None:
        """Release what libraries keep between steps, where there is such a thing."""

    def _empty_cache(self) -> None:
        with self.backend.device(self.index):  # on another current device this would open a context there
            self.backend.empty_cache()

    @property
    def is_torchs_own(self) -> bool:
        """Whether torch's own caching allocator serves this device."""
        return True

    @property
    def can_limit(self) -> bool:
        """Whether this torch can hold the device to a budget."""
        return hasattr(self.backend, "set_per_process_memory_fraction")

    def _spills(self) -> bool:
        return False


@final
@dataclass(frozen=True)
class CudaDevice(CachingDevice):
    """An NVIDIA GPU, or an AMD one: torch calls both cuda."""

    index: int = 0
    backend: Any = field(default=torch.cuda, repr=False)
    kind: ClassVar[str] = "cuda"

    @property
    def is_torchs_own(self) -> bool:
        """Not with `backend:cudaMallocAsync`, nor with an allocator that the program has plugged in."""
        backend = getattr(self.backend, "get_allocator_backend", None)
        return backend is None or backend() == "native"

    def requested_bytes(self) -> int | None:
        """Requested bytes of all live tensors, before blocks are rounded up; None where not counted."""
        asked = self.backend.memory_stats(self.index).get("requested_bytes.all.current")
        return int(asked) if self.is_torchs_own and asked is not None else None

    def _spills(self) -> bool:
        return spills_to_ram()

    def _records_history(self) -> bool:
        """Whether `torch.cuda.memory._record_memory_history` is on: a snapshot has stacks then."""
        return self.backend is torch.cuda and allocator.history_is_recorded()

    def _forget_workspaces(self) -> None:
        """Release the workspaces of cuBLAS: each trial allocates them again, as a new process does.

        Allocated in the middle of a step they may lie in a large block, which cannot be released any more: of
        Llama-110M under 24 GiB 50 samples run if a small step was there first, and 45 if none was.
        """
        if self.backend is torch.cuda:
            allocator.clear_cublas_workspaces()


@final
@dataclass(frozen=True)
class XpuDevice(CachingDevice):
    """An Intel GPU. Written against a fake: untested on real hardware."""

    index: int = 0
    backend: Any = field(default=torch.xpu, repr=False)
    kind: ClassVar[str] = "xpu"


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
