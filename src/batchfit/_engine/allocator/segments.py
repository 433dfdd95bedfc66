"""Segments of the caching allocator: the addresses that the driver gives them, and their free blocks.

Where a segment lies decides which of two free blocks of equal size the caching allocator takes. No document
says it: `AddressSpace` is what an H200 was seen to do.

Rules: a free block is in exactly one list, a live one in none; neighbours are those of one segment (or one
expandable range); who joins two blocks has taken both out of their lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import final

MIB = 2**20
GRAIN = 512
# Divisions are set for each power of two from 1 MiB to 32 GiB; what lies outside takes the nearest.
DIVISION_STEPS = 16
RANGE_BYTES = 1 << 54  # all addresses there are
_CHUNK_BYTES = 32 * MIB  # what the driver takes addresses in
# A free block's key is its size, then its address, in one number: comparing numbers is what makes it fast.
ADDRESS_BITS = 56


@final
class AddressSpace:
    """Where the driver puts segments, as an H200's was seen to.

    It takes addresses in chunks of whole 32 MiB, from the highest gap with room: each chunk lies below the
    one before it. A segment goes into the newest chunk with room, there into the smallest gap, at its low
    end; else to the low end of a new chunk. A chunk that holds nothing any more is given up.
    """

    __slots__ = ("free", "lengths", "starts", "unused")

    def __init__(self) -> None:
        self.unused = [(0, RANGE_BYTES)]
        self.starts: list[int] = []  # of the chunks, by address
        self.lengths: dict[int, int] = {}
        self.free: dict[int, list[tuple[int, int]]] = {}  # of each chunk, oldest first

    def take(self, size: int) -> int:
        for gaps in reversed(self.free.values()):
            best = None
            for gap in gaps:  # a plain loop: most chunks have no gap, and this is asked all the time
                if gap[1] >= size and (best is None or gap[1] < best[1]):
                    best = gap
            if best is not None:
                address, length = best
                position = gaps.index(best)
                gaps[position : position + 1] = [(address + size, length - size)] if length > size else []
                return address
        return self._take_chunk(size)

    def _take_chunk(self, size: int) -> int:
        length = -(-size // _CHUNK_BYTES) * _CHUNK_BYTES
        position = max(place for place, gap in enumerate(self.unused) if gap[1] >= length)
        address, room = self.unused[position]
        self.unused[position : position + 1] = [(address, room - length)] if room > length else []
        start = address + room - length
        insort(self.starts, start)
        self.lengths[start] = length
        self.free[start] = [(start + size, length - size)] if length > size else []
        return start

    def give(self, address: int, size: int) -> None:
        position = bisect_right(self.starts, address) - 1
        start = self.starts[position]
        gaps = self.free[start]
        _add_gap(gaps, address, size)
        if gaps[0] == (start, self.lengths[start]):
            del self.starts[position], self.free[start]
            _add_gap(self.unused, start, self.lengths.pop(start))


def _add_gap(gaps: list[tuple[int, int]], address: int, size: int) -> None:
    """Put a gap among others sorted by address, joined with those next to it."""
    position = bisect_left(gaps, (address,))
    if position < len(gaps) and gaps[position][0] == address + size:
        size += gaps.pop(position)[1]
    if position and sum(gaps[position - 1]) == address:
        position -= 1
        address, before = gaps.pop(position)
        size += before
    gaps.insert(position, (address, size))


@final
class Block:
    """A part of a segment; callers hold it and free it, nothing else."""

    __slots__ = ("address", "born", "live", "mapped", "next", "pool", "prev", "requested", "size")

    def __init__(self, address: int, size: int, pool: Pool | None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.requested = 0
        self.live = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.born = 0  # the pool's count of searches when the block became free: its age


@final
class Pool:
    """The free blocks of one kind, small or large, in the order in which they are taken."""

    __slots__ = ("blocks", "keys", "least_remainder", "page", "searches", "split_below", "unmapped")

    def __init__(self, page: int, *, least_remainder: int, split_below: int) -> None:
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.page = page
        self.least_remainder = least_remainder
        self.split_below = split_below
        self.searches = 0
        self.unmapped: list[tuple[int, Block]] = []  # by address; addresses are unique, blocks never compared

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.born = self.searches

    def remove(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def reserve_range(self, address: int) -> None:
        block = Block(address, RANGE_BYTES, self)
        block.mapped = False
        self.unmapped.append((address, block))

    def forget_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merge_unmapped(self, block: Block) -> None:
        """Put an unmapped block among the others, joined with those next to it."""
        for other in (block.prev, block.next):
            if other is not None and not other.mapped:
                self.forget_unmapped(other)
                absorb(block, other)
        insort(self.unmapped, (block.address, block))

    def join_next(self, block: Block) -> None:
        """A block takes in the free one behind it."""
        other = block.next
        if other is not None and not other.live and other.mapped:
            self.remove(other)
            absorb(block, other)

    def least_expandable(self, position: int) -> int:
        """From the best fit on, past blocks that could still grow: their size is what they could grow to."""

        def could_be(position: int) -> int:
            block = self.blocks[self.keys[position]]
            return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)

        here = could_be(position)
        while position + 1 < len(self.keys) and (following := could_be(position + 1)) < here:
            position, here = position + 1, following
        return position

    def lowest_room(self, size: int) -> Block:
        """The first of free and unmapped blocks in a row that hold `size` bytes, at the lowest address."""
        for _, unmapped in self.unmapped:
            before = unmapped.prev
            first = before if before is not None and not before.live else unmapped
            room = 0
            block: Block | None = first
            while room < size and block is not None and not block.live:
                room += block.size
                block = block.next
            if room >= size:
                return first
        raise AssertionError("the range of addresses ends beyond any size")


def absorb(block: Block, other: Block) -> None:
    """`other`, a neighbour that is in no list any more, becomes part of `block`."""
    if block.prev is other:
        block.address = other.address
        block.prev = other.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = other.next
        if block.next is not None:
            block.next.prev = block
    block.size += other.size


def put_between(block: Block, before: Block | None, after: Block | None) -> None:
    block.prev = before
    block.next = after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block


def empty_block(requested_bytes: int) -> Block:
    """A request of 0 bytes costs nothing: PyTorch returns a null pointer."""
    if requested_bytes < 0:
        raise ValueError(f"requested_bytes must be at least 0, not {requested_bytes!r}")
    block = Block(0, 0, None)
    block.live = True
    return block


def rounded_up(requested: int, size: int, divisions: tuple[int, ...]) -> int:
    """The next of the equal steps between two powers of two (`roundup_power2_divisions`)."""
    power = requested.bit_length() - 1
    count = divisions[min(max(power - 20, 0), DIVISION_STEPS - 1)]
    if count <= 1 or requested <= GRAIN * count:
        return size
    step = (1 << power) // count
    return -(-requested // step) * step
