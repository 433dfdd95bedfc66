"""What a CUDA device's memory would do: PyTorch's caching allocator, replayed in plain Python.

Rules (those of `CUDACachingAllocator.cpp`, for one stream; settings as torch 2.13 reads them):
- A request is rounded up to 512 B. Up to 1 MiB it is small and served from segments of 2 MiB; below
  10 MiB from segments of 20 MiB; from 10 MiB on it gets a segment of its own, in multiples of 2 MiB.
- The smallest free block that is large enough is taken, the lowest address among equals. It is split if at
  least 512 B (small) or more than 1 MiB (large) would be left over. A freed block joins free neighbours.
- Where reserved + segment > capacity, the oversize blocks (with `max_split_size`), then every unsplit cached
  segment are released, and it is tried once more: that is a retry, whether or not it helps. Only then is the
  device out of memory.
- Expandable segments: one range of addresses a pool, mapped in pages of 2 MiB (small) or 20 MiB (large) at
  the lowest address with room, and unmapped in whole free pages. A request needs only the pages that are
  missing: the driver refuses the first page that the GPU has no memory for (`cuMemCreate` in
  `ExpandableSegment::map`), and of one stretch of pages all are mapped or none.
- The capacity is the GPU's memory, or a cap (`AllocatorSettings.capped`: `set_per_process_memory_fraction` is
  below 1). They differ for expandable segments: `alloc_block` compares the cap with reserved + the whole
  request, before it checks which pages are missing, and then maps pages without asking again. So under a cap
  less fits, and reserved may pass the cap by less than a page. Garbage is collected only under a cap.

What is not known here is where the driver puts a new segment, and that decides which of two free blocks of
equal size is taken: `AddressSpace` does as an H200 was seen to. Given the true addresses, 33 recorded runs
of that GPU (torch 2.11, 106,000 allocations, 19 retries) replay without a difference in any event; with
ours, which were fitted to these runs, 27 do, and the worst peak is 3.4 % off. Only default settings were
compared with a GPU: not expandable segments, `max_split_size`, garbage collection or divisions.
Other streams, CUDA graphs, private pools and memory that another process holds are not modelled, nor the
end of an expandable range (9/8 of the GPU: fragmentation aside, all of it), nor a GPU that is itself full
while the cap is not reached.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from batchfit._engine.allocator.segments import (
    ADDRESS_BITS,
    RANGE_BYTES,
    AddressSpace,
    Block,
    Pool,
    absorb,
    put_between,
)
from batchfit._engine.allocator.settings import DIVISION_STEPS, MIB, OWN_SEGMENT, AllocatorSettings

__all__ = ["MIB", "AllocatorSettings", "Block", "CachingAllocator", "Replay", "replay"]

GRAIN = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
SEGMENT_GRAIN = 2 * MIB

_ENDLESS = 1 << 100


@final
class CachingAllocator:
    """One simulated device: stream order, one stream.

    >>> device = CachingAllocator(capacity_bytes=64 * MIB)
    >>> block = device.allocate(3 * MIB)
    >>> device.allocated_bytes // MIB, device.reserved_bytes // MIB
    (3, 20)
    """

    def __init__(self, capacity_bytes: int | None, rules: AllocatorSettings = AllocatorSettings()) -> None:  # noqa: B008 (frozen)
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must be at least 0, not {capacity_bytes!r}")
        self.rules = rules
        self._capacity = _ENDLESS if capacity_bytes is None else capacity_bytes
        self._expandable = rules.expandable_segments
        self._divisions = rules.roundup_power2_divisions * (
            DIVISION_STEPS if len(rules.roundup_power2_divisions) == 1 else 1
        )
        self._max_split = _ENDLESS if rules.max_split_size_bytes is None else rules.max_split_size_bytes
        self._rounding = rules.max_non_split_rounding_bytes or rules.large_segment_bytes
        capped = rules.capped and capacity_bytes is not None
        threshold = rules.garbage_collection_threshold if capped else 0.0
        # What is compared with the whole of a new request, and with the pages that are mapped.
        self._request_limit = self._capacity if capped or not self._expandable else _ENDLESS
        self._page_limit = _ENDLESS if capped else self._capacity
        self._collect_above = int(threshold * self._capacity) if threshold > 0 else None
        self.small = Pool(SMALL_SEGMENT, least_remainder=GRAIN, split_below=_ENDLESS)
        self.large = Pool(
            rules.large_segment_bytes,
            least_remainder=GRAIN if self._expandable else MIB + GRAIN,
            split_below=_ENDLESS if self._expandable else self._max_split,
        )
        self._addresses = AddressSpace()
        if self._expandable:
            self.large.reserve_range(0)  # both start at a page: 20 MiB do not divide the other address
            self.small.reserve_range(RANGE_BYTES)
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.requested_bytes = 0
        self.split_bytes = 0
        self.retries = 0
        self.reset_peaks()

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_split_bytes = self.split_bytes

    def allocate(self, requested_bytes: int) -> Block | None:
        """A block of at least that many bytes; None if the device is out of memory even after a retry."""
        if requested_bytes <= 0:
            return _nothing(requested_bytes)
        size = requested_bytes + GRAIN - 1 & -GRAIN
        if self._divisions:
            size = _round_up(requested_bytes, size, self._divisions)
        pool = self.small if size <= SMALL_REQUEST else self.large
        block = self._find(pool, size)
        if block is None:
            block = self._grow(pool, size)
            if block is None:
                return None
        remainder = block.size - size
        if remainder >= pool.least_remainder and size < pool.split_below:
            block = self._split(pool, block, size)
        else:
            size = block.size
            if not self._expandable and (block.prev is not None or block.next is not None):
                self.split_bytes -= size
        block.live = True
        block.requested = requested_bytes
        self.allocated_bytes += size
        self.requested_bytes += requested_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        return block

    def free(self, block: Block) -> None:
        """Return a block to the cache, joined with its free neighbours."""
        if not block.live:
            raise ValueError("block must be one that is allocated; this one has been freed")
        block.live = False
        pool = block.pool
        if pool is None:  # a request of 0 bytes
            return
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        joined = 0
        other = block.prev
        if other is not None and not other.live and other.mapped:
            joined = other.size
            pool.remove(other)
            absorb(block, other)
        other = block.next
        if other is not None and not other.live and other.mapped:
            joined += other.size
            pool.remove(other)
            absorb(block, other)
        pool.add(block)
        if not self._expandable:
            self.split_bytes -= joined
            if block.prev is not None or block.next is not None:
                self.split_bytes += block.size
                if self.split_bytes > self.peak_split_bytes:
                    self.peak_split_bytes = self.split_bytes

    def empty_cache(self) -> None:
        """Release every unsplit cached segment, or every whole free page, to the driver."""
        for pool in (self.large, self.small):
            for block in list(map(pool.blocks.__getitem__, pool.keys)):
                if self._expandable:
                    self._unmap(pool, block)
                elif block.prev is None and block.next is None:
                    self._release(pool, block)

    def _find(self, pool: Pool, size: int) -> Block | None:
        """The best free block, taken out of the pool."""
        pool.searches += 1
        keys = pool.keys
        position = bisect_left(keys, size << ADDRESS_BITS)
        if position == len(keys):
            return None
        if self._expandable:
            position = _least_expandable(pool, position)
        block = pool.blocks[keys[position]]
        # A block that may not be split serves only requests that would waste little of it.
        limit = self._max_split if size < self._max_split else size + self._rounding
        if block.size >= limit:
            return None
        del pool.blocks[keys.pop(position)]
        return block

    def _split(self, pool: Pool, block: Block, size: int) -> Block:
        """The first `size` bytes of a block; the remainder goes to the pool."""
        front = Block(block.address, size, pool)
        before = front.prev = block.prev
        if before is not None:
            before.next = front
        front.next = block
        was_whole = before is None and block.next is None
        block.prev = front
        block.address += size
        block.size -= size
        pool.add(block)
        if self._expandable:
            return front
        self.split_bytes += block.size if was_whole else -size
        if self.split_bytes > self.peak_split_bytes:
            self.peak_split_bytes = self.split_bytes
        return front

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or more of an expandable one, by releasing what is cached if need be."""
        if self._collect_above is not None:
            self._collect_garbage(self._collect_above)
        block = self._take_segment(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._take_segment(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._take_segment(pool, size)
        return block

    def _take_segment(self, pool: Pool, size: int) -> Block | None:
        if size <= SMALL_REQUEST:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = self.rules.large_segment_bytes
        else:
            segment = size + SEGMENT_GRAIN - 1 & -SEGMENT_GRAIN
        if self.reserved_bytes + segment > self._request_limit:
            return None
        if self._expandable:
            return self._extend(pool, size)
        self._reserve(segment)
        return Block(self._addresses.take(segment), segment, pool)

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _release(self, pool: Pool, block: Block) -> None:
        pool.remove(block)
        self.reserved_bytes -= block.size
        self._addresses.give(block.address, block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With a `max_split_size`: release one cached block that is large enough, or the largest few."""
        if self._expandable or self._max_split == _ENDLESS:
            return False
        wanted = max(size, self._max_split)
        position = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        given = 0
        for key in [pool.keys[position]] if position < len(pool.keys) else pool.keys[::-1]:
            block = pool.blocks[key]
            if given >= wanted or block.size < self._max_split:
                break
            given += block.size
            self._release(pool, block)
        return given >= wanted

    def _collect_garbage(self, threshold: int) -> None:
        """Release large segments, those free for longer than average first, down to the threshold."""
        pool = self.large
        target = self.reserved_bytes - threshold
        if target <= 0 or self._expandable:
            return
        cached = map(pool.blocks.__getitem__, pool.keys)
        waiting = [block for block in cached if block.prev is None and block.next is None]
        while target > 0 and waiting:
            ages = [pool.searches - block.born for block in waiting]
            average = sum(ages) / len(ages)
            old = [block for block, age in zip(waiting, ages, strict=True) if age >= average]
            for block in old:
                target -= block.size
                self._release(pool, block)
            waiting = [block for block, age in zip(waiting, ages, strict=True) if age < average]

    def _extend(self, pool: Pool, size: int) -> Block | None:
        """A free block of at least `size` bytes at the lowest address where mapping pages makes one.

        None where the GPU has no memory for the missing pages; what was mapped before that stays free.
        """
        block = _lowest_room(pool, size)
        if block.mapped:
            pool.remove(block)
        elif not self._map(pool, block, min(size, block.size)):
            return None
        while block.size < size:
            more = block.next
            assert more is not None, "the room was counted"
            if not self._map(pool, more, min(size - block.size, more.size)):
                pool.add(block)
                return None
            absorb(block, more)
        return block

    def _map(self, pool: Pool, block: Block, size: int) -> bool:
        """Back the first pages of an unmapped block with memory: all or none; it is then in no list."""
        mapped = -(-size // pool.page) * pool.page
        if self.reserved_bytes + mapped > self._page_limit:
            return False
        pool.forget_unmapped(block)
        if mapped < block.size:
            remainder = Block(block.address + mapped, block.size - mapped, pool)
            remainder.mapped = False
            put_between(remainder, block, block.next)
            insort(pool.unmapped, (remainder.address, remainder))
            block.size = mapped
        block.mapped = True
        self._reserve(mapped)
        self._join_next(pool, block)
        return True

    def _join_next(self, pool: Pool, block: Block) -> None:
        other = block.next
        if other is not None and not other.live and other.mapped:
            pool.remove(other)
            absorb(block, other)

    def _unmap(self, pool: Pool, block: Block) -> None:
        """Unmap the whole pages inside a free block; what is left of it at either side stays free."""
        first = -(-block.address // pool.page) * pool.page
        last = (block.address + block.size) // pool.page * pool.page
        if first >= last:
            return
        pool.remove(block)
        if first > block.address:
            before = Block(block.address, first - block.address, pool)
            put_between(before, block.prev, block)
            pool.add(before)
        if last < block.address + block.size:
            after = Block(last, block.address + block.size - last, pool)
            put_between(after, block, block.next)
            pool.add(after)
        block.address = first
        block.size = last - first
        block.mapped = False
        self.reserved_bytes -= block.size
        pool.merge_unmapped(block)


def _nothing(requested_bytes: int) -> Block:
    """A request of 0 bytes costs nothing: PyTorch returns a null pointer."""
    if requested_bytes < 0:
        raise ValueError(f"requested_bytes must be at least 0, not {requested_bytes!r}")
    block = Block(0, 0, None)
    block.live = True
    return block


def _round_up(requested: int, size: int, divisions: tuple[int, ...]) -> int:
    """The next of the equal steps between two powers of two (`roundup_power2_divisions`)."""
    power = requested.bit_length() - 1
    count = divisions[min(max(power - 20, 0), DIVISION_STEPS - 1)]
    if count <= 1 or requested <= GRAIN * count:
        return size
    step = (1 << power) // count
    return -(-requested // step) * step


def _least_expandable(pool: Pool, position: int) -> int:
    """From the best fit on, past blocks that could still grow: their size is what they could grow to."""

    def could_be(position: int) -> int:
        block = pool.blocks[pool.keys[position]]
        return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)

    here = could_be(position)
    while position + 1 < len(pool.keys) and (following := could_be(position + 1)) < here:
        position, here = position + 1, following
    return position


def _lowest_room(pool: Pool, size: int) -> Block:
    """The first of the free and unmapped blocks in a row that hold `size` bytes, at the lowest address."""
    for _, unmapped in pool.unmapped:
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


@dataclass(frozen=True, slots=True)
class Replay:
    """What a device did under a list of events: the peaks count up to the event that failed."""

    fits: bool
    failed_at: int | None
    retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_split_bytes: int


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    *,
    capacity_bytes: int | None,
    rules: AllocatorSettings = AllocatorSettings(),  # noqa: B008 (frozen)
) -> Replay:
    """Run events through a fresh device: n >= 0 allocates block n of `sizes[n]` bytes, n < 0 frees block ~n.

    >>> replay([3 * MIB, 512], [0, 1, ~0, ~1], capacity_bytes=None).peak_reserved_bytes // MIB
    22
    """
    device = CachingAllocator(capacity_bytes, rules)
    allocate, free = device.allocate, device.free
    held: dict[int, Block] = {}
    failed_at = None
    for index, event in enumerate(events):
        if event < 0:
            if ~event not in held:
                raise ValueError(f"events must free only what is allocated, not block {~event} at {index}")
            free(held.pop(~event))
            continue
        if event in held:
            raise ValueError(f"events must not allocate block {event} again at {index} while it is held")
        block = allocate(sizes[event])
        if block is None:
            failed_at = index
            break
        held[event] = block
    return Replay(
        fits=failed_at is None,
        failed_at=failed_at,
        retries=device.retries,
        peak_allocated_bytes=device.peak_allocated_bytes,
        peak_reserved_bytes=device.peak_reserved_bytes,
        peak_requested_bytes=device.peak_requested_bytes,
        peak_split_bytes=device.peak_split_bytes,
    )
