"""Which microbatches for a ragged batch: samples of about one length together, trimmed, in few shapes.

Rules
- One plan per batch, before anything runs. The memory of a microbatch is learned per kind of call, as a
  function of samples and length, so that a longer batch is cut smaller before an OOM.
- A microbatch is read (its peak, and what was held when it began) while its shape is new, or after an OOM.
  Nothing synchronizes.
- After an OOM the whole batch is planned again. The first time the memory model decides; where it knew
  nothing, or was wrong twice in one batch, the shape that failed is halved.
- Gradients are allocated while the first microbatch runs: the shortest samples go first, and where memory
  stays allocated, the reading of that microbatch is not used. Held while the others run is what was held
  when the batch began, and what came on top the last time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, final

from batchfit._engine.batch.padding import Layout, Lengths, Side
from batchfit._engine.batch.pure.microbatch import Microbatch, PaddedShape
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.trim import Trimmer
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.oom import Failure, run_guarded, run_twice
from batchfit._engine.sizing.interface import Pass, PassWatch
from batchfit._engine.sizing.memory_budget import DeviceReading, MemoryBudget, begin_peak, peak_since_begun
from batchfit._engine.sizing.pure.memory_by_shape import Headroom, MemoryModel
from batchfit._engine.sizing.pure.pack import MULTIPLE, SeenShapes, pack
from batchfit._engine.sizing.pure.sizes import EventLog, oom_in_short
from batchfit._engine.sizing.uniform import BEFORE_FIRST, counted
from batchfit._engine.torch_private.allocator import settings_text

log = logging.getLogger("batchfit")

_MOST_KINDS = 16
# Of what a microbatch allocated: less than this stays allocated after each of them (its loss).
_STAYING_SHARE = 0.02


@dataclass(slots=True)
class RaggedKnowledge:
    """What ragged batches of one kind of call have shown."""

    memory: MemoryModel = field(default_factory=MemoryModel)
    shapes: SeenShapes = field(default_factory=SeenShapes)
    headroom: Headroom = field(default_factory=Headroom)
    layout: Layout | None = None
    width: int = 0  # what the last batch was padded to
    on_top_bytes: float = 0.0  # what the last microbatch read found held beside what the batch began with
    peaks: dict[PaddedShape, int] = field(default_factory=dict)
    unclear: set[PaddedShape] = field(default_factory=set)  # read once, while gradients were allocated


@final
class RaggedSizer:
    """The microbatches of one Microbatcher's ragged batches."""

    def __init__(
        self,
        memory: MemoryBudget,
        events: EventLog,
        *,
        most: int | None,
        pad_keys: Sequence[str | int] | None,
        pad_dim: int | None,
        padding_side: Side | None,
    ) -> None:
        self.memory = memory
        self.events = events
        self._most = most
        self._pad_keys = pad_keys
        self._pad_dim = pad_dim
        self._padding_side = padding_side
        self._known: dict[str, RaggedKnowledge] = {}

    def begin(
        self, whole: Batch, lengths: Lengths, *, compiled: bool, trains: bool, joins: bool
    ) -> RaggedBatch:
        """Find the padding of a batch, read the device, and plan."""
        known = self._known_of(whole.shape.family)
        find_padding = partial(
            Trimmer.of,
            whole.batch,
            lengths,
            pad_keys=self._pad_keys,
            pad_dim=self._pad_dim,
            padding_side=self._padding_side,
            layout=known.layout,
            samples=whole.samples,
        )
        note = "batchfit: raised while the lengths of a batch were read"
        whole.trimmer = run_twice(find_padding, device=self.memory.device, note=note)
        known.layout = whole.trimmer.layout if known.layout is None else known.layout
        self._check_width(known, whole.trimmer.padded_length)
        held = self.memory.begin_batch().held_bytes
        if held is not None:
            self.memory.limit(fresh=not known.shapes.batches)
        sized = RaggedBatch(whole, self, known, trains, joins, held, compiled)
        sized.plan()
        return sized

    def packed(
        self,
        lengths: Sequence[int],
        padded_length: int,
        shapes: SeenShapes,
        memory: MemoryModel,
        budget: float | None,
    ) -> tuple[Microbatch, ...]:
        """Pack samples of these lengths; `budget` None: no limit is known."""
        return pack(
            lengths,
            most_samples=None if budget is None else lambda length: memory.most_samples(length, budget),
            at_most=self._most,
            padded_length=padded_length,
            shapes=shapes,
        )

    def learn_retries(self, known: RaggedKnowledge, retries: int) -> None:
        """Allocation retries in the last batch leave more memory free in the next ones."""
        before = known.headroom
        known.headroom = before.after(retries)
        if retries and not _expandable(self.memory.device):
            self.events.once(
                "expandable",
                "allocations of ragged batches were retried: memory is fragmented. Start the program with "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which avoids that",
                logging.INFO,
            )
        if known.headroom.share < before.share:
            log.info("live tensors of ragged batches may take %.0f %% of memory", 100 * known.headroom.share)

    def _check_width(self, known: RaggedKnowledge, width: int) -> None:
        """The longest sample is no longer than its batch, so odd widths make a new shape per batch."""
        before, known.width = known.width, width
        if width % MULTIPLE and before % MULTIPLE and before != width:
            self.events.once(
                "width",
                f"batches are padded to {before}, {width}, ...: each is a new shape. Pad to multiples of "
                f"{MULTIPLE} (pad_to_multiple_of in Hugging Face's collators), and shapes recur",
                logging.INFO,
            )

    def _known_of(self, kind: str) -> RaggedKnowledge:
        known = self._known.pop(kind, None) or RaggedKnowledge()
        self._known[kind] = known
        if len(self._known) > _MOST_KINDS:
            del self._known[next(iter(self._known))]
        return known

    def forget(self) -> None:
        """As if no batch had run."""
        self._known.clear()

    def to_dict(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {
            kind: {
                "memory": known.memory.to_dict(),
                "shapes": known.shapes.to_dict(),
                "headroom": asdict(known.headroom),
                "layout": {path: list(dims) for path, dims in (known.layout or {}).items()},
                "on_top_bytes": known.on_top_bytes,
                "peaks": [[*extent, peak] for extent, peak in known.peaks.items()],
            }
            for kind, known in self._known.items()
        }

    def load(self, stored: Mapping[str, Any]) -> None:
        """Take over what `to_dict` wrote."""
        self._known = {
            kind: RaggedKnowledge(
                memory=MemoryModel.from_dict(one["memory"]),
                shapes=SeenShapes.from_dict(one["shapes"]),
                headroom=Headroom(**one["headroom"]),
                layout={path: tuple(dims) for path, dims in one["layout"].items()},
                on_top_bytes=float(one["on_top_bytes"]),
                peaks={(int(n), int(length)): int(peak) for n, length, peak in one["peaks"]},
            )
            for kind, one in stored.items()
        }


@final
@dataclass(slots=True)
class RaggedBatch:
    """A `SizedBatch` of samples of different lengths; reads the memory of microbatches whose shape is new."""

    whole: Batch
    sizer: RaggedSizer
    known: RaggedKnowledge
    trains: bool  # gradients are allocated
    joins: bool  # outputs are joined: their padded dimensions must show
    held_bytes: int | None
    compiled: bool
    retries: int = 0
    peak_bytes: int | None = None
    planned: tuple[Microbatch, ...] = ()  # empty: to be planned
    _was_retried: bool = False  # whether this plan was already run a second time
    _ignores_shapes: bool = False  # known shapes may be longer than a sample needs
    _held_before: int | None = None

    @property
    def watch(self) -> PassWatch | None:
        return None if self.held_bytes is None else self

    def begin(self, index: int) -> None:
        """A microbatch begins."""
        self._held_before = None
        if self._is_read(index):
            device = self.sizer.memory.device
            begin_peak(device)
            self._held_before = DeviceReading.of(device).held_bytes

    def end(self, index: int) -> None:
        """It ran."""
        held, device = self._held_before, self.sizer.memory.device
        if held is None or self.held_bytes is None:
            return
        peak, after = peak_since_begun(device), DeviceReading.of(device).held_bytes
        if peak is None or after is None:
            return
        known, extent = self.known, self.planned[index].padded_shape
        if self.trains and after - held > _STAYING_SHARE * (peak - held) and len(self.planned) > 1:
            if extent not in known.unclear:
                known.unclear.add(extent)  # perhaps it runs later in the next batch
                return
        else:
            known.memory = known.memory.seen(*extent, peak, held_bytes=held)
            known.on_top_bytes = max(0, held - self.held_bytes)
        known.peaks[extent] = peak

    def _is_read(self, index: int) -> bool:
        memory = self.known.memory
        return (
            bool(memory.failures or memory.setbacks)
            or self.planned[index].padded_shape not in self.known.peaks
        )

    def plan(self, done: Sequence[Microbatch] = ()) -> tuple[Microbatch, ...]:
        if self.planned and not done:
            return self.planned
        trimmer, known = self.whole.trimmer, self.known
        assert trimmer is not None
        count = self.whole.length
        over = {sample for microbatch in done for sample in microbatch.indices(count)}
        rest = [sample for sample in range(count) if sample not in over]
        memory, budget = self.memory_model()
        packs = self.sizer.packed(
            [trimmer.lengths[sample] for sample in rest],
            trimmer.padded_length,
            SeenShapes(batches=known.shapes.batches) if self._ignores_shapes else known.shapes,
            memory,
            None if self.held_bytes is None and not memory.failures else budget,
        )
        if self.joins and not self._ignores_shapes:
            packs = _of_two_lengths(
                packs, [microbatch.length or 0 for microbatch in done], trimmer.padded_length
            )
        if self.trains and len(packs) > 1:
            packs = (packs[-1], *packs[:-1])
        self.planned = tuple(
            one._replace(samples=tuple(rest[at] for at in one.indices(len(rest)))) for one in packs
        )
        return self.planned

    def plan_finer(self, count: int, least: int) -> tuple[Microbatch, ...]:
        return self.plan()  # packed by length: ranks that need more microbatches run others beside these

    def limit_untested(self, headroom: float) -> None:
        """Ragged microbatches begin small anyway: the memory model grows from what ran."""

    def memory_model(self) -> tuple[MemoryModel, float]:
        """The memory model as of now, and the bytes that live tensors may take."""
        memory = self.known.memory
        if self.held_bytes is None:
            return memory, float("inf")
        held = self.held_bytes + self.known.on_top_bytes
        budget = self.known.headroom.share * self.sizer.memory.limit(fresh=False)
        return replace(memory, held_bytes=float(held)), budget

    def is_proven(self) -> bool:
        return set(self.known.shapes.seen).issuperset(microbatch.padded_shape for microbatch in self.planned)

    def limited(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_proven() else self.sizer.memory.enforced(self.whole)

    def attempt(self, run: Pass) -> Failure | None:
        def note() -> str:
            if run.at < 0:
                return BEFORE_FIRST
            microbatch = self.planned[run.at]
            samples = counted(microbatch.size, "sample")
            return f"batchfit: raised in microbatch {run.at + 1}, {samples} of length {microbatch.length}"

        last = max(microbatch.size for microbatch in self.planned) == 1
        return run_guarded(run, device=self.sizer.memory.device, last=last, note=note)

    def shrink(self, failure: Failure, at: int) -> None:
        memory, known = self.sizer.memory, self.known
        self.retries += 1
        self.held_bytes = memory.recover().held_bytes
        if self.held_bytes is not None:
            memory.limit(fresh=True)
        microbatch = self.planned[at]
        size, length = microbatch.padded_shape
        report = partial(
            self.sizer.events.report, shape=self.whole.shape.key, peak_bytes=known.peaks.get((size, length))
        )
        if failure.fragmented and not self._was_retried:
            self._was_retried = True
            report("retry", size, size, f"memory was fragmented ({failure.message})")
            return
        self._was_retried = False
        is_least = size == 1 and (self._ignores_shapes or length <= _shortest(self.whole, microbatch))
        if is_least or (self.held_bytes or 0) >= memory.limit(fresh=False):
            what = f"one sample of length {length}"
            raise memory.shortage(what, self.held_bytes, failure.message, whole=self.whole)
        self._ignores_shapes = self._ignores_shapes or size == 1
        trusted = self.retries == 1 and bool(known.memory.readings)
        known.memory = known.memory.after_oom(size if trusted else size // 2 + 1, length)
        model, budget = self.memory_model()
        after = model.most_samples(length, budget)
        after = min(size - 1, size if after is None else after)
        report("shrunk", size, max(1, after), f"at length {length}: {oom_in_short(failure.message)}")
        self.planned = ()

    def finish(self, plan: Sequence[Microbatch]) -> None:
        known = self.known
        known.shapes = known.shapes.ran(plan)
        peaks = [
            known.peaks[extent]
            for extent in (microbatch.padded_shape for microbatch in plan)
            if extent in known.peaks
        ]
        self.peak_bytes = max(peaks, default=None)
        self.sizer.memory.after_batch = partial(self.sizer.learn_retries, known)


def _of_two_lengths(
    packs: tuple[Microbatch, ...], done: Sequence[int], padded: int
) -> tuple[Microbatch, ...]:
    """At least two lengths, or none that is trimmed: otherwise padded dimensions do not show."""
    lengths = {*done, *(one.padded_shape[1] for one in packs)}
    if not packs or len(lengths) > 1 or padded in lengths:
        return packs
    *others, last = packs
    length = min(padded, last.padded_shape[1] + MULTIPLE) if others or done else padded
    return (*others, last._replace(length=length))


def _shortest(whole: Batch, microbatch: Microbatch) -> int:
    """The least that these samples can be trimmed to."""
    assert whole.trimmer is not None
    own = max(whole.trimmer.lengths[sample] for sample in microbatch.indices(whole.length))
    return min(whole.trimmer.padded_length, -(-max(own, 1) // MULTIPLE) * MULTIPLE)


def _expandable(device: object) -> bool:
    on = "expandable_segments:true" in settings_text().lower()
    return on or not isinstance(device, CudaDevice)
