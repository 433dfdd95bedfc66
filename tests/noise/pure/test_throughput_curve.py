"""Samples per second between and beyond the sizes that were timed."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._noise.pure.throughput import Speed

quick = examples(60)
curves = st.dictionaries(st.integers(1, 4096), st.floats(1e-3, 10), min_size=1, max_size=6)


@quick
@given(curves)
def test_measured_sizes_are_as_fast_as_measured(curve: dict[int, float]) -> None:
    speed = Speed.of(sorted(curve.items(), reverse=True))
    for size, step_s in curve.items():
        assert speed(size) == pytest.approx(size / step_s)


@quick
@given(curves, st.integers(1, 5000))
def test_between_two_sizes_a_step_takes_between_their_times(curve: dict[int, float], size: int) -> None:
    step_s = size / Speed.of(curve.items())(size)
    below = [curve[one] for one in curve if one <= size]
    above = [curve[one] for one in curve if one >= size]
    first, last = min(curve), max(curve)
    if not below:
        assert step_s == pytest.approx(curve[first])
    elif not above:
        assert size / step_s == pytest.approx(last / curve[last])
    else:
        low, high = curve[max(c for c in curve if c <= size)], curve[min(c for c in curve if c >= size)]
        assert min(low, high) * 0.999 <= step_s <= max(low, high) * 1.001


def test_ranks_share_a_batch_and_microbatches_add_no_speed() -> None:
    points = [(8, 1.0), (32, 2.0)]
    assert Speed.of(points, world_size=4)(128) == 4 * 32 / 2.0
    assert Speed.of(points, world_size=4, microbatch_size=8)(128) == 4 * 8 / 1.0
    assert Speed.of(points, world_size=4)(29) == 4 * 8 / 1.0  # the slowest rank has 8
