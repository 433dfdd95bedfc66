"""Planted series of step times: when they are warm, enough, and steady."""

from __future__ import annotations

import math
import random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._profile.pure.peak_flops import peak_flops
from batchfit._profile.pure.steady import BRIEF, FINE, Interval, Timing, fine_after, is_fine, is_warm, verdict

times = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=80)


def warmup(series: list[float], *, most: int = 12) -> int:
    """How many steps are taken before the first that is timed."""
    return next(count for count in range(1, len(series) + 1) if is_warm(series[:count], most=most))


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ([1.0, 1.0, 1.0], 2),
        ([30.0, 0.1, 0.1, 0.1], 3),  # compiled in the first step
        ([30.0, 12.0, 0.1, 0.1, 0.1], 4),  # and again in the second
        ([2.0, 1.7, 1.4, 1.1, 0.9, 0.85, 0.84], 6),  # clocks that go up
        ([1.0, 1.2, 1.0], 2),  # noise upwards is not warm-up
    ],
)
def test_warm_up_ends_where_steps_stop_getting_faster(series: list[float], expected: int) -> None:
    assert warmup(series) == expected


def test_warm_up_that_never_ends_is_cut_off() -> None:
    assert warmup([0.8**number for number in range(50)], most=12) == 12


@given(times)
@examples(200)
def test_an_interval_holds_its_median_and_lies_within_the_values(series: list[float]) -> None:
    interval = Interval.of(series)
    assert min(series) <= interval.low <= interval.median <= interval.high <= max(series)


@pytest.mark.parametrize("count", [6, 9, 20, 60])
def test_the_interval_covers_the_median_in_95_percent(count: int) -> None:
    rng = random.Random(count)
    hits = 0
    for _ in range(2000):
        interval = Interval.of([rng.expovariate(1.0) for _ in range(count)])
        hits += interval.low <= math.log(2) <= interval.high
    assert hits / 2000 >= 0.945  # exact coverage is a little above 95 %
    assert hits / 2000 < 1.0 or count == 6


def test_one_stall_moves_neither_median_nor_interval() -> None:
    quiet = [1.0 + 0.001 * number for number in range(12)]
    stalled = Interval.of([*quiet[:-1], 40.0])
    assert stalled.spread < 0.01


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="times must hold"):
        Interval.of([])


def test_steps_are_repeated_until_the_interval_is_narrow() -> None:
    rng = random.Random(0)
    for noise, few in ((0.001, True), (0.2, False)):
        series: list[float] = []
        while not FINE.is_enough(series):
            series.append(1 + rng.gauss(0, noise))
        assert (len(series) == FINE.least) is few
        assert len(series) <= FINE.most
        assert (verdict(series, target=FINE.target) == "steady") is few
    assert not BRIEF.is_enough([1.0])
    assert BRIEF.is_enough([1.0, 1.001])


def test_a_look_at_short_steps_is_as_good_as_a_fine_timing() -> None:
    """Coming back for them would cost more than they do."""
    assert not BRIEF.is_enough([0.05, 0.05])
    assert BRIEF.is_enough([0.05] * 6)
    assert BRIEF.most >= FINE.least
    assert is_fine([0.05] * 6)
    assert not is_fine([0.05] * 4)
    assert not is_fine([0.05, 0.06] * 3)


def test_a_fine_timing_does_not_take_over_the_time_of_a_search() -> None:
    """30 steps of half a second at the largest size, for an answer that was known after 12 s."""
    rng = random.Random(0)
    series: list[float] = []
    while not fine_after(12.0).is_enough(series):
        series.append(0.52 * rng.gauss(1, 0.03))
    assert len(series) == FINE.least
    assert fine_after(1.0).most_s < fine_after(30.0).most_s <= FINE.most_s
    assert fine_after(1e6).most_s == FINE.most_s


@pytest.mark.parametrize("timing", [BRIEF, FINE])
def test_long_steps_that_vary_are_not_repeated_for_minutes(timing: Timing) -> None:
    rng = random.Random(3)
    series: list[float] = []
    while not timing.is_enough(series):
        series.append(4 * rng.uniform(0.7, 1.3))
    assert len(series) == max(timing.least, 3)
    assert verdict(series, target=timing.target) != "steady"


def test_planted_series_are_distinguished() -> None:
    rng = random.Random(1)
    clean = [1 + rng.gauss(0, 0.005) for _ in range(30)]
    assert verdict(clean, target=0.015) == "steady"
    assert verdict([one * (1 + 0.01 * n) for n, one in enumerate(clean)], target=0.015) == "drifting"
    assert verdict([one * (1 - 0.01 * n) for n, one in enumerate(clean)], target=0.015) == "drifting"
    assert (
        verdict([one * (4 if n % 5 == 0 else 1) for n, one in enumerate(clean)], target=0.015) == "stalling"
    )
    assert verdict([1 + rng.uniform(-0.3, 0.3) for _ in range(30)], target=0.015) == "noisy"


def test_clean_series_are_rarely_called_unsteady() -> None:
    rng = random.Random(2)
    wrong = sum(
        verdict([1 + rng.gauss(0, 0.01) for _ in range(20)], target=0.05) != "steady" for _ in range(500)
    )
    assert wrong <= 5


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA GH200 480GB", "bf16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156e12),
        ("Tesla T4", "fp16", 65e12),
        ("Tesla T4", "bf16", None),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA GeForce RTX 4090", "fp32", 82.6e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("some new GPU", "bf16", None),
    ],
)
def test_peaks_of_devices(name: str, precision: str, expected: float | None) -> None:
    assert peak_flops(name, precision) == expected
