"""The memory that the batches of one Microbatcher may use.

Rules
- One reading of the device per batch, at its beginning. Nothing synchronizes unless there was an OOM.
- Where others hold all the memory that may be used, that is an error before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from batchfit._engine.batch.split import Batch
from batchfit._engine.device import readings
from batchfit._engine.device.readings import DeviceReading
from batchfit._engine.device.resolve import CudaDevice, Device
from batchfit._engine.sizing.shortage import nothing_fits
from batchfit.errors import NothingFitsError


@final
class MemoryBudget:
    """A device, the bytes of it that may be used, and the allocation retries that it counts."""

    def __init__(
        self, device: Device, budget_bytes: int | None, *, models_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        self.device = device
        self.budget_bytes = budget_bytes
        self.after_batch: Callable[[int], None] | None = None  # gets the allocation retries of the last batch
        self._models_bytes = models_bytes
        self._limit_bytes: int | None = None
        self._retries: int | None = None

    def begin_batch(self) -> DeviceReading:
        """Read the device once for a new batch, and report the last batch's allocation retries."""
        reading = readings.read(self.device)
        before, self._retries = self._retries, reading.retries
        if self.after_batch is not None and before is not None and reading.retries is not None:
            self.after_batch(reading.retries - before)
        return reading

    def recover(self) -> DeviceReading:
        """Release what a failed pass left, and read the device."""
        readings.recover(self.device)
        return self.ignore_retries()

    def ignore_retries(self) -> DeviceReading:
        """Read the device; allocation retries so far do not count for this batch (an OOM is a retry too)."""
        reading = readings.read(self.device)
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
            held = readings.read(self.device).held_bytes
            if held is not None and held >= self.budget_bytes:
                raise self.shortage(f"a batch of {whole.length}, {whole.shape.key}", held)
            yield

    def shortage(self, what: str, held_bytes: int | None, message: str = "") -> NothingFitsError:
        """The error for `what` that does not fit."""
        return nothing_fits(
            what,
            device=self.device.name,
            limit_bytes=self.limit(fresh=True),
            held_bytes=held_bytes,
            models_bytes=self._models_bytes(),
            message=message,
        )
