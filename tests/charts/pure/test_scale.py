"""Scales stay inside their pixels; ticks are round, in order, and few."""

from __future__ import annotations

import math

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._charts.scale import MOST, byte_axis, count_text, real, scale_over, ticks_within

NUMBERS = st.floats(0, 1e18, allow_nan=False) | st.integers(0, 10**30)


@given(values=st.lists(NUMBERS, max_size=6), log=st.booleans(), probe=NUMBERS, most=st.integers(0, 20))
@examples(150)
def test_every_place_is_inside_and_ticks_are_few_and_in_order(
    values: list[float], log: bool, probe: float, most: int
) -> None:
    scale = scale_over(values, 40.0, 300.0, log=log, headroom=0.1)
    places = [scale.place(real(value)) for value in (*values, probe)]
    assert all(40.0 <= place <= 300.0001 for place in places)
    ticks = ticks_within(scale, most)
    assert len(ticks) <= max(most, 2)
    assert ticks == sorted(set(ticks))
    assert all(scale.low <= tick <= scale.high * (1 + 1e-9) for tick in ticks)


@given(low=st.integers(1, 1000), high=st.integers(1, 10**6), log=st.booleans())
@examples(60)
def test_larger_values_lie_further(low: int, high: int, log: bool) -> None:
    scale = scale_over([low, high], 0.0, 100.0, log=log)
    assert (scale.place(low) < scale.place(high)) == (low < high)


def test_a_doubling_is_one_distance_on_a_log_axis() -> None:
    scale = scale_over([1, 64], 0.0, 100.0, log=True)
    apart = [scale.place(2 ** (n + 1)) - scale.place(2**n) for n in range(6)]
    assert max(apart) == pytest.approx(min(apart))
    assert ticks_within(scale, 10) == [1, 2, 4, 8, 16, 32, 64]
    assert ticks_within(scale, 4) == [1, 4, 16, 64]


def test_a_log_axis_over_less_than_two_doublings_has_round_numbers() -> None:
    ticks = ticks_within(scale_over([500, 562], 0.0, 100.0, log=True), 6)
    assert len(ticks) >= 3
    assert all(tick % 25 == 0 for tick in ticks)


def test_linear_axes_begin_at_zero() -> None:
    assert ticks_within(scale_over([80.0], 0, 1), 5) == [0, 20, 40, 60, 80]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (2.5, "2.5"),
        (4096, "4,096"),
        (9999, "9,999"),
        (65536, "65.54k"),
        (2**21, "2.097M"),
    ],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert count_text(value) == text


def test_units_of_axes() -> None:
    assert byte_axis(24 * 2**30) == (2**30, "GiB")
    assert byte_axis(2**20) == (2**20, "MiB")
    assert byte_axis(0) == (1, "B")
    assert real(10**400) == MOST
    assert math.isfinite(real(-(10**400)))
