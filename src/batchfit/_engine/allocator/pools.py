"""The caching allocator's free blocks: pieces of segments, in the order in which they are taken.

Rules: a free block is in exactly one list, a live one in none; neighbours are those of one segment (or one
expandable range); who joins two blocks has taken both out of their lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import final

from batchfit._engine.allocator.addresses import RANGE_BYTES

# A free block's key is its size, then its address, in one number: comparing numbers is what makes it fast.
ADDRESS_BITS = 56


@final
class Block:
    """A piece of a segment; callers hold it and hand it back, nothing else."""

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

    __slots__ = ("blocks", "keys", "least_rest", "page", "searches", "split_below", "unmapped")

    def __init__(self, page: int, *, least_rest: int, split_below: int) -> None:
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.page = page
        self.least_rest = least_rest
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
