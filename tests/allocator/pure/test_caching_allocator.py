"""The allocator model: each rule by hand, and what must hold for any events (a slow model agrees too)."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from replayed import Replay, replay

from batchfit._engine.allocator.caching import MIB, AllocatorSettings, Block, CachingAllocator
from batchfit._engine.allocator.segments import AddressSpace

EXPANDABLE = AllocatorSettings(expandable_segments=True)
CAPPED = AllocatorSettings(expandable_segments=True, capped=True)


def take(device: CachingAllocator, size: int) -> Block:
    block = device.allocate(size)
    assert block is not None
    return block


# ---------------------------------------------------------------- rounding and segments


@pytest.mark.parametrize(
    ("requested", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of exactly 1 MiB stays with the block
        (11 * MIB - 1, 12 * MIB, 12 * MIB),
    ],
)
def test_a_first_request(requested: int, allocated: int, reserved: int) -> None:
    device = CachingAllocator(None)
    take(device, requested)
    assert (device.allocated_bytes, device.reserved_bytes) == (allocated, reserved)
    assert device.requested_bytes == requested
    assert device.split_bytes == reserved - allocated


def test_nothing_costs_nothing() -> None:
    device = CachingAllocator(0)
    block = take(device, 0)
    assert (device.reserved_bytes, device.allocated_bytes, device.requested_bytes) == (0, 0, 0)
    device.free(block)
    with pytest.raises(ValueError, match="has been freed"):
        device.free(block)
    assert device.allocate(1) is None


def test_wrong_arguments_are_named() -> None:
    device = CachingAllocator(None)
    with pytest.raises(ValueError, match="requested_bytes must be at least 0, not -1"):
        device.allocate(-1)
    with pytest.raises(ValueError, match="capacity_bytes must be at least 0, not -1"):
        CachingAllocator(-1)
    block = take(device, 4 * MIB)
    device.free(block)
    with pytest.raises(ValueError, match="has been freed"):
        device.free(block)


# ---------------------------------------------------------------- best fit, split, join


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    device = CachingAllocator(None)
    blocks = [take(device, size * MIB) for size in (40, 14, 30)]
    for block in blocks:
        device.free(block)
    taken = take(device, 13 * MIB)
    assert taken is blocks[1], "the 14 MiB segment; a rest of 1 MiB is not split"
    assert device.allocated_bytes == 14 * MIB
    start = blocks[2].address
    assert take(device, 20 * MIB).address == start
    assert device.split_bytes == 10 * MIB
    assert device.reserved_bytes == 84 * MIB


def test_the_lowest_address_among_equals() -> None:
    device = CachingAllocator(None)
    blocks = [take(device, 12 * MIB) for _ in range(5)]
    by_address = sorted(blocks, key=lambda block: block.address)
    assert by_address != blocks
    for block in blocks:
        device.free(block)
    assert [take(device, 12 * MIB) for _ in range(5)] == by_address


def test_small_and_large_do_not_share() -> None:
    device = CachingAllocator(None)
    device.free(take(device, 40 * MIB))
    take(device, MIB)
    assert device.reserved_bytes == 42 * MIB
    small = take(device, 512)
    assert device.reserved_bytes == 42 * MIB
    device.free(small)
    take(device, MIB)
    assert device.reserved_bytes == 42 * MIB, "the rest of 1 MiB is whole again"


def test_a_block_joins_both_neighbours_and_no_other_segment() -> None:
    device = CachingAllocator(None)
    a, b, c = (take(device, 5 * MIB) for _ in range(3))
    other = take(device, 20 * MIB)
    device.free(a)
    device.free(c)
    assert device.split_bytes == 15 * MIB
    assert b.address == a.address + 5 * MIB
    device.free(b)
    assert device.split_bytes == 0, "the segment is whole"
    device.free(other)
    take(device, 21 * MIB)
    assert device.reserved_bytes == (20 + 20 + 22) * MIB, "two segments of 20 MiB do not make one of 40"


# ---------------------------------------------------------------- where segments lie


def test_segments_lie_as_on_a_gpu() -> None:
    space = AddressSpace()
    top = space.take(20 * MIB)
    below = space.take(20 * MIB)
    assert below == top - 32 * MIB, "chunks of 32 MiB, downwards"
    assert space.take(12 * MIB) == below + 20 * MIB, "the rest of the newest chunk"
    assert space.take(2 * MIB) == top + 20 * MIB, "then of the one before"
    wide = space.take(33 * MIB)
    assert wide == below - 64 * MIB
    last = space.take(30 * MIB)
    assert last == wide + 33 * MIB
    small = space.take(2 * MIB)
    assert small == top + 22 * MIB
    space.give(wide, 33 * MIB)
    assert space.take(20 * MIB) == wide, "the chunk is kept while it holds something"
    space.give(wide, 20 * MIB)
    space.give(last, 30 * MIB)
    assert space.take(40 * MIB) == wide, "given up, and the highest gap again"
    space.give(below, 20 * MIB)
    space.give(below + 20 * MIB, 12 * MIB)
    assert space.take(26 * MIB) == below, "the gap between two chunks"


def test_the_smallest_hole_of_a_chunk() -> None:
    space = AddressSpace()
    start = space.take(60 * MIB)
    assert space.take(2 * MIB) == start + 60 * MIB
    space.give(start, 60 * MIB)
    assert space.take(2 * MIB) == start + 62 * MIB
    assert space.take(2 * MIB) == start


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 100), st.integers(1, 70)), max_size=60))
def test_segments_never_overlap(moves: list[tuple[bool, int, int]]) -> None:
    space = AddressSpace()
    held: list[tuple[int, int]] = []
    for gives, which, size in moves:
        if gives and held:
            space.give(*held.pop(which % len(held)))
        else:
            held.append((space.take(size * MIB), size * MIB))
        for (low, length), (high, _) in itertools.pairwise(sorted(held)):
            assert low + length <= high
    for segment in held:
        space.give(*segment)
    assert space.unused == [(0, 1 << 54)]
    assert not space.starts
    assert not space.free
    assert not space.lengths


# ---------------------------------------------------------------- the cap


def test_out_of_memory_counts_a_retry_and_gives_the_cache_back() -> None:
    device = CachingAllocator(64 * MIB)
    keep = take(device, 30 * MIB)
    device.free(take(device, 20 * MIB))
    assert device.allocate(40 * MIB) is None
    assert device.retries == 1
    assert device.reserved_bytes == 30 * MIB
    assert take(device, 34 * MIB)
    assert device.reserved_bytes == 64 * MIB, "exactly the capacity fits"
    assert device.retries == 1
    device.free(keep)
    assert device.peak_reserved_bytes == 64 * MIB


def test_a_retry_helps_unless_the_cached_segment_is_split() -> None:
    device = CachingAllocator(64 * MIB)
    device.free(take(device, 40 * MIB))
    assert device.allocate(50 * MIB) is not None
    assert device.retries == 1
    device = CachingAllocator(64 * MIB)
    whole = take(device, 40 * MIB)
    device.free(whole)
    take(device, 2 * MIB)  # splits it
    assert device.allocate(50 * MIB) is None
    assert device.reserved_bytes == 40 * MIB


def test_a_cached_small_segment_goes_back_too() -> None:
    device = CachingAllocator(22 * MIB)
    device.free(take(device, 100))
    assert device.allocate(22 * MIB) is not None
    assert device.retries == 1


def test_empty_cache_keeps_split_segments() -> None:
    device = CachingAllocator(None)
    first, second = take(device, 3 * MIB), take(device, 3 * MIB)
    device.free(take(device, 30 * MIB))
    device.free(first)
    device.empty_cache()
    assert device.reserved_bytes == 20 * MIB
    assert device.retries == 0
    device.free(second)
    device.empty_cache()
    assert device.reserved_bytes == device.split_bytes == 0


def test_peaks_start_again_from_what_is_held() -> None:
    device = CachingAllocator(None)
    device.free(take(device, 30 * MIB))
    take(device, 3 * MIB)
    device.reset_peaks()
    assert device.peak_allocated_bytes == device.peak_requested_bytes == 3 * MIB
    assert device.peak_reserved_bytes == 30 * MIB
    assert device.peak_split_bytes == 27 * MIB


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", EXPANDABLE),
        (
            "expandable_segments:False, max_split_size_mb: 128",
            AllocatorSettings(max_split_size_bytes=128 * MIB),
        ),
        (
            "backend:native,garbage_collection_threshold:0.8,pinned_use_background_threads:True",
            AllocatorSettings(garbage_collection_threshold=0.8),
        ),
        ("per_process_memory_fraction:0.5,expandable_segments:True", CAPPED),
        ("per_process_memory_fraction:1.0", AllocatorSettings()),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_power2_divisions=(4,))),
        # As torch 2.13 reads it: asked of its own library.
        (
            "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],max_split_size_mb:64",
            AllocatorSettings(
                roundup_power2_divisions=(8,) * 7 + (2, 4, 2, 4) + (1,) * 5, max_split_size_bytes=64 * MIB
            ),
        ),
        (
            "roundup_power2_divisions:[256:2, 1024:4]",
            AllocatorSettings(roundup_power2_divisions=(2,) * 9 + (0, 4) + (0,) * 5),
        ),
        ("roundup_power2_divisions:[>:8]", AllocatorSettings(roundup_power2_divisions=(0,) + (8,) * 15)),
        (
            "roundup_power2_divisions:[1:2,65536:4]",
            AllocatorSettings(roundup_power2_divisions=(2,) + (0,) * 14 + (4,)),
        ),
        ("large_segment_size_mb:32", AllocatorSettings(large_segment_bytes=32 * MIB)),
        ("max_non_split_rounding_mb:40", AllocatorSettings(max_non_split_rounding_bytes=40 * MIB)),
        ("backend:cudaMallocAsync", AllocatorSettings(not_replayed=("backend",))),
        ("backend:native,throw_on_cudamalloc_oom:False", AllocatorSettings()),
        (
            "throw_on_cudamalloc_oom:True,expandable_segments_reserve_by_class:[a:0.5]",
            AllocatorSettings(
                not_replayed=("throw_on_cudamalloc_oom", "expandable_segments_reserve_by_class")
            ),
        ),
    ],
)
def test_settings_are_read(text: str, rules: AllocatorSettings) -> None:
    assert AllocatorSettings.from_environment(text) == rules


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:10",
        "max_split_size_mb:many",
        "large_segment_size_mb:10",
        "large_segment_size_mb:32,max_split_size_mb:25",
        "max_non_split_rounding_mb:5",
        "garbage_collection_threshold:1.0",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[64]",
    ],
)
def test_settings_that_pytorch_refuses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allocator settings must be what PyTorch takes"):
        AllocatorSettings.from_environment(text)


def test_divisions_of_a_power_of_two() -> None:
    def rounded(requested: int, *divisions: int) -> int:
        device = CachingAllocator(None, AllocatorSettings(roundup_power2_divisions=divisions))
        take(device, requested)
        return device.allocated_bytes

    assert rounded(10_000, 4) == 8192 + 2048
    assert rounded(8192, 4) == 8192
    assert rounded(2048, 4) == 2048
    assert rounded(2049, 4) == 2048 + 512
    assert rounded(1200, 4) == 1536, "up to 512 B a division, only the 512 count"
    assert rounded(10_000, 1) == rounded(10_000, 0) == 10_240
    by_size = (4,) + (0,) * 6 + (2,) * 9
    assert rounded(10_000, *by_size) == 8192 + 2048
    assert rounded(65 * MIB, *by_size) == 66 * MIB, "not divided: rounded as a segment"
    assert rounded(129 * MIB, *by_size) == 192 * MIB
    assert rounded(70 * 1024 * MIB, *by_size) == 96 * 1024 * MIB


def test_another_large_segment() -> None:
    device = CachingAllocator(None, AllocatorSettings(large_segment_bytes=33 * MIB))
    take(device, 2 * MIB)
    assert device.reserved_bytes == 33 * MIB


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    device = CachingAllocator(None, AllocatorSettings(max_split_size_bytes=32 * MIB))
    device.free(take(device, 40 * MIB))
    take(device, 12 * MIB)
    assert device.reserved_bytes == 52 * MIB, "40 MiB are oversize, 12 MiB may not have them"
    reused = take(device, 33 * MIB)
    assert device.reserved_bytes == 52 * MIB, "within 20 MiB of the request: taken whole"
    assert device.allocated_bytes == 52 * MIB
    device.free(reused)
    device.free(take(device, 60 * MIB))
    device.empty_cache()
    device.free(take(device, 60 * MIB))
    take(device, 40 * MIB)
    assert device.reserved_bytes == (12 + 60 + 40) * MIB, "20 MiB more than asked for are too much"


def test_an_oversize_block_goes_back_without_a_retry() -> None:
    rules = AllocatorSettings(max_split_size_bytes=32 * MIB)
    device = CachingAllocator(100 * MIB, rules)
    device.free(take(device, 64 * MIB))
    device.free(take(device, 12 * MIB))
    take(device, 40 * MIB)
    assert (device.retries, device.reserved_bytes) == (0, 52 * MIB)
    device = CachingAllocator(100 * MIB, rules)
    for block in [take(device, size * MIB) for size in (34, 36, 12)]:
        device.free(block)
    take(device, 60 * MIB)
    assert (device.retries, device.reserved_bytes) == (0, 72 * MIB), "the largest few until it is enough"
    device = CachingAllocator(100 * MIB, rules)
    for block in [take(device, size * MIB) for size in (34, 12)]:
        device.free(block)
    take(device, 90 * MIB)
    assert (device.retries, device.reserved_bytes) == (1, 90 * MIB), "all oversize were not enough"


@pytest.mark.parametrize(
    ("capacity", "threshold", "reserved"),
    [
        (100, 0.5, 16 + 18 + 22),  # 54 reserved, 50 wanted: the 20 MiB that were free for longest are enough
        (100, 0.1, 18 + 22),  # 10 wanted: then the younger 16 MiB as well, not the 18 MiB in use
        (100, 0.6, 54 + 22),  # below the threshold
        (100, 0.0, 54 + 22),
        (None, 0.1, 54 + 22),  # without a capacity nothing is collected
    ],
)
def test_garbage_is_collected_by_age_before_a_new_segment(
    capacity: int | None, threshold: float, reserved: int
) -> None:
    rules = AllocatorSettings(garbage_collection_threshold=threshold, capped=True)
    device = CachingAllocator(None if capacity is None else capacity * MIB, rules)
    old, young, used = (take(device, size * MIB) for size in (20, 16, 18))
    device.free(old)
    device.free(used)
    take(device, 18 * MIB)
    device.free(young)
    take(device, 22 * MIB)
    assert device.reserved_bytes == reserved * MIB
    assert device.retries == 0


def test_without_a_cap_no_garbage_is_collected() -> None:
    """torch does so only where `set_per_process_memory_fraction` was called with less than 1."""
    device = CachingAllocator(100 * MIB, AllocatorSettings(garbage_collection_threshold=0.1))
    device.free(take(device, 20 * MIB))
    take(device, 30 * MIB)
    assert device.reserved_bytes == 50 * MIB


# ---------------------------------------------------------------- expandable segments


def test_an_expandable_segment_grows_by_pages() -> None:
    device = CachingAllocator(None, EXPANDABLE)
    take(device, 30 * MIB)
    assert device.reserved_bytes == 40 * MIB
    take(device, 8 * MIB)
    assert device.reserved_bytes == 40 * MIB
    take(device, 12 * MIB)  # 2 MiB are free at the end: one page more is enough
    assert device.reserved_bytes == 60 * MIB
    assert device.allocated_bytes == 50 * MIB
    take(device, 100)
    assert device.reserved_bytes == 62 * MIB
    assert device.split_bytes == device.peak_split_bytes == 0, "not counted for expandable segments"


def test_expandable_blocks_are_split_down_to_512_bytes() -> None:
    device = CachingAllocator(None, EXPANDABLE)
    take(device, 20 * MIB - 512)
    assert device.allocated_bytes == 20 * MIB - 512


def test_whole_pages_go_back_and_the_hole_is_filled_first() -> None:
    device = CachingAllocator(None, EXPANDABLE)
    low, middle, high = take(device, 10 * MIB), take(device, 70 * MIB), take(device, 10 * MIB)
    assert device.reserved_bytes == 100 * MIB
    start = middle.address
    device.free(middle)
    device.empty_cache()
    # 10 to 80 MiB are free: pages 20 to 80 go, 10 to 20 and the 10 MiB after `high` stay.
    assert device.reserved_bytes == 40 * MIB
    again = take(device, 45 * MIB)
    assert again.address == start, "the free 10 MiB and two new pages behind them"
    assert device.reserved_bytes == 80 * MIB
    tail = take(device, 30 * MIB)
    assert tail.address == high.address + 10 * MIB, "the hole left is too small: on to the end"
    for block in (low, again, high, tail):
        device.free(block)
    device.empty_cache()
    assert device.reserved_bytes == 0


def test_expandable_best_fit_prefers_the_block_that_cannot_grow() -> None:
    device = CachingAllocator(None, EXPANDABLE)
    hole, keep = take(device, 12 * MIB), take(device, 20 * MIB)
    assert device.reserved_bytes == 40 * MIB  # 8 MiB free at the growing end
    device.free(hole)
    assert take(device, 5 * MIB).address == 0, "12 MiB, though 8 MiB would do"
    assert keep.live


def test_on_a_gpu_without_a_cap_only_the_missing_pages_are_needed() -> None:
    """By hand: 100 MiB are five pages of 20; `cuMemCreate` refuses the sixth, whatever was asked for."""
    device = CachingAllocator(100 * MIB, EXPANDABLE)
    first = take(device, 50 * MIB)  # pages 0 to 60, of which 50 to 60 stays free
    assert device.reserved_bytes == 60 * MIB
    second = take(device, 45 * MIB)  # 10 MiB are there, 35 are missing: two pages
    assert (second.address, device.reserved_bytes, device.retries) == (50 * MIB, 100 * MIB, 0)
    assert device.allocate(6 * MIB) is None, "5 MiB are free, and a page more would be the sixth"
    assert device.retries == 1
    device.free(first)
    # 0 to 50 is free. 60 MiB find no room: pages 0 to 40 are unmapped, and three would be mapped at the end.
    assert device.allocate(60 * MIB) is None
    assert (device.reserved_bytes, device.retries) == (60 * MIB, 2)
    third = take(device, 48 * MIB)  # pages 0 to 40 are mapped again, in front of 40 to 50
    assert (third.address, device.reserved_bytes, device.retries) == (0, 100 * MIB, 2)


def test_under_a_cap_the_same_request_must_fit_as_a_whole() -> None:
    """`alloc_block` compares reserved + the request (45 MiB, in multiples of 2) with the memory fraction."""
    device = CachingAllocator(100 * MIB, CAPPED)
    take(device, 50 * MIB)
    assert device.allocate(45 * MIB) is None, "60 + 46 is more than 100, though two pages are not"
    assert (device.reserved_bytes, device.retries) == (60 * MIB, 1)
    assert CachingAllocator(None, CAPPED).allocate(1 << 40) is not None, "no capacity: no cap"


def test_pages_are_mapped_stretch_by_stretch_until_the_gpu_is_full() -> None:
    device = CachingAllocator(160 * MIB, EXPANDABLE)
    low, middle, high = take(device, 20 * MIB), take(device, 30 * MIB), take(device, 60 * MIB)
    end = take(device, 10 * MIB)  # pages 0 to 120
    device.free(low)
    device.free(high)  # 50 to 110 is free
    device.empty_cache()  # 0 to 20 and 60 to 100 are unmapped; 50 to 60 and 100 to 110 stay
    assert device.reserved_bytes == 60 * MIB
    rest = take(device, 80 * MIB)  # four pages behind 120
    assert (rest.address, device.reserved_bytes) == (120 * MIB, 140 * MIB)
    device.free(middle)  # 20 to 60 is free, with 0 to 20 and 60 to 100 unmapped around it
    assert device.allocate(75 * MIB) is None
    # 0 to 20 was mapped, then there was no page left for 60 to 80; the retry unmapped 0 to 60, and four pages
    # were too many once more.
    assert (device.retries, device.peak_reserved_bytes) == (1, 160 * MIB)
    assert device.reserved_bytes == 100 * MIB
    assert end.live


def test_under_a_cap_pages_are_mapped_without_asking_again() -> None:
    device = CachingAllocator(50 * MIB, CAPPED)
    take(device, 22 * MIB)
    assert device.reserved_bytes == 40 * MIB
    take(device, 17 * MIB)
    assert device.allocate(10 * MIB) is not None, "40 + 10 is within 50"
    assert device.reserved_bytes == 60 * MIB, "but a page of 20 MiB was mapped"
    assert device.retries == 0
    assert device.allocate(12 * MIB) is None, "11 MiB are free, and no page more may be"
    assert device.retries == 1


# ---------------------------------------------------------------- properties


SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 12 * MIB),
    st.integers(9, 80).map(lambda mib: mib * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB - 512, 20 * MIB, 32 * MIB]),
    st.integers(10 * MIB, 90 * MIB),
)
RULES = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 33 * MIB, 64 * MIB]),
    roundup_power2_divisions=st.sampled_from([(), (), (4,), (2,) * 5 + (8,) * 11]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
    capped=st.booleans(),
)
CAPACITIES = st.one_of(st.none(), st.integers(0, 400 * MIB))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Sizes and events that allocate each block once, most of them freed, in any order."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=40))
    events: list[int] = []
    held: list[int] = []
    for index in range(len(sizes)):
        events.append(index)
        held.append(index)
        for _ in range(draw(st.integers(0, 2))):
            if held:
                events.append(~held.pop(draw(st.integers(0, len(held) - 1))))
    return sizes, events


def every_block(device: CachingAllocator, held: list[Block]) -> list[Block]:
    pools = (device.small, device.large)
    free = [block for pool in pools for block in pool.blocks.values()]
    unmapped = [block for pool in pools for _, block in pool.unmapped]
    return sorted([*free, *unmapped, *held], key=lambda block: block.address)


def check_books(device: CachingAllocator, held: list[Block], capacity: int | None) -> None:
    blocks = every_block(device, [block for block in held if block.pool is not None])
    for low, high in itertools.pairwise(blocks):
        assert low.address + low.size <= high.address, "blocks overlap"
        if low.next is high:
            assert low.live or high.live or low.mapped != high.mapped, "free neighbours are joined"
    for block in blocks:
        assert block.size > 0
        assert block.prev is None or (block.prev.next is block and _end(block.prev) == block.address)
        assert block.next is None or (block.next.prev is block and _end(block) == block.next.address)
    mapped = [block for block in blocks if block.mapped]
    live = [block for block in mapped if block.live]
    rests = [block for block in mapped if not block.live and (block.prev or block.next)]
    assert device.reserved_bytes == sum(block.size for block in mapped)
    assert device.allocated_bytes == sum(block.size for block in live)
    assert device.requested_bytes == sum(block.requested for block in live)
    expandable = device.rules.expandable_segments
    assert device.split_bytes == (0 if expandable else sum(block.size for block in rests))
    for pool in (device.small, device.large):
        assert pool.keys == sorted(pool.blocks)
        assert all(pool.blocks[key].size << 56 | pool.blocks[key].address == key for key in pool.keys)
        assert [address for address, _ in pool.unmapped] == [block.address for _, block in pool.unmapped]
    assert device.requested_bytes <= device.allocated_bytes <= device.reserved_bytes
    assert device.peak_reserved_bytes >= device.reserved_bytes
    if capacity is not None:
        slack = device.rules.large_segment_bytes if expandable and device.rules.capped else 0
        assert device.reserved_bytes <= capacity + slack


def _end(block: Block) -> int:
    return block.address + block.size


@examples(150)
@given(histories(), RULES, CAPACITIES)
def test_books_are_right_after_every_event(
    history: tuple[list[int], list[int]], rules: AllocatorSettings, capacity: int | None
) -> None:
    sizes, events = history
    device = CachingAllocator(capacity, rules)
    held: dict[int, Block] = {}
    failed_at = None
    for index, event in enumerate(events):
        if event < 0:
            device.free(held.pop(~event))
        else:
            block = device.allocate(sizes[event])
            check_books(device, [*held.values(), *([block] if block else [])], capacity)
            if block is None:
                failed_at = index
                break
            assert block.size >= sizes[event]
            held[event] = block
        check_books(device, list(held.values()), capacity)
    peaks = {name: getattr(device, name) for name in asdict(_replay_nothing()) if name.startswith("peak")}
    expected = Replay(fits=failed_at is None, failed_at=failed_at, retries=device.retries, **peaks)
    assert replay(sizes, events, capacity_bytes=capacity, rules=rules) == expected
    for block in held.values():
        device.free(block)
    device.empty_cache()
    check_books(device, [], capacity)
    assert (
        device.reserved_bytes == device.allocated_bytes == device.requested_bytes == device.split_bytes == 0
    )


def _replay_nothing() -> Replay:
    return replay([], [], capacity_bytes=None)


# A second model, slow and plain: lists of [size, owner], searched from end to end.


class Plain:
    def __init__(self, capacity: int | None, max_split: int | None) -> None:
        self.capacity = capacity
        self.max_split = max_split
        self.segments: list[tuple[int, bool, list[list[Any]]]] = []
        self.addresses = AddressSpace()
        self.retries = 0
        self.peak = 0

    @property
    def reserved(self) -> int:
        return sum(piece[0] for _, _, pieces in self.segments for piece in pieces)

    def allocate(self, owner: int, requested: int) -> bool:
        if requested == 0:
            return True
        size = -(-requested // 512) * 512
        small = size <= MIB
        found = self.best(small, size) or self.new(small, size)
        if found is None and self.drop_oversize(small, size):
            found = self.new(small, size)
        if found is None:
            cached = [segment for segment in self.segments if self.is_cached(segment)]
            # Large before small, smallest first: the order in which addresses come free.
            self.drop(sorted(cached, key=lambda segment: (segment[1], segment[2][0][0], segment[0])))
            self.retries += 1
            found = self.new(small, size)
        if found is None:
            return False
        pieces, position = found
        rest = pieces[position][0] - size
        splits = rest >= 512 if small else rest > MIB and (self.max_split is None or size < self.max_split)
        pieces[position : position + 1] = [[size, owner], [rest, None]] if splits else [[size + rest, owner]]
        return True

    def best(self, small: bool, size: int) -> tuple[list[list[Any]], int] | None:
        options = []
        for base, kind, pieces in self.segments:
            offsets = itertools.accumulate([piece[0] for piece in pieces], initial=base)
            for position, (address, piece) in enumerate(zip(offsets, pieces, strict=False)):
                if kind is small and piece[1] is None and piece[0] >= size:
                    options.append((piece[0], address, pieces, position))
        if not options:
            return None
        length, _, pieces, position = min(options, key=lambda option: option[:2])
        limit = self.max_split if self.max_split and size < self.max_split else size + 20 * MIB
        return None if self.max_split and length >= limit else (pieces, position)

    def new(self, small: bool, size: int) -> tuple[list[list[Any]], int] | None:
        length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.capacity is not None and self.reserved + length > self.capacity:
            return None
        base = self.addresses.take(length)
        pieces = [[length, None]]
        self.segments.append((base, small, pieces))
        self.peak = max(self.peak, self.reserved)
        return pieces, 0

    def is_cached(self, segment: tuple[int, bool, list[list[Any]]]) -> bool:
        return len(segment[2]) == 1 and segment[2][0][1] is None

    def drop(self, unwanted: list[tuple[int, bool, list[list[Any]]]]) -> None:
        for segment in unwanted:
            self.segments.remove(segment)
            self.addresses.give(segment[0], segment[2][0][0])

    def drop_oversize(self, small: bool, size: int) -> bool:
        if self.max_split is None:
            return False
        wanted = max(size, self.max_split)
        cached = [segment for segment in self.segments if segment[1] is small and self.is_cached(segment)]
        cached.sort(key=lambda segment: (segment[2][0][0], segment[0]))
        enough = [segment for segment in cached if segment[2][0][0] >= wanted]
        if enough:
            self.drop(enough[:1])
            return True
        given = 0
        for segment in reversed(cached):
            if given < wanted and segment[2][0][0] >= self.max_split:
                given += segment[2][0][0]
                self.drop([segment])
        return given >= wanted

    def free(self, owner: int) -> None:
        for _, _, pieces in self.segments:
            for position, piece in enumerate(pieces):
                if piece[1] == owner:
                    piece[1] = None
                    for left in (position, position - 1):
                        if 0 <= left < len(pieces) - 1 and pieces[left][1] is None is pieces[left + 1][1]:
                            pieces[left][0] += pieces.pop(left + 1)[0]
                    return


@examples(200)
@given(histories(), CAPACITIES, st.sampled_from([None, 20 * MIB, 33 * MIB, 64 * MIB]))
def test_a_plain_model_agrees(
    history: tuple[list[int], list[int]], capacity: int | None, max_split: int | None
) -> None:
    sizes, events = history
    plain = Plain(capacity, max_split)
    failed_at = None
    for index, event in enumerate(events):
        if event < 0:
            plain.free(~event)
        elif not plain.allocate(event, sizes[event]):
            failed_at = index
            break
    seen = replay(
        sizes, events, capacity_bytes=capacity, rules=AllocatorSettings(max_split_size_bytes=max_split)
    )
    assert (seen.failed_at, seen.retries, seen.peak_reserved_bytes) == (failed_at, plain.retries, plain.peak)


UNMAPPED = "unmapped"


class PlainExpandable:
    """Each range is a list of [bytes, owner], None for free; joined anew after every change."""

    def __init__(self, capacity: int | None, capped: bool) -> None:
        self.capacity = 2**60 if capacity is None else capacity
        self.capped = capped
        self.ranges: dict[int, list[list[Any]]] = {page: [[2**50, UNMAPPED]] for page in (20 * MIB, 2 * MIB)}
        self.retries = 0
        self.peak = 0

    @property
    def reserved(self) -> int:
        return sum(size for pieces in self.ranges.values() for size, owner in pieces if owner != UNMAPPED)

    def tidy(self, page: int) -> None:
        joined: list[list[Any]] = []
        for size, owner in self.ranges[page]:
            if size and joined and joined[-1][1] == owner and owner in (None, UNMAPPED):
                joined[-1][0] += size
            elif size:
                joined.append([size, owner])
        self.ranges[page] = joined
        self.peak = max(self.peak, self.reserved)

    def allocate(self, owner: int, requested: int) -> bool:
        if requested == 0:
            return True
        size = -(-requested // 512) * 512
        page = 2 * MIB if size <= MIB else 20 * MIB
        if self.place(page, size, owner, self.best(page, size)):
            return True
        if self.place(page, size, owner, self.grow(page, size)):
            return True
        self.retries += 1
        self.unmap()
        return self.place(page, size, owner, self.grow(page, size))

    def may_grow(self, size: int) -> bool:
        asked = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        return not self.capped or self.reserved + asked <= self.capacity

    def best(self, page: int, size: int) -> int | None:
        """By size then place; a block that can grow is passed over for the next one if that cannot."""
        pieces = self.ranges[page]
        options = sorted((n, i) for i, (n, owner) in enumerate(pieces) if owner is None and n >= size)
        grown = [n + (pieces[i + 1][0] if pieces[i + 1][1] == UNMAPPED else 0) for n, i in options]
        for k, (_, i) in enumerate(options):
            if k + 1 == len(options) or grown[k + 1] >= grown[k]:
                return i
        return None

    def grow(self, page: int, size: int) -> int | None:
        """Map pages from the lowest place where free and unmapped pieces in a row hold the request."""
        pieces = self.ranges[page]
        if not self.may_grow(size):
            return None
        for i, (_, owner) in enumerate(pieces):
            if owner != UNMAPPED:
                continue
            start = i - 1 if i and pieces[i - 1][1] is None else i
            row = itertools.takewhile(lambda piece: piece[1] in (None, UNMAPPED), pieces[start:])
            if sum(piece[0] for piece in row) < size:
                continue
            room, k = 0, start
            while room < size:
                length, kind = pieces[k]
                if kind == UNMAPPED:
                    length = min(length, -(-(size - room) // page) * page)
                    if not self.capped and self.reserved + length > self.capacity:
                        self.tidy(page)
                        return None
                    pieces[k : k + 1] = [[length, None], [pieces[k][0] - length, UNMAPPED]]
                    k += 1
                room, k = room + length, k + 1
            self.tidy(page)
            at = sum(piece[0] for piece in pieces[:start])  # the pieces before it are as they were
            ends = itertools.accumulate((piece[0] for piece in self.ranges[page]), initial=0)
            return next(place for place, end in enumerate(ends) if end == at)
        raise AssertionError

    def place(self, page: int, size: int, owner: int, position: int | None) -> bool:
        if position is None:
            return False
        length = self.ranges[page][position][0]
        self.ranges[page][position : position + 1] = [[size, owner], [length - size, None]]
        self.tidy(page)
        return True

    def unmap(self) -> None:
        for page, pieces in self.ranges.items():
            fresh: list[list[Any]] = []
            at = 0
            for size, owner in pieces:
                first, last = -(-at // page) * page, (at + size) // page * page
                if owner is None and first < last:
                    fresh += [[first - at, None], [last - first, UNMAPPED], [at + size - last, None]]
                else:
                    fresh.append([size, owner])
                at += size
            self.ranges[page] = fresh
            self.tidy(page)

    def free(self, owner: int) -> None:
        for page, pieces in self.ranges.items():
            self.ranges[page] = [[size, None if who == owner else who] for size, who in pieces]
            self.tidy(page)


@examples(200)
@given(histories(), CAPACITIES, st.booleans())
def test_a_plain_expandable_model_agrees(
    history: tuple[list[int], list[int]], capacity: int | None, capped: bool
) -> None:
    sizes, events = history
    plain = PlainExpandable(capacity, capped and capacity is not None)
    failed_at = None
    for index, event in enumerate(events):
        if event < 0:
            plain.free(~event)
        elif not plain.allocate(event, sizes[event]):
            failed_at = index
            break
    seen = replay(sizes, events, capacity_bytes=capacity, rules=CAPPED if capped else EXPANDABLE)
    assert (seen.failed_at, seen.retries, seen.peak_reserved_bytes) == (failed_at, plain.retries, plain.peak)


def test_more_memory_can_fail_where_less_fits() -> None:
    """No property to rely on: an earlier flush of the cache can leave it less split than a later one."""
    sizes = [8 * MIB + 512, 25 * MIB, 12 * MIB, 12 * MIB, 12 * MIB, 29 * MIB]
    events = [0, ~0, 1, 2, ~1, 3, ~2, ~3, 4, 5]
    assert replay(sizes, events, capacity_bytes=44 * MIB).fits
    assert replay(sizes, events, capacity_bytes=46 * MIB).failed_at == 9


# A run that was recorded: a two-layer LSTM (bf16 autocast, batch of 8, two steps) on an H200 with torch 2.11.
# "+3" allocates LSTM_SIZES[3] bytes; "2" frees the block that is third from the newest of those held.
LSTM_SIZES = [
    4,
    8,
    628,
    8192,
    16384,
    32768,
    40000,
    65536,
    80000,
    1048576,
    2097152,
    6488064,
    8388608,
    16777216,
    23200000,
    29392896,
    33554432,
    40960000,
    58785792,
    60096832,
    81920000,
    143360000,
]
LSTM_RUN = """
    +17 +12 +13 +4 +4 +13 +13 +4 +4 +18 8 7 6 5 4 3 2 1 +20 +8 +3 +10 +7 +7 +1 0 +11 +15 +5 +5 +9 +9 +10
    +5 +5 +19 +14 1 4 10 9 9 +6 +17 +10 +10 +17 +16 +17 2 3 6 6 +17 +20 +0 +0 4 7 +0 +20 4 2 +17 1 +17 1
    3 +6 +21 +2 0 0 +17 +16 +10 4 8 7 +10 1 +20 3 +8 4 +5 +5 +9 +10 +9 +5 +5 +19 0 3 3 +9 +15 +19 0 1 4
    4 2 1 4 12 11 10 9 8 8 +10 2 +4 +4 +13 +13 +4 +4 +13 +12 9 +10 +17 1 9 12 +17 +17 +12 +12 +13 +13 +4
    +4 +4 +4 +13 +13 +13 +13 +4 +4 +4 +4 +20 +20 +8 +8 +17 +12 +13 +4 +4 +13 +13 +4 +4 +20 +8 0 0 0 0 0
    0 0 0 0 0 0 37 34 +3 23 23 23 23 23 23 23 23 23 24 23 +10 +7 +7 +15 +5 +5 +9 +9 +10 +5 +5 +19 +14 1
    4 9 8 8 +6 +17 +10 +10 +17 +17 1 2 5 5 +17 +20 +0 +0 4 6 +0 +20 4 2 +17 1 +17 1 3 +6 +21 +2 0 0 +17
    +10 3 6 5 +10 1 +20 2 +8 3 +5 +5 +9 +10 +9 +5 +5 +19 0 3 3 +9 +15 +19 0 1 4 4 2 1 4 10 9 8 7 6 6 +10
    2 +4 +4 +13 +13 +4 +4 +13 +12 9 +10 +17 1 9 11 +17 +12 +13 +4 +4 +13 +13 +4 +4 +20 +8 0 0 0 0 0 0 0
    0 0 0 0 12 11
"""


def test_a_recorded_run_has_the_peaks_of_the_gpu() -> None:
    sizes: list[int] = []
    events: list[int] = []
    held: list[int] = []
    for word in LSTM_RUN.split():
        if word.startswith("+"):
            held.append(len(sizes))
            sizes.append(LSTM_SIZES[int(word)])
        events.append(held[-1] if word.startswith("+") else ~held.pop(-1 - int(word)))
    seen = replay(sizes, events, capacity_bytes=40 * 1024 * MIB)
    assert (seen.fits, seen.retries) == (True, 0)
    assert seen.peak_requested_bytes == 982334084
    assert seen.peak_allocated_bytes == 985285632
    assert seen.peak_reserved_bytes == 1365245952


def test_replay_repeats_steps_and_refuses_nonsense() -> None:
    step = [0, 1, ~0, 2, ~1, ~2]
    sizes = [3 * MIB, 30 * MIB, 12 * MIB]
    once = replay(sizes, step, capacity_bytes=None)
    assert replay(sizes, step * 5, capacity_bytes=None) == once
    assert once.fits
    assert once.failed_at is None
    short = replay(sizes, step, capacity_bytes=40 * MIB)
    assert (short.fits, short.failed_at, short.retries) == (False, 1, 1)
    assert short.peak_reserved_bytes == 20 * MIB
    with pytest.raises(ValueError, match="free only what is allocated, not block 0 at 0"):
        replay(sizes, [~0], capacity_bytes=None)
    with pytest.raises(ValueError, match="must not allocate block 0 again at 1"):
        replay(sizes, [0, 0], capacity_bytes=None)


# ---------------------------------------------------------------- streams


def test_a_freed_block_is_used_again_on_its_own_stream_only() -> None:
    device = CachingAllocator(None)
    first = device.allocate(12 * MIB, 1)
    assert first is not None
    device.free(first)
    other = device.allocate(12 * MIB)
    assert other is not None
    assert device.reserved_bytes == 24 * MIB, "the program's own stream is not given that block"
    again = device.allocate(12 * MIB, 1)
    assert again is not None
    assert again.address == first.address
    assert device.reserved_bytes == 24 * MIB


def test_what_other_streams_have_cached_is_released_before_memory_is_out() -> None:
    device = CachingAllocator(40 * MIB)
    side = device.allocate(30 * MIB, 2)
    assert side is not None
    device.free(side)
    assert device.allocate(30 * MIB) is not None
    assert (device.retries, device.reserved_bytes) == (1, 30 * MIB)
