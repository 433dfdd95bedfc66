"""Where the driver puts the segments that it is asked for.

That decides which of two free blocks of equal size the caching allocator takes. No document says it: this is
what an H200 was seen to do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import final

MIB = 2**20
RANGE_BYTES = 1 << 54  # all addresses there are
_CHUNK = 32 * MIB  # what the driver takes addresses in


@final
class AddressSpace:
    """Where the driver puts segments, as an H200's was seen to.

    It takes addresses in chunks of whole 32 MiB, from the highest gap with room: each chunk lies below the
    one before it. A segment goes into the newest chunk with room, there into the smallest hole, at its low
    end; else to the low end of a new chunk. A chunk that holds nothing any more is given up.
    """

    __slots__ = ("gaps", "holes", "lengths", "starts")

    def __init__(self) -> None:
        self.gaps = [(0, RANGE_BYTES)]
        self.starts: list[int] = []  # of the chunks, by address
        self.lengths: dict[int, int] = {}
        self.holes: dict[int, list[tuple[int, int]]] = {}  # of each chunk, oldest first

    def take(self, size: int) -> int:
        for holes in reversed(self.holes.values()):
            best = None
            for hole in holes:  # a plain loop: most chunks have no hole, and this is asked all the time
                if hole[1] >= size and (best is None or hole[1] < best[1]):
                    best = hole
            if best is not None:
                address, length = best
                position = holes.index(best)
                holes[position : position + 1] = [(address + size, length - size)] if length > size else []
                return address
        return self._take_chunk(size)

    def _take_chunk(self, size: int) -> int:
        length = -(-size // _CHUNK) * _CHUNK
        position = max(place for place, gap in enumerate(self.gaps) if gap[1] >= length)
        address, room = self.gaps[position]
        self.gaps[position : position + 1] = [(address, room - length)] if room > length else []
        start = address + room - length
        insort(self.starts, start)
        self.lengths[start] = length
        self.holes[start] = [(start + size, length - size)] if length > size else []
        return start

    def give(self, address: int, size: int) -> None:
        position = bisect_right(self.starts, address) - 1
        start = self.starts[position]
        holes = self.holes[start]
        _add_hole(holes, address, size)
        if holes[0] == (start, self.lengths[start]):
            del self.starts[position], self.holes[start]
            _add_hole(self.gaps, start, self.lengths.pop(start))


def _add_hole(holes: list[tuple[int, int]], address: int, size: int) -> None:
    """Put a hole among others sorted by address, joined with those next to it."""
    position = bisect_left(holes, (address,))
    if position < len(holes) and holes[position][0] == address + size:
        size += holes.pop(position)[1]
    if position and sum(holes[position - 1]) == address:
        position -= 1
        address, before = holes.pop(position)
        size += before
    holes.insert(position, (address, size))
