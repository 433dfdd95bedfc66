"""Which rank gets which samples of an epoch, when the batch size may change and batches are prefetched.

Rules
- An epoch is a row of samples, the same on all ranks. A batch is the next run of them, and each rank gets a
  part of that batch: sizes differ by one at most, the larger ones first (17 over 4 ranks is 5, 4, 4, 4).
- Every rank has a sample in every batch, the last one too, and no sample is lost or repeated: where fewer
  samples than ranks would be left, the batch before gives some of its own, or takes them in.
- Positions count samples over all ranks. What was handed to the user is the position that is saved; what was
  handed to workers is ahead of it by the prefetched batches.
- A change of size discards prefetched batches, by number: all below `discarded_below`. Their samples are
  re-batched, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, final

Item = TypeVar("Item")


def share(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends in a batch of `size`."""
    whole, extra = divmod(size, world_size)
    start = rank * whole + min(rank, extra)
    return start, start + whole + (rank < extra)


def cut(wanted: int, left: int, *, world_size: int = 1, drop_last: bool = False) -> int:
    """The size of the next batch where `left` samples are left; 0 ends the epoch.

    `left` may be capped at `wanted + world_size`: what lies beyond changes nothing.
    """
    if left <= wanted:
        return left if left >= (wanted if drop_last else world_size) else 0
    rest = left - wanted
    if drop_last or rest >= world_size:
        return wanted
    # The last batch would leave a rank without a sample, and DDP would wait for it without end.
    shorter = wanted - (world_size - rest)
    return shorter if shorter >= world_size else left


def count_batches(
    left: int, wanted: Callable[[int, int], int], *, world_size: int = 1, drop_last: bool = False
) -> int:
    """How many batches `left` samples make, with `wanted(number, position)` the size of each."""
    number = position = 0
    while size := cut(wanted(number, position), left - position, world_size=world_size, drop_last=drop_last):
        number += 1
        position += size
    return number


@final
@dataclass(frozen=True, slots=True)
class Deal:
    """One batch of an epoch: its samples by position.

    Attributes:
        serial: number of the batch over all epochs and changes, never used twice.
        number: number of the batch in its epoch.
        start: position of its first sample in the epoch.
        stop: position after its last sample.
    """

    serial: int  # over all epochs and changes, never used twice
    number: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Samples over all ranks."""
        return self.stop - self.start


@final
@dataclass(frozen=True, slots=True)
class DealtSamples:
    """What was handed out of an epoch, and the prefetched batches, in the order in which they will arrive."""

    handed: int = 0
    batches: int = 0  # handed
    cursor: int = 0  # the next deal begins here
    number: int = 0  # and is this batch of the epoch
    serial: int = 0
    discarded_below: int = 0
    prefetched: tuple[Deal, ...] = ()

    def next_epoch(self) -> DealtSamples:
        """A new epoch; the prefetched batches of this one are discarded."""
        return DealtSamples(serial=self.serial, discarded_below=self.serial)

    def resumed(self, handed: int, batches: int) -> DealtSamples:
        """The same epoch, so far on."""
        return DealtSamples(handed, batches, handed, batches, self.serial, self.serial)

    def deal(self, size: int) -> DealtSamples:
        """The next `size` samples are prefetched: the last of `prefetched`."""
        stop = self.cursor + size
        new = Deal(self.serial, self.number, self.cursor, stop)
        prefetched = (*self.prefetched, new)
        return DealtSamples(
            self.handed,
            self.batches,
            stop,
            self.number + 1,
            self.serial + 1,
            self.discarded_below,
            prefetched,
        )

    def is_discarded(self, serial: int) -> bool:
        """Whether that deal is to be thrown away when it arrives."""
        return serial < self.discarded_below

    @property
    def fresh(self) -> tuple[Deal, ...]:
        """The prefetched batches that are not discarded."""
        return tuple(deal for deal in self.prefetched if not self.is_discarded(deal.serial))

    def arrived(self, serial: int) -> DealtSamples:
        """That deal is the next: those before it failed, with an error."""
        prefetched = self.prefetched
        while prefetched[0].serial != serial:
            prefetched = prefetched[1:]
        if prefetched is self.prefetched:
            return self
        return replace(self, prefetched=prefetched)

    def throw_away(self) -> DealtSamples:
        """Discard the first prefetched batch."""
        return replace(self, prefetched=self.prefetched[1:])

    def hand(self) -> DealtSamples:
        """The first prefetched batch goes to the user."""
        first, prefetched = self.prefetched[0], self.prefetched[1:]
        return DealtSamples(
            first.stop,
            first.number + 1,
            self.cursor,
            self.number,
            self.serial,
            self.discarded_below,
            prefetched,
        )

    def hand_part(self, size: int) -> DealtSamples:
        """The first prefetched batch has `size` samples only (0: no batch), near the end of a stream."""
        first, later = self.prefetched[0], self.prefetched[1:]
        missing, none = first.size - size, int(size == 0)
        return DealtSamples(
            first.start + size,
            first.number + 1 - none,
            self.cursor - missing,
            self.number - none,
            self.serial,
            self.discarded_below,
            tuple(Deal(d.serial, d.number - none, d.start - missing, d.stop - missing) for d in later),
        )

    def cancel(self) -> DealtSamples:
        """Discard the prefetched batches: the next deal begins where the last one handed out ended."""
        return DealtSamples(
            self.handed, self.batches, self.handed, self.batches, self.serial, self.serial, self.prefetched
        )


@final
class Tape(Generic[Item]):
    """A stream that can be read again from any point that was not yet forgotten.

    With `snapshot`, the source's own state is noted after every read from it, so that a position is
    that state and a number of items to skip.
    """

    def __init__(
        self, source: Iterator[Item], *, position: int = 0, snapshot: Callable[[], Any] | None = None
    ) -> None:
        self._source = source
        self.kept: list[Item] = []
        self._first = position  # position of the first kept item
        self._snapshot = snapshot
        self.marks: list[tuple[int, Any]] = [(position, snapshot())] if snapshot is not None else []
        self.position = position  # of the next item to be taken
        self.ended = False
        self._broken: Exception | None = None

    def ready(self, count: int) -> int:
        """How many items can be taken, `count` at most; reads as many as that takes."""
        have = self._first + len(self.kept) - self.position
        if have < count and self._broken is not None:
            raise self._broken  # a generator that has raised would say that it has ended
        if have < count and not self.ended:
            for _ in range(count - have):
                try:
                    self.kept.append(next(self._source))
                except StopIteration:
                    self.ended = True
                    break
                except Exception as error:
                    self._broken = error
                    raise
            if self._snapshot is not None:
                self.marks.append((self._first + len(self.kept), self._snapshot()))
            have = self._first + len(self.kept) - self.position
        return min(have, count)

    def take(self, count: int) -> list[Item]:
        """The next items: `count`, or fewer at the end."""
        start = self.position - self._first
        taken = self.kept[start : start + self.ready(count)]
        self.position += len(taken)
        return taken

    def rewind(self, position: int) -> None:
        """Go back to `position`: what was taken from there on will be taken again."""
        if not self._first <= position <= self.position:
            raise ValueError(f"position must be from {self._first} to {self.position}, not {position!r}")
        self.position = position

    def forget(self, position: int) -> None:
        """Nobody will go back to before `position`."""
        count = min(position, self.position) - self._first
        if count > 0:
            del self.kept[:count]
            self._first += count
        while len(self.marks) > 1 and self.marks[1][0] <= self._first:
            del self.marks[0]

    def mark(self, position: int) -> tuple[Any, int]:
        """A state of the source, and how many items to skip from there to `position`."""
        state, behind = None, 0
        for at, state_at in self.marks:
            if at > position:
                break
            state, behind = state_at, position - at
        return state, behind
