"""One rank's microbatches of a batch that all ranks run in step: what it brings, how it is cut, and its try.

Rules
- All ranks run as many microbatches. One that has fewer cuts its batch finer, and joins what is still missing
  with a sample whose loss counts nothing, before its own: buffers and random numbers are put back after it.
- That others need finer pieces says nothing about this rank's memory, so nothing is learned from it.
- Where a batch cannot be done again, sizes grow with care: from one sample on, with headroom.
- Nothing here talks to another rank except through the models (`lockstep` agrees and votes).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch

from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.transfer import feed
from batchfit._engine.device import readings
from batchfit._engine.sizing.uniform import BatchCall, UniformSizer
from batchfit._engine.snapshot.rewind import Rewind

_HEADROOM: Final = 0.05  # left free where a batch cannot be done again
_MOST_LOOKS: Final = 256  # samples among which one with weight is looked for


@final
@dataclass(slots=True)
class FsdpWork:
    """A batch of this rank, and what the `Microbatcher` does with it."""

    key: Hashable  # the function that runs, and what decides on what it sends
    call: Any  # None: this rank has no samples
    sizer: Any
    sizing: UniformSizer
    rewind: Rewind
    prepare: Callable[[Sequence[Piece]], Any]  # a try of a plan; None: it has no weight
    weigh: Callable[[], float]
    spare: Callable[[], Any]  # one sample that counts, as a microbatch; None where there is none
    idle: Callable[[Any], None]  # runs it for nothing
    check: Callable[[], None]  # refuses a function, before it runs for the first time
    inside: Callable[[], AbstractContextManager[None]]
    device: torch.device | None
    least: int  # samples that a microbatch must have: BatchNorm trains on two at least


@final
class FsdpPass:
    """All microbatches of a try: first those that count nothing, then this rank's own."""

    def __init__(
        self, work: FsdpWork, plan: Sequence[Piece], count: int, *, spare: Any, rest: Callable[[], None]
    ) -> None:
        self._work = work
        self._plan = plan
        self._spare = spare  # a microbatch that counts nothing
        self._rest = rest  # puts the models at rest
        self.count = count
        self.made: Any = None
        self.note = "batchfit: raised in a microbatch of one sample, for a rank that has none of its own"

    def __call__(self) -> None:
        work = self._work
        self.made = work.prepare(self._plan) if self._plan else None
        own = 0 if self.made is None else len(getattr(self.made, "_indices", self._plan))
        missing = self.count - own
        if missing:
            for micro in feed([self._spare] * missing, work.device):
                self._rest()
                work.idle(micro)
                del micro
            work.rewind.back(gradients=False)
        if self.made is not None:
            self.made()
        self._rest()

    @property
    def at(self) -> int:
        return -1 if self.made is None else int(self.made.at)


def is_plain(call: Any) -> bool:
    """Cut by samples, and not by lengths."""
    return isinstance(call, BatchCall)


def cut(work: FsdpWork, count: int) -> tuple[tuple[Piece, ...], int | None]:
    """This rank's microbatches where all run `count`, and the size in use where others need finer ones."""
    call = work.call
    if call is None:
        return (), None
    plan: tuple[Piece, ...] = work.sizer.plan(call)
    if len(plan) >= count or not is_plain(call) or call.compiled:
        return plan, None
    own = call.bounds.size or (call.size if len(plan) > 1 else 0)
    call.size = -(-call.whole.length // max(1, min(count, call.whole.length // work.least)))
    return work.sizer.plan(call), own


def learn(work: FsdpWork, plan: Sequence[Piece], own: int | None) -> None:
    """A batch ran on all ranks. That others needed finer pieces says nothing about this rank's memory."""
    work.sizer.finish(work.call, plan)
    known = None if own is None else work.sizing.learned.of(work.call.whole.shape)
    if known is not None and own is not None:
        work.sizing.learned.put(work.call.whole.shape, replace(known, size=own))


def take_care(work: FsdpWork) -> None:
    """Where nothing can be done again: one sample first, then what the readings allow, with headroom."""
    call = work.call
    if call.held_bytes is None:  # the device does not tell: what the user has asked for
        return
    room = work.sizing.room(readings.read(work.sizing.device), fresh=True)
    most = call.bounds.most(None if room is None else int(room * (1 - _HEADROOM)))
    known = call.bounds.good
    call.size = min(call.size, max(1, known, min(4 * known, 2 * known if most is None else most)))


def sample_of(whole: Batch, weigh: Callable[[Any], float] | None, *, times: int) -> Any:
    """A microbatch of one sample that has weight (its loss is a number then); None where none is found.

    `times`: how often it is there. Where samples cannot be picked, it is the first ones.
    """
    for at in range(min(whole.length, _MOST_LOOKS if whole.can_take and weigh is not None else 1)):
        if whole.can_take:
            micro = whole.take([at] * times, None if whole.trimmer is None else whole.trimmer.padded_length)
        else:
            first = min(times, whole.length)
            micro = whole.cut([first, whole.length - first] if whole.length > first else [first])[0]
        if weigh is None or weigh(micro):
            return micro
    return None
