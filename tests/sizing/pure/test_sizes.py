"""How a batch is cut, and what is learned about sizes: pure, against memories that are known."""

from __future__ import annotations

import json
import math

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.batch.pure.microbatch import Shape
from batchfit._engine.sizing.pure.sizes import (
    MOST_READINGS,
    MOST_SHAPES,
    PATIENCE,
    Bounds,
    Learned,
    MicrobatchEvent,
    balanced,
    equal,
    rung,
)

SHAPE = Shape("x(8)", "x", 8)


@given(total=st.integers(1, 5000), at_most=st.integers(1, 6000))
def test_balanced_sizes_are_few_and_near_equal(total: int, at_most: int) -> None:
    sizes = balanced(total, at_most)
    assert sum(sizes) == total
    assert 1 <= min(sizes) <= max(sizes) <= at_most
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == math.ceil(total / at_most)
    assert list(sizes) == sorted(sizes, reverse=True)


@given(total=st.integers(1, 5000), at_most=st.integers(1, 6000))
def test_equal_sizes_are_one_and_a_remainder(total: int, at_most: int) -> None:
    sizes = equal(total, at_most)
    assert sum(sizes) == total
    assert set(sizes[:-1]) <= {at_most}
    assert 1 <= sizes[-1] <= at_most


@pytest.mark.parametrize(("size", "largest"), [(1, 1), (2, 2), (3, 2), (64, 64), (100, 64)])
def test_rungs_are_powers_of_two(size: int, largest: int) -> None:
    assert rung(size) == largest


class Memory:
    """A device on which a microbatch of `size` needs `fixed + slope * size` bytes."""

    def __init__(self, most: int, *, fixed: int = 50, slope: int = 10, reads: bool = False) -> None:
        self.room = fixed + slope * most + slope // 2
        self.fixed, self.slope, self.reads = fixed, slope, reads
        self.ran_out = 0

    def needs(self, size: int) -> int:
        return self.fixed + self.slope * size

    def batch(
        self, learned: Learned, total: int, *, shape: Shape = SHAPE, compiled: bool = False
    ) -> tuple[int, int]:
        """(the size that ran, how often memory ran out), as `Sizing` goes about it."""
        room = self.room if self.reads else None
        size = learned.begin(shape, total, room, compiled=compiled)
        bounds = learned.of(shape) or Bounds()
        tries = 0
        while True:
            assert 1 <= size <= total
            size = equal(total, size)[0] if compiled else balanced(total, size)[0]
            if self.needs(size) <= self.room:
                used = self.needs(size) if self.reads else None
                learned.put(shape, bounds.ran(size, total, used_bytes=used))
                return size, tries
            tries += 1
            self.ran_out += 1
            assert size > 1, "not even one sample fits"
            learned.failed(shape, size)
            bounds = bounds.after_oom(size, total, sure=learned.sure(shape), compiled=compiled)
            assert bounds.size < size
            size = bounds.size


@examples(150)
@given(most=st.integers(1, 300), total=st.integers(1, 300), compiled=st.booleans())
def test_the_fewest_microbatches_are_found_without_any_reading(most: int, total: int, compiled: bool) -> None:
    memory, learned = Memory(most), Learned()
    _, tries = memory.batch(learned, total, compiled=compiled)
    assert tries <= math.ceil(math.log2(total)) + 1
    sizes = [memory.batch(learned, total, compiled=compiled)[0] for _ in range(200)]
    if compiled:
        assert sizes[-1] == total or 2 * sizes[-1] > min(most, total)
    else:
        assert len(balanced(total, sizes[-1])) == math.ceil(total / most)
    # halving down, then a bisection between the last two: never more than a few a batch and few in all
    assert memory.ran_out <= 2 * math.log2(total) + 6


@examples(150)
@given(
    most=st.integers(2, 300),
    totals=st.lists(st.integers(1, 400), min_size=30, max_size=60),
    fixed=st.integers(0, 5000),
)
def test_with_readings_only_the_first_large_batch_has_an_oom(
    most: int, totals: list[int], fixed: int
) -> None:
    memory, learned = Memory(most, fixed=fixed, reads=True), Learned()
    batches_with_failures = sum(memory.batch(learned, total)[1] > 0 for total in totals)
    assert batches_with_failures <= 1


@examples(100)
@given(most=st.integers(20, 300), fixed=st.integers(0, 200))
def test_with_readings_the_memory_is_used_up_to_the_margin(most: int, fixed: int) -> None:
    memory, learned = Memory(most, fixed=fixed, reads=True), Learned()
    total = 16 * most
    sizes = [memory.batch(learned, total)[0] for _ in range(6)]
    assert memory.needs(sizes[-1]) > 0.8 * memory.room - 2 * memory.slope


def test_each_failed_growth_doubles_the_wait() -> None:
    bounds = Bounds(size=8, good=8, bad=64)
    waits, tried = [], []
    for _ in range(4):
        waiting = 0
        while bounds.next_size(64, None) == 8:
            bounds = bounds.ran(8, 64)
            waiting += 1
        tried.append(bounds.next_size(64, None))
        bounds = bounds.after_oom(tried[-1], 64)
        assert bounds.size == 8
        waits.append(waiting)
    assert tried[:2] == [13, 10]  # 5 and 7 microbatches, between 2 and 8; then nothing is left between
    # 16 waits of a wait that has doubled twice, until what failed may be tried again
    assert waits[:3] == [PATIENCE, 2 * PATIENCE, 16 * 4 * PATIENCE]


def test_a_size_that_ran_is_left_after_a_later_oom() -> None:
    bounds = Bounds().ran(64, 64, used_bytes=640).after_oom(64, 64)
    assert (bounds.size, bounds.good, bounds.bad) == (32, 0, 64)
    assert bounds.readings == ()


def test_a_small_batch_does_not_lower_the_size_of_large_ones() -> None:
    bounds = Bounds().after_oom(64, 64).ran(32, 64).ran(5, 5)
    assert bounds.size == 32
    assert bounds.next_size(64, None) == 32


def test_allocation_retries_lower_the_size_only_when_they_come_twice_in_a_row() -> None:
    bounds = Bounds().ran(64, 64)
    once = bounds.thrashed(64, 64)
    assert once.next_size(64, None) == 64
    assert once.settled().thrashed(64, 64).next_size(64, None) == 64
    twice = once.thrashed(64, 64)
    assert twice.next_size(64, None) == 32
    assert twice.bad == 64
    assert Bounds().ran(1, 8).thrashed(1, 8).thrashed(1, 8).next_size(8, None) >= 1


def test_less_memory_than_last_time_cuts_before_an_oom() -> None:
    bounds = Bounds().ran(32, 64, used_bytes=320 + 50).ran(64, 64, used_bytes=640 + 50)
    assert bounds.next_size(64, 700) == 64
    smaller = bounds.next_size(64, 400)  # an optimizer has got its state since
    assert 16 < smaller <= 35


@pytest.mark.parametrize("reads", [True, False])
def test_a_longer_batch_is_cut_smaller_before_an_oom(reads: bool) -> None:
    learned = Learned()
    short, longer = Shape("x(64)", "x", 64), Shape("x(256)", "x", 256)
    memory = Memory(32, fixed=0, slope=64, reads=reads)
    for _ in range(12):
        memory.batch(learned, 64, shape=short)
    size = learned.begin(longer, 64, memory.room if reads else None)
    assert 4 <= size <= 8  # a quarter of 32, less the margin
    shorter = learned.begin(Shape("x(16)", "x", 16), 64, memory.room if reads else None)
    assert shorter == 64  # 32 at 64 elements are 128 at 16
    assert learned.begin(Shape("y(256)", "y", 256), 64, memory.room) == 64  # no relative


def test_shapes_that_never_met_the_end_of_memory_say_nothing_without_readings() -> None:
    learned = Learned()
    learned.put(Shape("x(64)", "x", 64), Bounds().ran(8, 8))
    assert learned.begin(Shape("x(640)", "x", 640), 8, None) == 8


def test_a_shape_is_at_least_as_small_as_a_longer_relative() -> None:
    learned = Learned()
    learned.put(Shape("x(100)", "x", 100), Bounds().after_oom(40, 40).ran(20, 40))
    assert learned.begin(Shape("x(99)", "x", 99), 40, None) >= 20


def test_few_shapes_and_few_readings_are_kept() -> None:
    learned = Learned()
    for i in range(MOST_SHAPES + 50):
        learned.put(Shape(f"x({i})", "x", i), Bounds().ran(4, 4))
    assert len(learned) == MOST_SHAPES
    assert learned.of(Shape("x(0)", "x", 0)) is None
    bounds = Bounds()
    for size in range(1, 40):
        bounds = bounds.ran(size, 40, used_bytes=10 * size)
    assert len(bounds.readings) == MOST_READINGS
    assert bounds.readings[0][0] == 1
    assert bounds.readings[-1][0] == 39


def test_what_was_learned_survives_json() -> None:
    learned = Learned()
    learned.put(SHAPE, Bounds().after_oom(64, 64).ran(32, 64, used_bytes=99))
    twin = Learned.from_dict(json.loads(json.dumps(learned.to_dict())))
    assert twin.of(SHAPE) == learned.of(SHAPE)
    entry = learned.to_dict()["shapes"][0]
    later = {**entry, "a field of a later version": 1}
    del later["thrash"]
    assert Learned.from_dict({"shapes": [later]}).of(SHAPE) == learned.of(SHAPE)


def test_an_event_reads_as_a_line() -> None:
    assert str(MicrobatchEvent("shrunk", 64, 32, "out of memory")) == "microbatch 64 -> 32: out of memory"
    assert str(MicrobatchEvent("retry", 64, 64, "fragmented")) == "microbatch 64: fragmented"
    relearned = MicrobatchEvent("relearned", 0, 0, "device was 'a' and is 'b'")
    assert str(relearned) == "microbatch sizes are learned again: device was 'a' and is 'b'"


def ragged(width: int) -> Shape:
    return Shape(str(width), "tokens", width)


@examples(150)
@given(
    room=st.integers(300, 4000),
    widths=st.lists(st.integers(10, 100), min_size=1, max_size=20),
    total=st.integers(1, 300),
    reads=st.booleans(),
    compiled=st.booleans(),
)
def test_no_width_goes_below_what_fits_the_widest(
    room: int, widths: list[int], total: int, reads: bool, compiled: bool
) -> None:
    """A search has found the largest size for the widest; batches of all widths follow."""
    found, learned = room // 100, Learned()
    used = 100 * found if reads else None
    learned.put(ragged(100), Bounds().ran(found, found, used_bytes=used))
    learned.nothing_larger()
    for number, width in enumerate(widths):
        memory = Memory(1, fixed=0, slope=width, reads=reads)
        memory.room = room
        size, tries = memory.batch(learned, total, shape=ragged(width), compiled=compiled)
        # Compiled code gets powers of two, and a batch is cut into equal microbatches.
        least = rung(min(found, total)) if compiled else balanced(total, min(found, total))[0]
        assert size >= least
        assert tries == 0 or width in widths[:number]  # foreseen; later ones may try more, when calm


def test_what_ran_for_longer_samples_is_the_floor_until_it_fails() -> None:
    learned = Learned()
    learned.put(ragged(100), Bounds().ran(12, 12))
    assert (learned.sure(ragged(100)), learned.sure(ragged(50)), learned.sure(ragged(101))) == (12, 12, 0)
    # Nobody has said that 12 is the most, so the whole batch is tried; 128, 64, 32, 16, and not 8.
    tried = [learned.begin(ragged(50), 128, None)]
    bounds = Bounds()
    for _ in range(5):
        learned.failed(ragged(50), tried[-1])
        bounds = bounds.after_oom(tried[-1], 128, sure=learned.sure(ragged(50)))
        tried.append(bounds.size)
    assert tried == [128, 64, 32, 16, 12, 6]
    # It failed: memory is not what it was, for any shape.
    assert learned.sure(ragged(50)) == 0


def test_what_ran_is_not_lowered_by_a_margin() -> None:
    known = Bounds().ran(18, 18, used_bytes=180)
    assert known.next_size(128, 185) == 18
    assert known.next_size(128, 170) < 16
