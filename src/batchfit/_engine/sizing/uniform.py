"""Which microbatch size next: what earlier batches showed, and what the device reports now.

Rules
- A peak is measured only when a size is new. A new size runs under the budget; a size that ran is trusted.
- Every change of size is an event (`EventLog`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch

from batchfit._engine.batch.pure.microbatch import Microbatch, Shape
from batchfit._engine.batch.split import Batch, microbatches
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.oom import Failure, run_guarded
from batchfit._engine.sizing.interface import Pass
from batchfit._engine.sizing.memory_budget import DeviceReading, MemoryBudget, begin_peak, peak_since_begun
from batchfit._engine.sizing.pure.sizes import (
    Bounds,
    EventKind,
    EventLog,
    Learned,
    balanced,
    equal,
    oom_in_short,
)
from batchfit._engine.torch_private.dynamo import compilations, recompile_limit

log = logging.getLogger("batchfit")

BEFORE_FIRST = "batchfit: raised before the first microbatch ran, while the batch was cut, weighed or copied"
_STATE_VERSION = 1
_MOST_PEAKS = 1024


def counted(count: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


@final
class UniformSizer:
    """The microbatch sizes of one Microbatcher, learned per shape of a batch."""

    def __init__(self, memory: MemoryBudget, events: EventLog, *, most: int | None) -> None:
        self.memory = memory
        self.events = events
        self.learned = Learned()
        self.shards = 1  # ranks that share the parameters: with fewer of them less memory is left on each
        self._most = most
        self._peaks: dict[tuple[Shape, int], int] = {}
        self._compiled: dict[str, set[int]] = {}
        self._compiled_before: int | None = None

    def begin(self, whole: Batch, *, compiled: bool, needs_two: bool) -> UniformBatch:
        """Choose the size that a batch begins with.

        `needs_two`: BatchNorm trains, and a remainder of one sample is too small for it.
        """
        reading = self.memory.begin_batch()
        known = self.learned.of(whole.shape)
        free_bytes = self.memory.free_bytes(reading, fresh=known is None)
        size = self.learned.begin(whole.shape, whole.length, free_bytes, compiled=compiled)
        bounds = known or Bounds()
        most = self._most or whole.length
        usual = min(bounds.size or whole.length, whole.length, most)
        size = min(size, most)
        if 0 < bounds.good < size < whole.length:
            why = f"after {counted(bounds.calm, 'calm batch', 'calm batches')}"
            self.report("grown", bounds.size or bounds.good, size, why, whole.shape)
        elif size < usual:
            why = "less memory is free than when it was learned"
            if known is None or not bounds.is_over(usual, free_bytes):
                why = "batches of other shapes or sizes say that more would not fit"
            self.report("lowered", usual, size, why, whole.shape)
        return UniformBatch(whole, self, size, bounds, reading.held_bytes, compiled, needs_two)

    def report(self, kind: EventKind, before: int, after: int, why: str, shape: Shape) -> None:
        """Report a change of size, with the peak memory of the size before."""
        peak = self._peaks.get((shape, before))
        self.events.report(kind, before, after, why, shape=shape.key, peak_bytes=peak)

    def learn(self, sized: UniformBatch, bounds: Bounds) -> None:
        """Keep what a batch that ran has shown; fill in its peak where it was measured earlier."""
        shape, size = sized.whole.shape, sized.size
        self.learned.put(shape, bounds)
        self.memory.after_batch = partial(
            self._learn_retries, shape, size, sized.whole.length, sized.compiled
        )
        if sized.peak_bytes is None:
            sized.peak_bytes = self._peaks.get((shape, size))
            return
        if len(self._peaks) >= _MOST_PEAKS:
            self._peaks.clear()
        self._peaks[shape, size] = sized.peak_bytes

    def _learn_retries(self, shape: Shape, size: int, total: int, compiled: bool, retries: int) -> None:
        """Allocation retries in the last batch lower the size of its shape."""
        bounds = self.learned.of(shape)
        if bounds is not None and retries > 0:
            lower = bounds.thrashed(size, total, compiled=compiled)
            if lower.thrash == 0:
                why = f"allocations were retried {counted(retries, 'time')} in a batch"
                self.report("shrunk", size, lower.size, why, shape)
            self.learned.put(shape, lower)
        elif bounds is not None and bounds.thrash:
            self.learned.put(shape, bounds.settled())

    def count_compiled(self, shape: Shape, sizes: Sequence[int]) -> None:
        """Warn before torch.compile gives up on a function that has had too many sizes."""
        # Sizes alone say little: from the second one on torch may have compiled for any number.
        if self._compiled_before is None:
            self._compiled_before = compilations()
        seen = self._compiled.setdefault(shape.key, set())
        seen.update(sizes)
        limit, made = recompile_limit(), compilations() - self._compiled_before
        if limit is not None and min(len(seen), made) >= limit - 1:
            self.events.once(
                "compiled",
                f"{len(seen)} microbatch sizes made torch compile {made} times, and it gives up at {limit} "
                "for one function: then that runs uncompiled. Keep the batch size the same, or pass "
                "microbatch_size",
            )

    def state_dict(self) -> dict[str, Any]:
        """What was learned, and on which device."""
        return {"version": _STATE_VERSION, **self._circumstances(), "learned": self.learned.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load what was learned; False, and nothing is loaded, for another device or budget."""
        if not hasattr(state, "get") or state.get("version") != _STATE_VERSION:
            raise ValueError(f"state must be what state_dict() returned, not {state!r:.80}")
        now = self._circumstances()
        if "shards" not in state:  # of a version that did not save it
            now["shards"] = None
        compared = ("device", "total_bytes", "budget_bytes", "shards")
        changed = [name for name in compared if state.get(name) != now[name]]
        if changed:
            why = ", ".join(f"{name} was {state.get(name)!r} and is {now[name]!r}" for name in changed)
            self.learned = Learned()
            self.events.report("relearned", 0, 0, why)
            return False
        if state.get("torch") != now["torch"]:
            log.info("sizes were learned with torch %s, and this is %s", state.get("torch"), now["torch"])
        self.learned = Learned.from_dict(state["learned"])
        return True

    def _circumstances(self) -> dict[str, Any]:
        device = self.memory.device
        name = device.name
        if isinstance(device, CudaDevice):
            name = torch.cuda.get_device_name(device.index)
        return {
            "device": name,
            "total_bytes": None if name == "cpu" else device.total_bytes(),
            "budget_bytes": self.memory.budget_bytes,
            "shards": self.shards,
            "torch": str(torch.__version__),
        }


@final
@dataclass(slots=True)
class UniformBatch:
    """A `SizedBatch` whose samples are alike: cut in the batch's order, into near-equal sizes."""

    whole: Batch
    sizer: UniformSizer
    size: int
    bounds: Bounds
    held_bytes: int | None
    compiled: bool
    needs_two: bool = False
    retries: int = 0
    peak_bytes: int | None = None
    watch: None = None  # peaks are read once for the whole batch
    _was_retried: bool = False  # whether this size was already run a second time
    _size_in_use: int | None = None  # where `plan_finer` has cut the batch finer

    def is_new(self) -> bool:
        """Whether this size has never run for this shape."""
        return self.retries > 0 or self.bounds.good < self.size

    def is_proven(self) -> bool:
        return not self.is_new()

    def plan(self, done: Sequence[Microbatch] = ()) -> tuple[Microbatch, ...]:
        start = sum(microbatch.size for microbatch in done)
        left = self.whole.length - start
        if self.compiled:
            sizes = equal(left, min(self.size, left))
            if self.needs_two and len(sizes) > 1 and sizes[-1] == 1 and sizes[-2] > 2:
                sizes = (*sizes[:-2], sizes[-2] - 1, 2)
            self.sizer.count_compiled(self.whole.shape, sizes)
        elif self.size >= left:  # as `balanced` says too: nearly all batches
            sizes = (left,)
        else:
            sizes = balanced(left, self.size)
        if not start:
            self.size = sizes[0]
        return (
            microbatches(sizes, start) if len(sizes) > 1 else (Microbatch(slice(start, start + left), left),)
        )

    def plan_finer(self, count: int, least: int) -> tuple[Microbatch, ...]:
        plan = self.plan()
        self._size_in_use = None
        if len(plan) >= count or self.compiled:
            return plan
        self._size_in_use = self.bounds.size or (self.size if len(plan) > 1 else 0)
        self.size = -(-self.whole.length // max(1, min(count, self.whole.length // least)))
        return self.plan()

    def limit_untested(self, headroom: float) -> None:
        if self.held_bytes is None:  # the device cannot be read: the size that the user has asked for
            return
        memory = self.sizer.memory
        free_bytes = memory.free_bytes(DeviceReading.of(memory.device), fresh=True)
        most = self.bounds.most(None if free_bytes is None else int(free_bytes * (1 - headroom)))
        known = self.bounds.good
        self.size = min(self.size, max(1, known, min(4 * known, 2 * known if most is None else most)))

    def limited(self) -> AbstractContextManager[None]:
        return self.sizer.memory.enforced(self.whole) if self.is_new() else nullcontext()

    def attempt(self, run: Pass) -> Failure | None:
        device, is_new = self.sizer.memory.device, self.is_new()
        if is_new:
            begin_peak(device)

        def note() -> str:
            if run.at < 0:
                return BEFORE_FIRST
            return f"batchfit: raised in microbatch {run.at + 1}, of at most {counted(self.size, 'sample')}"

        failure = run_guarded(run, device=device, last=self.size == 1, note=note)
        if failure is None and is_new:
            self.peak_bytes = peak_since_begun(device)
        return failure

    def shrink(self, failure: Failure, at: int) -> None:
        sizer, shape, before = self.sizer, self.whole.shape, self.size
        reading = sizer.memory.recover()
        self.retries += 1
        self.held_bytes = reading.held_bytes
        if failure.fragmented and not self._was_retried:
            self._was_retried = True
            sizer.report(
                "retry", before, before, f"memory was fragmented: {oom_in_short(failure.message)}", shape
            )
            return
        if before == 1 or (reading.held_bytes or 0) >= sizer.memory.limit(fresh=True):
            what = f"one sample of a batch of {self.whole.length}"
            raise sizer.memory.shortage(what, reading.held_bytes, failure.message, whole=self.whole)
        sizer.learned.failed(shape, before)
        sure = sizer.learned.sure(shape)
        self.bounds = self.bounds.after_oom(before, self.whole.length, sure=sure, compiled=self.compiled)
        self.size = self.bounds.size
        most = self.bounds.most(sizer.memory.free_bytes(reading, fresh=True))
        if most is not None:
            self.size = max(1, min(self.size, max(most, sure if sure < before else 0)))
        self._was_retried = False
        sizer.report("shrunk", before, self.size, oom_in_short(failure.message), shape)

    def finish(self, plan: Sequence[Microbatch]) -> None:
        used = None
        if self.peak_bytes is not None and self.held_bytes is not None:
            used = max(0, self.peak_bytes - self.held_bytes)
        bounds = self.bounds.ran(self.size, self.whole.length, used_bytes=used)
        if self._size_in_use is not None:
            bounds = replace(bounds, size=self._size_in_use)
        self.sizer.learn(self, bounds)
