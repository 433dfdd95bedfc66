"""The memory that the batches of one Microbatcher may use, and the error where it is not enough.

Rules
- One reading of the device per batch, at its beginning. Nothing synchronizes unless there was an OOM.
- A device is read around passes with as little as that takes.
- Where tensors that are no part of the batch hold all that may be used, no size is run.
- The models' own memory (weights, gradients, buffers) is counted apart from that of other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch

from batchfit._engine.batch.split import Batch
from batchfit._engine.device import oom
from batchfit._engine.device.device import CpuDevice, Device, counts_memory
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.tensors import leaves_of
from batchfit._engine.virtual_memory.memory import active
from batchfit._units import format_bytes, in_use_bytes
from batchfit.errors import NothingFitsError

_OTHERS = "Free other tensors (optimizer state counts too), or raise the budget."


class DeviceReading(NamedTuple):
    """A device's live bytes and allocation retries; None where they are not counted."""

    held_bytes: int | None
    retries: int | None

    @classmethod
    def of(cls, device: Device) -> DeviceReading:
        """Live bytes now and allocation retries so far: tens of microseconds, no synchronization."""
        if isinstance(device, CudaDevice):
            # Not `memory_stats`, which flattens the same table in Python (100 us).
            stats: Any = torch.cuda.memory_stats_as_nested_dict(device.index)
            if not stats:  # nothing has been allocated there so far
                return cls(0, 0)
            held = int(stats["allocated_bytes"]["all"]["current"])
            return cls(held, int(stats.get("num_alloc_retries", 0)))
        if not counts_memory(device):
            return cls(None, None)
        return cls(device.held_bytes(), device.alloc_retries())


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


def peak_since_begun(device: Device) -> int | None:
    """The most that was live since `begin_peak`; None where it is not counted."""
    return device.peaks().allocated_bytes if counts_memory(device) else None


@final
class MemoryBudget:
    """A device, the bytes of it that may be used, and the allocation retries that it counts."""

    def __init__(
        self,
        device: Device,
        budget_bytes: int | None,
        *,
        models_bytes: Callable[[], int] = lambda: 0,
        holders: Callable[[int | None, list[torch.Tensor]], list[tuple[str, int]]] = lambda live, batch: [],
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.after_batch: Callable[[int], None] | None = None  # gets the allocation retries of the last batch
        self._models_bytes = models_bytes
        self._holders = holders
        self._limit_bytes: int | None = None
        self._retries: int | None = None

    def begin_batch(self) -> DeviceReading:
        """Read the device once for a new batch, and report the last batch's allocation retries."""
        reading = DeviceReading.of(self.device)
        before, self._retries = self._retries, reading.retries
        if self.after_batch is not None and before is not None and reading.retries is not None:
            self.after_batch(reading.retries - before)
        return reading

    def recover(self) -> DeviceReading:
        """Release what a failed pass left, and read the device."""
        oom.recover(self.device)
        return self.ignore_retries()

    def ignore_retries(self) -> DeviceReading:
        """Read the device; allocation retries so far do not count for this batch (an OOM is a retry too)."""
        reading = DeviceReading.of(self.device)
        self._retries = reading.retries
        return reading

    def limit(self, *, fresh: bool) -> int:
        """Bytes that may be used. To ask a GPU takes long, so its answer is kept."""
        if fresh or self._limit_bytes is None or not isinstance(self.device, CudaDevice):
            free = self.device.budget_bytes()
            self._limit_bytes = free if self.budget_bytes is None else min(free, self.budget_bytes)
        return self._limit_bytes

    def free_bytes(self, reading: DeviceReading, *, fresh: bool) -> int | None:
        """Bytes that are left for a batch; None where the device cannot be read."""
        return None if reading.held_bytes is None else self.limit(fresh=fresh) - reading.held_bytes

    @contextmanager
    def enforced(self, whole: Batch) -> Iterator[None]:
        """Inside, no more than the budget can be allocated; where all of it is held already, an error."""
        if self.budget_bytes is None:
            yield
            return
        with self.device.limit(min(self.budget_bytes, self.device.total_bytes())):
            held = DeviceReading.of(self.device).held_bytes
            if held is not None and held >= self.budget_bytes:
                raise self.shortage(f"a batch of {whole.length}", held, whole=whole)
            yield

    def shortage(
        self, what: str, held_bytes: int | None, message: str = "", *, whole: Batch
    ) -> NothingFitsError:
        """The error for `what` (a batch and its shape) that does not fit, with its memory breakdown."""
        limit_bytes, models_bytes = self.limit(fresh=True), self._models_bytes()
        parts, advice = [], ""
        if held_bytes is not None:
            others = max(0, held_bytes - models_bytes)
            parts.append(
                f"{format_bytes(held_bytes)} was held before it began, {format_bytes(models_bytes)} by the "
                f"models and {format_bytes(others)} by other tensors"
            )
            # Where the larger part is not the models', a smaller model is not what helps.
            if others > max(models_bytes, limit_bytes // 2) or held_bytes >= limit_bytes:
                advice = _OTHERS
        parts.append(what)
        if message:
            parts.append(whole_sentences(message))
        return NothingFitsError(
            1,
            device=self.device.name,
            budget_bytes=limit_bytes,
            detail="; ".join(parts),
            advice=advice,
            holders=self.holders(whole, message, held_bytes),
        )

    def holders(self, whole: Batch, message: str, held_bytes: int | None = None) -> list[tuple[str, int]]:
        """What held the most at an OOM: models, their optimizers, and the batch."""
        return self._holders(in_use_bytes(message) or held_bytes, [one for _, one in whole.leaves])


def owned_bytes(models: Sequence[Any], kind: str) -> int:
    """What the models hold on devices of that kind: each storage once."""
    _, tables, modules = leaves_of(models)
    tensors = [model for model in models if isinstance(model, torch.Tensor)]
    tensors += [one for module in modules for one in module._parameters.values() if one is not None]
    tensors += [one.grad for one in tensors if one.grad is not None]
    tensors += [one for table in tables for one in table.values() if isinstance(one, torch.Tensor)]
    sizes: dict[int, int] = {}
    for held in tensors:
        tensor = getattr(held, "_local_tensor", held)  # of a DTensor, this rank's part
        if tensor.device.type == kind and tensor.layout is torch.strided and not tensor.is_nested:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def whole_sentences(text: str) -> str:
    """Without the last sentence or clause where the text was cut off inside it."""
    if not text.endswith("..."):
        return text
    end = max(text.rfind(". ", 0, -3), text.rfind("; ", 0, -3))
    return text if end < 0 else text[:end]
