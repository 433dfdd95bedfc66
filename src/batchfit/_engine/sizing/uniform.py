"""Which microbatch size next: what earlier batches taught, and what the device says now.

Rules
- One reading of the device a batch, at its beginning; a peak is measured only when a size is new. Nothing
  waits for the device unless memory has run out.
- A size that is new runs under the budget; one that ran is trusted.
- Every change of size is an event: one line in the log, and a call of `on_event`.
- Where others hold all the memory that may be used, that is said before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch

from batchfit._engine.batch.pure.pieces import Piece, Shape, balanced, equal, pieces
from batchfit._engine.batch.split import Batch
from batchfit._engine.device import oom_guard as trying
from batchfit._engine.device import readings
from batchfit._engine.device.compile import compilations, recompile_limit
from batchfit._engine.device.oom_guard import Failure
from batchfit._engine.device.readings import DeviceReading
from batchfit._engine.device.resolve import CudaDevice, Device
from batchfit._engine.sizing.pure.bounds import Bounds, Learned
from batchfit._engine.sizing.pure.events import EventKind, MicrobatchEvent
from batchfit._engine.sizing.shortage import nothing_fits, whole_sentences
from batchfit.errors import NothingFitsError

log = logging.getLogger("batchfit")

BEFORE = "batchfit: raised before the first microbatch ran, while the batch was cut, weighed or copied"
_STATE_VERSION = 1
_MOST_PEAKS = 1024


def counted(count: int, one: str, many: str = "") -> str:
    """A number and its noun."""
    return f"{count} {one if count == 1 else many or one + 's'}"


@dataclass(slots=True)
class BatchCall:
    """One batch on its way through a call."""

    whole: Batch
    size: int
    bounds: Bounds
    held_bytes: int | None
    compiled: bool
    retries: int = 0
    peak_bytes: int | None = None
    again: bool = False  # whether this size was already tried a second time
    needs_two: bool = False  # BatchNorm trains, which a remainder of one sample is too small for
    watch: None = None  # peaks are read once for the whole batch

    @property
    def is_new(self) -> bool:
        """Whether this size has never run for this shape."""
        return self.retries > 0 or self.bounds.good < self.size


@final
class UniformSizer:
    """The sizes of one Microbatcher."""

    def __init__(
        self,
        device: Device,
        *,
        budget_bytes: int | None,
        most: int | None,
        on_event: Callable[[MicrobatchEvent], object] | None,
        models_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.device = device
        self.learned = Learned()
        self.budget_bytes = budget_bytes
        self.shards = 1  # ranks that share the parameters: with fewer of them less memory is left on each
        self._most = most
        self._on_event = on_event
        self._models_bytes = models_bytes
        self._limit_bytes: int | None = None
        self.last: Callable[[int], None] | None = None  # told how often the last batch's allocations failed
        self.retries_seen: int | None = None
        self._peaks: dict[tuple[Shape, int], int] = {}
        self._compiled: dict[str, set[int]] = {}
        self._compiled_before: int | None = None
        self._said: set[str] = set()

    # --- one batch

    def begin(self, whole: Batch, *, compiled: bool) -> BatchCall:
        """A batch comes: the size to begin with."""
        reading = self.read()
        known = self.learned.of(whole.shape)
        room = self.room(reading, fresh=known is None)
        size = self.learned.begin(whole.shape, whole.length, room, compiled=compiled)
        bounds = known or Bounds()
        most = self._most or whole.length
        usual = min(bounds.size or whole.length, whole.length, most)
        size = min(size, most)
        if 0 < bounds.good < size < whole.length:
            why = f"after {counted(bounds.calm, 'calm batch', 'calm batches')}"
            self.tell("grown", bounds.size or bounds.good, size, why, shape=whole.shape)
        elif size < usual:
            why = "less memory is free than when it was learned"
            if known is None or not bounds.is_over(usual, room):
                why = "batches of other shapes or sizes say that more would not fit"
            self.tell("lowered", usual, size, why, shape=whole.shape)
        return BatchCall(whole, size, bounds, reading.held_bytes, compiled)

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

    def plan(self, call: BatchCall, done: Sequence[Piece] = ()) -> tuple[Piece, ...]:
        """Microbatches for the samples that are still to run."""
        start = sum(piece.size for piece in done)
        left = call.whole.length - start
        if call.compiled:
            sizes = equal(left, min(call.size, left))
            if call.needs_two and len(sizes) > 1 and sizes[-1] == 1 and sizes[-2] > 2:
                sizes = (*sizes[:-2], sizes[-2] - 1, 2)
            self._count_compiled(call.whole.shape, sizes)
        else:
            sizes = balanced(left, call.size)
        if left == call.whole.length:
            call.size = sizes[0]
        return pieces(sizes, start)

    def is_proven(self, call: BatchCall) -> bool:
        """Whether this size has run for this shape."""
        return not call.is_new

    def attempt(self, call: BatchCall, run: Any) -> Failure | None:
        """Call `run`, measuring it where its size is new."""
        new = call.is_new
        if new:
            readings.begin_peak(self.device)
        failure = trying.run_guarded(
            run,
            device=self.device,
            last=call.size == 1,
            note=lambda: (
                BEFORE
                if run.at < 0
                else f"batchfit: raised in microbatch {run.at + 1}, of at most {counted(call.size, 'sample')}"
            ),
        )
        if failure is None and new:
            call.peak_bytes = readings.peak(self.device)
        return failure

    def shrink(self, call: BatchCall, failure: Failure, at: int) -> None:
        """After what the failed try changed was put back: free what it left, and choose what to try next."""
        readings.recover(self.device)
        call.retries += 1
        reading = readings.read(self.device)
        self.retries_seen = reading.retries  # running out is a retry too: it must not count as thrashing
        call.held_bytes = reading.held_bytes
        if failure.fragmented and not call.again:
            call.again = True
            why = f"memory was fragmented ({failure.message})"
            self.tell("retry", call.size, call.size, why, shape=call.whole.shape)
            return
        if call.size == 1 or (reading.held_bytes or 0) >= self.limit(fresh=True):
            what = f"a batch of {call.whole.length}, {call.whole.shape.key}"
            raise self.shortage(what, reading.held_bytes, failure.message)
        before, shape = call.size, call.whole.shape
        self.learned.failed(shape, before)
        sure = self.learned.sure(shape)
        call.bounds = call.bounds.ran_out(before, call.whole.length, sure=sure, compiled=call.compiled)
        call.size = call.bounds.size
        most = call.bounds.most(self.room(reading, fresh=True))
        if most is not None:
            call.size = max(1, min(call.size, max(most, sure if sure < before else 0)))
        call.again = False
        self.tell("shrunk", before, call.size, failure.message, shape=call.whole.shape)

    def loss_ran_out(self, call: Any, size: int, failure: Failure, *, again: bool) -> None:
        """A loss over the whole batch ran out: once more with memory freed; smaller chunks do not help it."""
        readings.recover(self.device)
        if again:
            raise NothingFitsError(
                call.whole.length,
                device=self.device.name,
                budget_bytes=self.limit(fresh=True),
                detail=whole_sentences(failure.message),
                advice="loss_fn ran out over the representations of the whole batch, which smaller chunks of "
                "the encoder do not change: use a smaller batch, or a loss that needs less memory.",
            )
        call.retries += 1
        self.tell("retry", size, size, f"memory ran out in loss_fn ({failure.message})")

    def finish(self, call: BatchCall, plan: Sequence[Piece]) -> None:
        """Learn from a batch that ran."""
        shape, used = call.whole.shape, None
        if call.peak_bytes is not None and call.held_bytes is not None:
            used = max(0, call.peak_bytes - call.held_bytes)
        self.learned.put(shape, call.bounds.ran(call.size, call.whole.length, used_bytes=used))
        self.last = partial(self._after, shape, call.size, call.whole.length, call.compiled)
        if call.peak_bytes is None:
            call.peak_bytes = self._peaks.get((shape, call.size))
            return
        if len(self._peaks) >= _MOST_PEAKS:
            self._peaks.clear()
        self._peaks[shape, call.size] = call.peak_bytes

    def limited(self, call: BatchCall) -> AbstractContextManager[None]:
        """Inside, no more than the budget can be used, where the size is new."""
        return self.within_budget(call.whole) if call.is_new else nullcontext()

    @contextmanager
    def within_budget(self, whole: Batch) -> Iterator[None]:
        """Inside, no more than the budget can be used; where all of it is held already, nothing is tried."""
        if self.budget_bytes is None:
            yield
            return
        with self.device.limit(min(self.budget_bytes, self.device.total_bytes())):
            held = readings.read(self.device).held_bytes
            if held is not None and held >= self.budget_bytes:
                raise self.shortage(f"a batch of {whole.length}, {whole.shape.key}", held)
            yield

    # --- the device

    def read(self) -> DeviceReading:
        """The reading of this batch; who ran the last one is told of allocation retries since then."""
        reading = readings.read(self.device)
        seen, self.retries_seen = self.retries_seen, reading.retries
        if self.last is not None and seen is not None and reading.retries is not None:
            self.last(reading.retries - seen)
        return reading

    def _after(self, shape: Shape, size: int, total: int, compiled: bool, retries: int) -> None:
        """Allocation retries lower the size of the shape that ran."""
        bounds = self.learned.of(shape)
        if bounds is not None and retries > 0:
            lower = bounds.thrashed(size, total, compiled=compiled)
            if lower.thrash == 0:
                why = f"allocations were retried {counted(retries, 'time')} in a batch"
                self.tell("shrunk", size, lower.size, why, shape=shape)
            self.learned.put(shape, lower)
        elif bounds is not None and bounds.thrash:
            self.learned.put(shape, bounds.settled())

    def limit(self, *, fresh: bool) -> int:
        """Bytes that may be used. Asking a GPU takes a while, so its answer is kept."""
        if fresh or self._limit_bytes is None or not isinstance(self.device, CudaDevice):
            free = self.device.budget_bytes()
            self._limit_bytes = free if self.budget_bytes is None else min(free, self.budget_bytes)
        return self._limit_bytes

    def room(self, reading: DeviceReading, *, fresh: bool) -> int | None:
        """Bytes that are left for a batch."""
        return None if reading.held_bytes is None else self.limit(fresh=fresh) - reading.held_bytes

    # --- telling

    def tell(
        self,
        kind: EventKind,
        before: int,
        after: int,
        why: str,
        *,
        shape: Shape | None = None,
        peak_bytes: int | None = None,
    ) -> None:
        """An event: to the log and to the user's function. Without `peak_bytes`, that of `before` samples."""
        peak = peak_bytes
        if peak is None and shape is not None:
            peak = self._peaks.get((shape, before))
        event = MicrobatchEvent(kind, before, after, why, peak, "" if shape is None else shape.key)
        log.log(logging.INFO if kind in ("grown", "lowered", "skipped") else logging.WARNING, "%s", event)
        if self._on_event is not None:
            self._on_event(event)

    def warn_once(self, topic: str, text: str) -> None:
        """A warning that is true for all batches."""
        if topic not in self._said:
            self._said.add(topic)
            log.warning("%s", text)

    def inform_once(self, topic: str, text: str) -> None:
        """Advice that is true for all batches."""
        if topic not in self._said:
            self._said.add(topic)
            log.info("%s", text)

    def _count_compiled(self, shape: Shape, sizes: Sequence[int]) -> None:
        # Sizes alone say little: from the second one on torch may have compiled for any number.
        if self._compiled_before is None:
            self._compiled_before = compilations()
        seen = self._compiled.setdefault(shape.key, set())
        seen.update(sizes)
        limit, made = recompile_limit(), compilations() - self._compiled_before
        if limit is not None and min(len(seen), made) >= limit - 1:
            self.warn_once(
                "compiled",
                f"{len(seen)} microbatch sizes made torch compile {made} times, and it gives up at {limit} "
                "for one function: then that runs uncompiled. Keep the batch size the same, or pass "
                "microbatch_size",
            )

    # --- what survives a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """What was learned, and where."""
        return {"version": _STATE_VERSION, **self._circumstances(), "learned": self.learned.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over what was learned, unless it was on another device or under another budget: then False."""
        if not hasattr(state, "get") or state.get("version") != _STATE_VERSION:
            raise ValueError(f"state must be what state_dict() returned, not {state!r:.80}")
        now = self._circumstances()
        if "shards" not in state:  # of a version that did not say
            now["shards"] = None
        compared = ("device", "total_bytes", "budget_bytes", "shards")
        changed = [name for name in compared if state.get(name) != now[name]]
        if changed:
            why = ", ".join(f"{name} was {state.get(name)!r} and is {now[name]!r}" for name in changed)
            self.learned = Learned()
            self.tell("relearned", 0, 0, why)
            return False
        if state.get("torch") != now["torch"]:
            log.info("sizes were learned with torch %s, and this is %s", state.get("torch"), now["torch"])
        self.learned = Learned.from_dict(state["learned"])
        return True

    def _circumstances(self) -> dict[str, Any]:
        name = self.device.name
        if isinstance(self.device, CudaDevice):
            name = torch.cuda.get_device_name(self.device.index)
        return {
            "device": name,
            "total_bytes": None if name == "cpu" else self.device.total_bytes(),
            "budget_bytes": self.budget_bytes,
            "shards": self.shards,
            "torch": str(torch.__version__),
        }
