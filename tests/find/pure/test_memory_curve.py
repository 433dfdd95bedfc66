"""The memory model: what it may promise for any convex peak, and what it must not for readings that lie."""

from __future__ import annotations

import math

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from batchfit._find.pure.memory_curve import (
    COARSE_NOISE,
    FINEST,
    LIVE_NOISE,
    LIVE_SHARE,
    NOISE,
    Curve,
    MemoryReading,
    cache_is_releasable,
)

GIB = 2**30


@st.composite
def convex_peaks(draw: st.DrawFn) -> tuple[float, list[tuple[float, float]], float]:
    """A floor, lines (fixed, per sample) over it, and a budget under which size 1 fits."""
    floor = draw(st.floats(0, 1000))
    lines = draw(
        st.lists(
            st.tuples(st.floats(floor, floor + 2000), st.floats(0, 100)),
            min_size=1,
            max_size=5,
        )
    )
    assume(any(slope > 0.01 for _, slope in lines))
    at_one = max(fixed + slope for fixed, slope in lines)
    budget = at_one * draw(st.floats(1, 50)) + 1
    return floor, lines, budget


def peak(lines: list[tuple[float, float]], size: float) -> float:
    return max(fixed + slope * size for fixed, slope in lines)


def true_end(lines: list[tuple[float, float]], budget: float) -> float:
    """The real number at which the peak reaches the budget."""
    return min((budget - fixed) / slope for fixed, slope in lines if slope > 0)


@examples(200)
@given(convex_peaks(), st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_the_ray_is_never_above_the_truth(
    peaks: tuple[float, list[tuple[float, float]], float], shares: list[float]
) -> None:
    floor, lines, budget = peaks
    end = true_end(lines, budget)
    sizes = {max(1, int(share * end)) for share in shares}
    readings = [MemoryReading(size, peak(lines, size), noise=0.0) for size in sizes]
    curve = Curve.through(readings, budget_bytes=math.ceil(budget), floor_bytes=floor)
    assert peak(lines, curve.safe()) <= math.ceil(budget) * (1 + 1e-9)


@examples(200)
@given(convex_peaks(), st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_the_chord_is_never_below_the_truth(
    peaks: tuple[float, list[tuple[float, float]], float], shares: list[float]
) -> None:
    floor, lines, budget = peaks
    end = true_end(lines, math.ceil(budget))
    sizes = {max(1, int(share * end)) for share in shares}
    assume(len(sizes) > 1)
    readings = [MemoryReading(size, peak(lines, size)) for size in sizes]
    look = Curve.through(readings, budget_bytes=math.ceil(budget), floor_bytes=floor).outlook()
    assert look.high >= end * (1 - 1e-9)
    assert look.low <= look.likely <= look.high
    assert look.careful >= max(sizes)


@examples(200)
@given(
    st.dictionaries(st.integers(1, 10_000), st.floats(1, 10 * GIB), min_size=1, max_size=8),
    st.floats(0, 10 * GIB),
    st.none() | st.integers(10_001, 20_000),
    st.integers(0, 30),
)
def test_no_readings_however_wild_give_a_number_that_is_none(
    peaks: dict[int, float], floor: float, failed: int | None, setbacks: int
) -> None:
    readings = [MemoryReading(size, need) for size, need in peaks.items()]
    curve = Curve.through(readings, budget_bytes=GIB, floor_bytes=floor)
    look = curve.outlook(failed=failed, setbacks=setbacks)
    numbers = (look.safe, look.careful, look.low, look.high, look.likely, look.aim)
    assert not any(math.isnan(number) for number in numbers)
    assert all(number >= 0 for number in numbers)
    assert FINEST <= look.error <= NOISE


def test_three_readings_on_one_line_end_where_the_line_ends() -> None:
    readings = [MemoryReading(size, 200 + 10 * size) for size in (1, 8, 40)]
    look = Curve.through(readings, budget_bytes=1205).outlook()
    assert look.straight
    assert look.error == FINEST
    assert look.low < 100.5 < look.high
    assert look.high - look.low < 1.5


def test_noisy_readings_are_granted_more() -> None:
    readings = [
        MemoryReading(1, 210.0),
        MemoryReading(8, 280.0),
        MemoryReading(40, 585.0),
    ]  # the last is 2.5 % low
    look = Curve.through(readings, budget_bytes=1205).outlook()
    assert FINEST < look.error <= NOISE
    assert look.low < 100.5 < look.high
    assert look.high - look.low > 3


def test_what_has_not_grown_yet_is_no_line() -> None:
    flat = [MemoryReading(1, 250.0), MemoryReading(2, 250.0)]
    look = Curve.through(flat, budget_bytes=1000).outlook()
    assert not look.straight
    assert look.safe < 8  # the ray from zero: 2 * 1000 / 250, less the noise
    assert math.isinf(look.high)
    # Exact readings of a flat part and a first growth are not seen as one line either.
    knee = [*flat, MemoryReading(30, 265.0)]
    assert not Curve.through(knee, budget_bytes=1000).outlook().straight


def test_held_bytes_carry_the_ray_further() -> None:
    reading = [MemoryReading(1, 250.0)]
    far = Curve.through(reading, budget_bytes=1000, floor_bytes=200).safe()
    near = Curve.through(reading, budget_bytes=1000).safe()
    assert near == pytest.approx(1000 / (250 * (1 + NOISE)))
    assert far == pytest.approx(800 / (250 * (1 + NOISE) - 200))


def test_a_floor_above_a_peak_is_no_floor() -> None:
    curve = Curve.through([MemoryReading(1, 250.0)], budget_bytes=1000, floor_bytes=900)
    assert curve.floor_bytes == 250


def test_a_size_that_ran_needed_no_more_than_there_is() -> None:
    curve = Curve.through(
        [MemoryReading(4, 1100.0), MemoryReading(4, 700.0), MemoryReading(2, 600.0)], budget_bytes=1000
    )
    assert [(one.size, one.need_bytes) for one in curve.readings] == [(2, 600), (4, 1000)]


def test_a_promise_that_failed_is_not_made_again() -> None:
    readings = [MemoryReading(size, 200 + 10 * size) for size in (1, 8, 40)]
    curve = Curve.through(readings, budget_bytes=1205)
    assert curve.outlook().low > 95
    assert curve.outlook(failed=96).low < 96
    widths = [curve.outlook(failed=96, setbacks=count).low for count in (1, 2, 3)]
    assert widths == sorted(widths, reverse=True)
    assert widths[2] < widths[0]


ALLOCATED, RESERVED = 10 * GIB, 12 * GIB


@pytest.mark.parametrize(
    ("peaks", "need", "noise", "firm"),
    [
        ({}, ALLOCATED, NOISE, True),
        ({"reserved_bytes": RESERVED}, RESERVED, NOISE, True),
        ({"reserved_bytes": RESERVED, "split_bytes": 1 * GIB}, 11 * GIB, NOISE, False),
        ({"reserved_bytes": RESERVED, "split_bytes": 4 * GIB}, RESERVED, NOISE, True),
        ({"reserved_bytes": RESERVED, "releases": True}, ALLOCATED / LIVE_SHARE, LIVE_NOISE, True),
        ({"reserved_bytes": ALLOCATED * 1.04}, ALLOCATED / LIVE_SHARE, LIVE_NOISE, True),
        # Large blocks: what was taken counts, however close it is; far from the end it is 5 % at least.
        ({"reserved_bytes": RESERVED, "releases": False}, RESERVED, COARSE_NOISE, True),
        ({"reserved_bytes": RESERVED, "split_bytes": GIB, "releases": False}, 11 * GIB, COARSE_NOISE, False),
        ({"reserved_bytes": ALLOCATED * 1.04, "releases": False}, ALLOCATED * 1.04, COARSE_NOISE, True),
        (
            {"reserved_bytes": ALLOCATED * 1.04, "releases": False, "budget_bytes": 24 * GIB},
            ALLOCATED / 0.95,
            COARSE_NOISE,
            True,
        ),
        (
            {"reserved_bytes": ALLOCATED * 1.04, "releases": False, "budget_bytes": 11 * GIB},
            ALLOCATED * 1.04,
            COARSE_NOISE,
            True,
        ),
        ({"reserved_bytes": 0}, ALLOCATED, NOISE, True),  # a counter that the device does not keep
        ({"reserved_bytes": None, "releases": True}, ALLOCATED, NOISE, True),
    ],
)
def test_what_the_peaks_of_an_allocator_say(
    peaks: dict[str, int | bool | None], need: float, noise: float, firm: bool
) -> None:
    reading = MemoryReading.of(8, ALLOCATED, **peaks)  # type: ignore[arg-type]
    assert reading == MemoryReading(8, need, noise, firm)


@pytest.mark.parametrize(
    ("largest", "retries", "returns"),
    [
        (None, 0, None),
        (None, 2, True),
        (0, 0, None),
        (ALLOCATED // 20, 0, True),  # ResNet-50
        (ALLOCATED // 8, 0, False),  # GPT-2
        (ALLOCATED // 8, 2, False),  # something was handed back, and the rests stay
    ],
)
def test_whether_rests_return(largest: int | None, retries: int, returns: bool | None) -> None:
    assert cache_is_releasable(ALLOCATED, largest_bytes=largest, retries=retries) is returns


def test_nothing_live_says_nothing_about_rests() -> None:
    assert cache_is_releasable(None, largest_bytes=GIB) is None
    assert cache_is_releasable(0, largest_bytes=GIB) is None


@pytest.mark.parametrize(("allocated", "reserved"), [(None, None), (0, None), (None, 0), (0, 0)])
def test_peaks_that_say_nothing(allocated: int | None, reserved: int | None) -> None:
    assert MemoryReading.of(8, allocated, reserved_bytes=reserved) is None


def test_reserved_bytes_alone_are_a_reading() -> None:
    assert MemoryReading.of(8, None, reserved_bytes=RESERVED) == MemoryReading(8, RESERVED)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"readings must .*, not \[\]"):
        Curve.through([], budget_bytes=1)
    with pytest.raises(ValueError, match=r"budget_bytes must be positive, not 0"):
        Curve.through([MemoryReading(1, 1.0)], budget_bytes=0)
