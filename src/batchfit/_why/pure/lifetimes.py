"""What was live at each moment of a snapshot's history: each allocation matched with its free, and totals.

Rules:
- A block is live from its `alloc` to its `free_completed`: between the request and that, another stream may
  use it. A history that has no `free_completed` (they can be left out) goes by the requests.
- A history may begin in the middle (it is a ring). What is freed in it without an alloc, and what the
  segments hold at the end without one, was live from the start.
- The end is the last OOM; a history without one ends where it ends. What came after says what was live
  before the history began, and nothing else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from batchfit._why.pure.snapshot import (
    ACTIVE,
    ALLOC,
    FREE,
    FREE_REQUESTED,
    INACTIVE,
    MAP,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    UNMAP,
    AllocatorHistory,
    BlockRow,
    ReservedSegment,
)

NEVER = 2**32 - 1
GRAIN = 512
MIB = 2**20


@final
@dataclass(frozen=True, slots=True)
class EarlierBlock:
    """A block that was live before the history began."""

    address: int
    size: int
    freed: int  # the entry that freed it, or NEVER
    stack: int  # 0: not known


@final
@dataclass(frozen=True, slots=True)
class Lifetimes:
    """A history, and for each of its allocations when it ended."""

    history: AllocatorHistory
    end: int  # the entry of the OOM; the number of entries where there is none
    has_oom: bool
    freed: array[int]  # by entry; of what is no alloc it means nothing
    totals: array[int]  # bytes live after each entry, up to the end
    reserved: array[int]  # bytes reserved after each entry, up to the end
    earlier: tuple[EarlierBlock, ...]

    @property
    def begin_bytes(self) -> int:
        """Bytes that were live before the first entry."""
        return sum(one.size for one in self.earlier)

    @property
    def end_bytes(self) -> int:
        """Bytes that were live at the end."""
        return self.totals[self.end - 1] if self.end else self.begin_bytes

    @property
    def peak(self) -> int:
        """The entry after which the most was live; -1 before all of them."""
        if not self.end or max(self.totals) <= self.begin_bytes:
            return -1
        return self.totals.index(max(self.totals))

    def live_after(self, entry: int) -> Iterator[int]:
        """The allocations that are live after an entry, by their entries; `earlier_after` has the others."""
        actions, freed = self.history.actions, self.freed
        return (n for n in range(entry + 1) if actions[n] == ALLOC and freed[n] > entry)

    def earlier_after(self, entry: int) -> list[EarlierBlock]:
        return [one for one in self.earlier if one.freed > entry]


def follow(history: AllocatorHistory, segments: Sequence[ReservedSegment]) -> Lifetimes:
    """Pair each allocation with its free, and count what is live."""
    actions = history.actions
    count = len(actions)
    end = count - 1 - actions[::-1].index(OOM) if OOM in actions else count
    freeing = FREE if FREE in actions else FREE_REQUESTED
    freed = array("I", [NEVER]) * count
    totals, reserved = array("q"), array("q")
    live: dict[int, int] = {}
    earlier: list[EarlierBlock] = []
    total = mapped = 0
    entries = zip(actions, history.addresses, history.sizes, strict=True)
    for number, (action, address, size) in enumerate(entries):
        if action == ALLOC:
            lost = live.get(address)  # its free was not recorded
            if lost is not None:
                freed[lost] = number
                total -= history.sizes[lost]
            live[address] = number
            total += size
        elif action == freeing:
            begun = live.pop(address, None)
            if begun is None:
                earlier.append(EarlierBlock(address, size, number, 0))
                total -= size
            else:
                freed[begun] = number
                total -= history.sizes[begun]
        elif action in (SEGMENT_ALLOC, MAP):
            mapped += size
        elif action in (SEGMENT_FREE, UNMAP):
            mapped -= size
        if number < end:
            totals.append(total)
            reserved.append(mapped)
    for block in _active(segments):
        begun = live.get(block.address)
        if begun is None:
            earlier.append(EarlierBlock(block.address, block.requested, NEVER, block.stack))
        elif not history.stacks[begun]:  # stacks of what is live may be recorded, and those of entries not
            history.stacks[begun] = block.stack
    base = sum(one.size for one in earlier)
    held = sum(one.size for one in segments) - mapped
    _shift(totals, base)
    _shift(reserved, held)
    return Lifetimes(history, end, end < count, freed, totals, reserved, tuple(earlier))


def _active(segments: Sequence[ReservedSegment]) -> Iterator[BlockRow]:
    return (block for one in segments for block in one.blocks if block.state != INACTIVE)


def _shift(values: array[int], by: int) -> None:
    if by:
        values[:] = array("q", [one + by for one in values])


@final
@dataclass(frozen=True, slots=True)
class FreeMemory:
    """What the allocator holds at the end and gives to nobody."""

    reserved: int
    cached: int  # segments, or whole pages, without a live block: they can be released
    split: int  # inactive blocks of segments with live ones: fragmentation
    largest: int  # the largest block of these
    awaiting: int  # freed, but another stream may still use it
    rounding: int  # live blocks beyond what was asked for


def free_memory(lifetimes: Lifetimes, segments: Sequence[ReservedSegment]) -> FreeMemory:
    """What is reserved and not in use at the end: of the blocks themselves, if nothing happened since."""
    actions = lifetimes.history.actions
    if all(actions[n] not in _MOVES for n in range(lifetimes.end, len(actions))):
        return _of_blocks(segments)
    return _of_extents(lifetimes, segments)


_MOVES = (ALLOC, FREE_REQUESTED, FREE, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP)


def _of_blocks(segments: Sequence[ReservedSegment]) -> FreeMemory:
    cached = split = largest = awaiting = rounding = 0
    for segment in segments:
        free = [block.size for block in segment.blocks if block.state == INACTIVE]
        awaiting += sum(b.size for b in segment.blocks if b.state not in (INACTIVE, ACTIVE))
        rounding += sum(b.size - b.requested for b in segment.blocks if b.state == ACTIVE)
        largest = max([largest, *free])
        whole = _releasable(segment)
        cached += whole
        split += sum(free) - whole
    return FreeMemory(sum(one.size for one in segments), cached, split, largest, awaiting, rounding)


def _releasable(segment: ReservedSegment) -> int:
    """Bytes of a segment that can go back to the driver: all of it, or its whole free pages."""
    if not segment.is_expandable:
        return segment.size if all(one.state == INACTIVE for one in segment.blocks) else 0
    page = 20 * 2**20 if any(one.size > 2**20 for one in segment.blocks) else 2 * 2**20
    found = 0
    for block in segment.blocks:
        if block.state == INACTIVE:
            first = -(-(block.address - segment.address) // page) * page
            last = (block.address + block.size - segment.address) // page * page
            found += max(last - first, 0)
    return found


def _of_extents(lifetimes: Lifetimes, segments: Sequence[ReservedSegment]) -> FreeMemory:
    """The same, of segments as they were then and of what was live then, in whole grains."""
    extents = _segments_then(lifetimes, segments)
    history, entry = lifetimes.history, lifetimes.end - 1
    blocks = [(history.addresses[n], history.sizes[n]) for n in lifetimes.live_after(entry)]
    blocks += [(one.address, one.size) for one in lifetimes.earlier_after(entry)]
    blocks.sort()
    starts = [address for address, _ in blocks]
    # A remainder of up to 1 MiB is not split off a block of a large segment: it is no free block.
    unsplit = 0 if any(one.is_expandable for one in segments) else MIB
    cached = split = largest = 0
    for begin, size in extents.items():
        first, last = bisect_right(starts, begin - 1), bisect_right(starts, begin + size - 1)
        if first == last:
            cached += size
            largest = max(largest, size)
            continue
        at = begin
        for address, asked in [*blocks[first:last], (begin + size, 0)]:
            gap = address - at
            if gap > (unsplit if size > 2 * MIB and at > begin else 0):
                split += gap
                largest = max(largest, gap)
            at = address + -(-asked // GRAIN) * GRAIN
    return FreeMemory(sum(extents.values()), cached, split, largest, 0, 0)


def _segments_then(lifetimes: Lifetimes, segments: Sequence[ReservedSegment]) -> dict[int, int]:
    """The segments at the end of a history, by address: those of the file, with what came later undone."""
    extents = {one.address: one.size for one in segments}
    history = lifetimes.history
    for n in range(len(history) - 1, lifetimes.end - 1, -1):
        action, address, size = history.actions[n], history.addresses[n], history.sizes[n]
        if action in (SEGMENT_FREE, UNMAP):
            extents[address] = size
        elif action in (SEGMENT_ALLOC, MAP):
            _cut(extents, address, size)
    return extents


def _cut(extents: dict[int, int], address: int, size: int) -> None:
    """Take a range of addresses out of the extents."""
    if extents.get(address) == size:
        del extents[address]
        return
    for begin, length in list(extents.items()):
        if begin < address + size and address < begin + length:
            del extents[begin]
            if begin < address:
                extents[begin] = address - begin
            if begin + length > address + size:
                extents[address + size] = begin + length - address - size
