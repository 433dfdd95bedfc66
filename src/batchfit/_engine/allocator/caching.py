"""PyTorch's CUDA caching allocator in plain Python: what an allocation or a free does, without a GPU.

Rules (those of `CUDACachingAllocator.cpp`, settings as torch 2.13 reads them: a key that is
not known is ignored, a value that torch refuses is refused):
- A request is rounded up to 512 B. Up to 1 MiB it is small and served from segments of 2 MiB; below
  10 MiB from segments of 20 MiB; from 10 MiB on it gets a segment of its own, in multiples of 2 MiB.
- The smallest free block that is large enough is taken, the lowest address among equals. It is split if at
  least 512 B (small) or more than 1 MiB (large) would be left over. A freed block joins free neighbours.
- Where reserved + segment > capacity, the oversize blocks (with `max_split_size`), then every unsplit cached
  segment are released, and it is tried once more: that is a retry, whether or not it helps. Only then is the
  device out of memory.
- A block that is freed is used again on its own stream only. (Expandable segments: here all streams share.)
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
compared with a GPU: not side streams, expandable segments, `max_split_size`, garbage collection or divisions.
CUDA graphs, private pools and memory that another process holds are not modelled, nor the
end of an expandable range (9/8 of the GPU: fragmentation aside, all of it), nor a GPU that is itself full
while the cap is not reached.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import final

from batchfit._engine.allocator.segments import (
    ADDRESS_BITS,
    DIVISION_STEPS,
    GRAIN,
    MIB,
    RANGE_BYTES,
    AddressSpace,
    Block,
    Pool,
    absorb,
    empty_block,
    put_between,
    rounded_up,
)

__all__ = ["GRAIN", "MIB", "AllocatorSettings", "Block", "CachingAllocator"]

SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
SEGMENT_GRAIN = 2 * MIB
OWN_SEGMENT = 10 * MIB  # from here on a request has a segment of its own
# Settings that change what fits and are not replayed, with what changes nothing (reserves: 2.15).
_NOT_REPLAYED = {"backend": "native", "throw_on_cudamalloc_oom": "False", "expandable_segments_reserve": ""}
_NOT_REPLAYED |= {"expandable_segments_reserve_by_class": ""}
_SETTING = re.compile(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+)")

_ENDLESS = 1 << 100


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Allocator settings that change what fits (PYTORCH_CUDA_ALLOC_CONF).

    >>> AllocatorSettings.from_environment("max_split_size_mb:128").max_split_size_bytes // MIB
    128
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    # Nothing, one number for all sizes, or 16: one for each power of two from 1 MiB on. 0 and 1 mean none.
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float = 0.0
    large_segment_bytes: int = 20 * MIB
    max_non_split_rounding_bytes: int | None = None  # None: as large_segment_bytes
    # Whether the capacity is a cap (a memory fraction below 1, set by key or by call) or the GPU's memory.
    capped: bool = False
    not_replayed: tuple[str, ...] = ()  # settings of the environment that are a caveat

    def __post_init__(self) -> None:
        # What PyTorch refuses too. With it, a free block of max_split_size or more is always a whole segment.
        large, split = self.large_segment_bytes, self.max_split_size_bytes
        if large <= OWN_SEGMENT or large % MIB:
            raise ValueError(f"large_segment_bytes must be whole MiB, more than 10, not {large!r}")
        if split is not None and (split < large or split % MIB):
            raise ValueError(f"max_split_size_bytes must be whole MiB, at least {large}, not {split!r}")
        rounding = self.max_non_split_rounding_bytes
        if rounding is not None and rounding < large:
            raise ValueError(f"max_non_split_rounding_bytes must be at least {large}, not {rounding!r}")
        divisions = self.roundup_power2_divisions
        if len(divisions) not in (0, 1, DIVISION_STEPS) or any(n < 0 or n & (n - 1) for n in divisions):
            raise ValueError(
                f"roundup_power2_divisions must be 0, 1 or {DIVISION_STEPS} powers of two, not {divisions!r}"
            )
        threshold = self.garbage_collection_threshold
        if not 0.0 <= threshold < 1.0:
            raise ValueError(f"garbage_collection_threshold must be from 0 to below 1, not {threshold!r}")

    @classmethod
    def from_environment(cls, text: str) -> AllocatorSettings:
        """The rules that a value of PYTORCH_CUDA_ALLOC_CONF sets; other keys are passed over."""
        found = {key: value.strip() for key, value in _SETTING.findall(text)}
        try:
            return cls(
                expandable_segments=found.get("expandable_segments") == "True",
                max_split_size_bytes=_parse_mib(found.get("max_split_size_mb")),
                roundup_power2_divisions=_parse_divisions(found.get("roundup_power2_divisions", "[]")),
                garbage_collection_threshold=float(found.get("garbage_collection_threshold", 0.0)),
                large_segment_bytes=_parse_mib(found.get("large_segment_size_mb")) or 20 * MIB,
                max_non_split_rounding_bytes=_parse_mib(found.get("max_non_split_rounding_mb")),
                capped=float(found.get("per_process_memory_fraction", 1.0)) < 1.0,
                not_replayed=tuple(
                    key for key, plain in _NOT_REPLAYED.items() if found.get(key, plain) != plain
                ),
            )
        except ValueError as error:
            raise ValueError(
                f"allocator settings must be what PyTorch takes, not {text!r}: {error}"
            ) from None


def _parse_mib(text: str | None) -> int | None:
    return None if text is None else int(text) * MIB


def _parse_divisions(text: str) -> tuple[int, ...]:
    """`"4"`, or `"[256:1,512:2,>:4]"`: a list goes by size in MiB, each entry for its power of two alone."""
    if not text.startswith("["):
        return (int(text),)
    entries = [entry.split(":") for entry in re.sub(r"\s", "", text[1:-1]).split(",") if entry]
    divisions = [0] * DIVISION_STEPS
    last = 0
    for position, (size, count) in enumerate(entries):
        if size == ">":  # all sizes above the entry before it
            divisions[last + 1 :] = [int(count)] * (DIVISION_STEPS - last - 1)
            continue
        last = min(int(size).bit_length() - 1, DIVISION_STEPS - 1)
        if position == 0:  # the first entry is for all smaller sizes too
            divisions[:last] = [int(count)] * last
        divisions[last] = int(count)
    return tuple(divisions) if entries else ()


@final
class CachingAllocator:
    """One simulated device, in stream order.

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
        self.small, self.large = self._new_pools()
        self._side: dict[int, tuple[Pool, Pool]] = {}  # of the streams beside the program's own
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

    def _new_pools(self) -> tuple[Pool, Pool]:
        """The free blocks of a stream, small and large: no other stream is given one of them."""
        least = GRAIN if self._expandable else MIB + GRAIN
        below = _ENDLESS if self._expandable else self._max_split
        large = Pool(self.rules.large_segment_bytes, least_remainder=least, split_below=below)
        return Pool(SMALL_SEGMENT, least_remainder=GRAIN, split_below=_ENDLESS), large

    def _pools_of(self, stream: int) -> tuple[Pool, Pool]:
        if not stream or self._expandable:
            return self.small, self.large
        if stream not in self._side:
            self._side[stream] = self._new_pools()
        return self._side[stream]

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_split_bytes = self.split_bytes

    def allocate(self, requested_bytes: int, stream: int = 0) -> Block | None:
        """A block of at least that many bytes; None if the device is out of memory even after a retry."""
        if requested_bytes <= 0:
            return empty_block(requested_bytes)
        size = requested_bytes + GRAIN - 1 & -GRAIN
        if self._divisions:
            size = rounded_up(requested_bytes, size, self._divisions)
        small, large = self._pools_of(stream) if stream else (self.small, self.large)
        pool = small if size <= SMALL_REQUEST else large
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
        side = (pool for pools in self._side.values() for pool in pools)
        for pool in (self.large, self.small, *side):
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
            position = pool.least_expandable(position)
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
        block = pool.lowest_room(size)
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
        pool.join_next(block)
        return True

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
