"""Which microbatches for a ragged batch: samples of about one length together, trimmed, in few shapes.

Rules
- One plan a batch, before anything runs. What it may take is learned per kind of call, as a function of
  samples and length, so that a longer batch is cut smaller before it runs out.
- A microbatch is read (its peak, and what was held when it began) while its shape is new, or after something
  ran out; nothing waits for the device.
- After an out-of-memory the whole batch is planned anew. The first time the model decides; where it knew
  nothing, or was wrong twice in one batch, the shape that failed is halved.
- Gradients appear while the first microbatch runs: the shortest samples go first, and where something came
  to stay, the reading of that microbatch says nothing. What is held while the others run is what was there
  when the batch began and what came on top the last time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, final

from batchfit._engine.batch.padding import Layout, Lengths, Side
from batchfit._engine.batch.pure.pieces import Pack, PaddedShape, Piece
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.trim import Trimmer
from batchfit._engine.device import oom_guard as trying
from batchfit._engine.device import readings
from batchfit._engine.device.oom_guard import Failure
from batchfit._engine.device.resolve import CudaDevice
from batchfit._engine.sizing.pure.memory_by_shape import Headroom, MemoryModel
from batchfit._engine.sizing.pure.pack import MULTIPLE, SeenShapes, pack
from batchfit._engine.sizing.uniform import BEFORE, UniformSizer, counted

log = logging.getLogger("batchfit")

_MOST_KINDS = 16
# Of what a microbatch took: less than this stays after each of them (its loss).
_STAYS = 0.02


@dataclass(slots=True)
class _Known:
    """What ragged batches of one kind of call have taught."""

    memory: MemoryModel = field(default_factory=MemoryModel)
    shapes: SeenShapes = field(default_factory=SeenShapes)
    headroom: Headroom = field(default_factory=Headroom)
    layout: Layout | None = None
    width: int = 0  # what the last batch was padded to
    on_top_bytes: float = 0.0  # what the last microbatch read found held beside what the batch began with
    peaks: dict[PaddedShape, int] = field(default_factory=dict)
    unclear: set[PaddedShape] = field(default_factory=set)  # read once, while gradients appeared


@dataclass(slots=True)
class RaggedCall:
    """One ragged batch on its way through a call; reads its microbatches where they are new."""

    whole: Batch
    known: _Known
    sizing: UniformSizer
    trains: bool  # gradients appear
    joins: bool  # outputs are joined: their padded dimensions must show
    held_bytes: int | None
    compiled: bool
    retries: int = 0
    peak_bytes: int | None = None
    again: bool = False  # whether this plan was already tried a second time
    alone: bool = False  # whether known shapes, which may be longer than a sample needs, are left out
    plan: tuple[Piece, ...] = ()  # empty: to be made
    _held_bytes: int | None = None

    @property
    def watch(self) -> RaggedCall | None:
        """Itself, where microbatches can be read."""
        return None if self.held_bytes is None else self

    def begin(self, index: int) -> None:
        """A microbatch begins."""
        if self._is_told(index):
            readings.begin_peak(self.sizing.device)
            self._held_bytes = readings.read(self.sizing.device).held_bytes
        else:
            self._held_bytes = None

    def end(self, index: int) -> None:
        """It ran."""
        held = self._held_bytes
        if held is None or self.held_bytes is None:
            return
        peak, after = readings.peak(self.sizing.device), readings.read(self.sizing.device).held_bytes
        if peak is None or after is None:
            return
        known, extent = self.known, _extent(self.plan[index])
        if self.trains and after - held > _STAYS * (peak - held) and len(self.plan) > 1:
            if extent not in known.unclear:
                known.unclear.add(extent)  # perhaps it runs later in the next batch
                return
        else:
            known.memory = known.memory.seen(*extent, peak, held_bytes=held)
            known.on_top_bytes = max(0, held - self.held_bytes)
        known.peaks[extent] = peak

    def _is_told(self, index: int) -> bool:
        memory = self.known.memory
        return bool(memory.failures or memory.setbacks) or _extent(self.plan[index]) not in self.known.peaks


def _extent(piece: Piece) -> PaddedShape:
    return piece.size, piece.length or 1


@final
class RaggedSizer:
    """The microbatches of one Microbatcher's ragged batches."""

    def __init__(
        self,
        sizing: UniformSizer,
        *,
        most: int | None,
        pad_keys: Sequence[str | int] | None,
        pad_dim: int | None,
        padding_side: Side | None,
    ) -> None:
        self._sizing = sizing
        self._most = most
        self._pad_keys = pad_keys
        self._pad_dim = pad_dim
        self._padding_side = padding_side
        self._known: dict[str, _Known] = {}

    def begin(
        self, whole: Batch, lengths: Lengths, *, compiled: bool, trains: bool, joins: bool
    ) -> RaggedCall:
        """A batch comes: find its padding, and read the device."""
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
        whole.trimmer = trying.run_twice(find_padding, device=self._sizing.device, note=note)
        known.layout = whole.trimmer.layout if known.layout is None else known.layout
        self._look_at_width(known, whole.trimmer.padded_length)
        held = self._sizing.read().held_bytes
        if held is not None:
            self._sizing.limit(fresh=not known.shapes.batches)
        call = RaggedCall(whole, known, self._sizing, trains, joins, held, compiled)
        self.plan(call)
        return call

    def plan(self, call: RaggedCall, done: Sequence[Piece] = ()) -> tuple[Piece, ...]:
        """Microbatches for the samples that are still to run."""
        if call.plan and not done:
            return call.plan
        trimmer, known = call.whole.trimmer, call.known
        assert trimmer is not None
        over = {sample for piece in done for sample in piece.samples}  # type: ignore[union-attr]
        rest = [sample for sample in range(len(trimmer.lengths)) if sample not in over]
        memory, budget = self._memory(call)
        free = call.held_bytes is None and not memory.failures
        packs = pack(
            [trimmer.lengths[sample] for sample in rest],
            most_samples=None if free else lambda length: memory.most_samples(length, budget),
            at_most=self._most,
            padded_length=trimmer.padded_length,
            shapes=SeenShapes(batches=known.shapes.batches) if call.alone else known.shapes,
        )
        if call.joins and not call.alone:
            packs = _told_apart(packs, [piece.length or 0 for piece in done], trimmer.padded_length)
        if call.trains and len(packs) > 1:
            packs = (packs[-1], *packs[:-1])
        call.plan = tuple(
            Piece(tuple(rest[at] for at in one.indices), len(one.indices), one.length) for one in packs
        )
        return call.plan

    def _memory(self, call: RaggedCall) -> tuple[MemoryModel, float]:
        """The memory model as of now, and the bytes that live tensors may take."""
        memory = call.known.memory
        if call.held_bytes is None:
            return memory, float("inf")
        held = call.held_bytes + call.known.on_top_bytes
        budget = call.known.headroom.share * self._sizing.limit(fresh=False)
        return replace(memory, held_bytes=float(held)), budget

    def attempt(self, call: RaggedCall, run: Any) -> Failure | None:
        """Call `run`."""
        return trying.run_guarded(
            run,
            device=self._sizing.device,
            last=max(piece.size for piece in call.plan) == 1,
            note=lambda: (
                BEFORE
                if run.at < 0
                else f"batchfit: raised in microbatch {run.at + 1}, {_named(call.plan[run.at])}"
            ),
        )

    def shrink(self, call: RaggedCall, failure: Failure, at: int) -> None:
        """After what the failed try changed was put back: free what it left, and learn for the next plan."""
        sizing, known = self._sizing, call.known
        readings.recover(sizing.device)
        call.retries += 1
        reading = readings.read(sizing.device)
        sizing.retries_seen = reading.retries
        call.held_bytes = reading.held_bytes
        if call.held_bytes is not None:
            sizing.limit(fresh=True)
        piece = call.plan[at]
        size, length = _extent(piece)
        seen: Any = {"shape": call.whole.shape, "peak_bytes": known.peaks.get((size, length))}
        if failure.fragmented and not call.again:
            call.again = True
            sizing.tell("retry", size, size, f"memory was fragmented ({failure.message})", **seen)
            return
        call.again = False
        is_least = size == 1 and (call.alone or length <= _shortest(call.whole, piece))
        if is_least or (call.held_bytes or 0) >= sizing.limit(fresh=False):
            what = f"one sample of length {length} of {call.whole.shape.key}"
            raise sizing.shortage(what, call.held_bytes, failure.message)
        call.alone = call.alone or size == 1
        trusted = call.retries == 1 and bool(known.memory.readings)
        known.memory = known.memory.ran_out(size if trusted else size // 2 + 1, length)
        memory, budget = self._memory(call)
        after = memory.most_samples(length, budget)
        after = min(size - 1, size if after is None else after)
        sizing.tell("shrunk", size, max(1, after), f"at length {length}: {failure.message}", **seen)
        call.plan = ()

    def finish(self, call: RaggedCall, plan: Sequence[Piece]) -> None:
        """Learn from a batch that ran."""
        known = call.known
        known.shapes = known.shapes.ran(Pack(piece.samples, piece.length or 1) for piece in plan)  # type: ignore[arg-type]
        peaks = [known.peaks[extent] for extent in map(_extent, plan) if extent in known.peaks]
        call.peak_bytes = max(peaks, default=None)
        self._sizing.last = partial(self._after, known)

    def limited(self, call: RaggedCall) -> AbstractContextManager[None]:
        """Inside, no more than the budget can be used, where a shape is new."""
        return nullcontext() if self.is_proven(call) else self._sizing.within_budget(call.whole)

    def is_proven(self, call: RaggedCall) -> bool:
        """Whether all shapes of this batch have run."""
        return set(call.known.shapes.seen).issuperset(map(_extent, call.plan))

    def _after(self, known: _Known, retries: int) -> None:
        """Allocation retries in the last batch leave more room in the next ones."""
        before = known.headroom
        known.headroom = before.after(retries)
        if retries and not _expandable(self._sizing.device):
            self._sizing.inform_once(
                "expandable",
                "allocations of ragged batches were retried: memory lies in blocks of the wrong sizes. Start "
                "the program with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which avoids that",
            )
        if known.headroom.share < before.share:
            log.info("live tensors of ragged batches may take %.0f %% of memory", 100 * known.headroom.share)

    def _look_at_width(self, known: _Known, width: int) -> None:
        """What is longest cannot be longer than its batch, so that odd widths make a new shape a batch."""
        before, known.width = known.width, width
        if width % MULTIPLE and before % MULTIPLE and before != width:
            self._sizing.inform_once(
                "width",
                f"batches are padded to {before}, {width}, ...: each is a new shape. Pad to multiples of "
                f"{MULTIPLE} (pad_to_multiple_of in Hugging Face's collators), and shapes recur",
            )

    def _known_of(self, kind: str) -> _Known:
        known = self._known.pop(kind, None) or _Known()
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
            kind: _Known(
                memory=MemoryModel.from_dict(one["memory"]),
                shapes=SeenShapes.from_dict(one["shapes"]),
                headroom=Headroom(**one["headroom"]),
                layout={path: tuple(dims) for path, dims in one["layout"].items()},
                on_top_bytes=float(one["on_top_bytes"]),
                peaks={(int(n), int(length)): int(peak) for n, length, peak in one["peaks"]},
            )
            for kind, one in stored.items()
        }


def _told_apart(packs: tuple[Pack, ...], done: Sequence[int], padded: int) -> tuple[Pack, ...]:
    """At least two lengths, or none that is trimmed: only so can it be seen which dimensions are padded."""
    lengths = {*done, *(one.length for one in packs)}
    if not packs or len(lengths) > 1 or padded in lengths:
        return packs
    *others, last = packs
    length = min(padded, last.length + MULTIPLE) if others or done else padded
    return (*others, Pack(last.indices, length))


def _shortest(whole: Batch, piece: Piece) -> int:
    """The least that these samples can be trimmed to."""
    assert whole.trimmer is not None
    own = max(whole.trimmer.lengths[sample] for sample in piece.samples)  # type: ignore[union-attr]
    return min(whole.trimmer.padded_length, -(-max(own, 1) // MULTIPLE) * MULTIPLE)


def _named(piece: Piece) -> str:
    return f"{counted(piece.size, 'sample')} of length {piece.length}"


def _expandable(device: object) -> bool:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    on = any("expandable_segments:true" in os.environ.get(name, "").lower() for name in names)
    return on or not isinstance(device, CudaDevice)
