"""The noise scale: unbiased, as sure as it says, and silent where it knows nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from statistics import NormalDist, fmean, median

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._noise.pure.estimate import (
    CLEARLY,
    NoiseObservation,
    NoiseReading,
    NoiseState,
    fieller,
    joined_reading,
    observe,
    selected,
    student,
)

DIMENSIONS = 64
numbers = st.floats(-1e6, 1e6)
positive = st.floats(1e-3, 1e6)


def squares(sizes: Sequence[int], scale: float, draw: random.Random) -> tuple[list[float], float]:
    """Squared norms of the microbatches' gradients and of the batch's: |G|^2 = 1, tr(Sigma) = scale."""
    spreads = [math.sqrt(scale / DIMENSIONS / size) for size in sizes]
    norms, whole, total = [0.0] * len(sizes), sum(sizes), 0.0
    for dimension in range(DIMENSIONS):
        mean = 1.0 if dimension == 0 else 0.0
        values = [draw.gauss(mean, spread) for spread in spreads]
        for at, value in enumerate(values):
            norms[at] += value * value
        total += (sum(value * size for value, size in zip(values, sizes, strict=True)) / whole) ** 2
    return norms, total


def cheap_squares(sizes: Sequence[int], scale: float, draw: random.Random) -> tuple[list[float], float]:
    """The same for the first microbatch and the rest: two draws a dimension, however many microbatches."""
    return squares_of_two(sizes[0], sum(sizes), scale, draw)


def squares_of_two(first: int, whole: int, scale: float, draw: random.Random) -> tuple[list[float], float]:
    one, rest = math.sqrt(scale / DIMENSIONS / first), math.sqrt(scale / DIMENSIONS / (whole - first))
    norm = total = 0.0
    for dimension in range(DIMENSIONS):
        mean = 1.0 if dimension == 0 else 0.0
        a, b = draw.gauss(mean, one), draw.gauss(mean, rest)
        norm += a * a
        total += ((a * first + b * (whole - first)) / whole) ** 2
    return [norm], total


def run(
    sizes: Sequence[int],
    scale: float,
    steps: int,
    seed: int,
    how: Callable[..., tuple[list[float], float]] = cheap_squares,
) -> NoiseReading:
    draw, state = random.Random(seed), NoiseState(decay_samples=400 * sum(sizes))
    for _ in range(steps):
        norms, total = how(sizes, scale, draw)
        state = state.with_step(observe(sizes, norms, total))
    return state.reading()


# ---- one step


@examples(100)
@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=8),
    st.floats(0.1, 1e4),
    st.floats(0.1, 1e4),
    st.data(),
)
def test_a_step_gives_back_noise_and_signal_that_its_expected_norms_were_made_of(
    sizes: list[int], noise: float, signal: float, data: st.DataObject
) -> None:
    """The estimator is linear in the norms, so it is unbiased exactly where it inverts their expectations."""
    weights = data.draw(st.none() | st.lists(st.floats(1, 1.5), min_size=len(sizes), max_size=len(sizes)))
    if weights is not None:
        weights = [weight * size for weight, size in zip(weights, sizes, strict=True)]
    used: Sequence[float] = sizes if weights is None else weights
    count = data.draw(st.integers(1, len(sizes)))
    norms = [signal + noise / size for size in sizes[:count]]
    rate = sum((weight / sum(used)) ** 2 / size for weight, size in zip(used, sizes, strict=True))
    try:
        seen = observe(sizes, norms, signal + noise * rate, weights=weights)
    except ValueError:
        assert weights is not None
        return
    # Where the two rates are close together, rounding is all that is left of their difference.
    slack = 1e-12 * (signal + noise) / (seen.small_rate - seen.big_rate)
    assert seen.noise == pytest.approx(noise, rel=1e-9, abs=slack)
    assert seen.signal == pytest.approx(signal, rel=1e-9, abs=slack + 1e-9 * noise)


def test_equal_sizes_are_the_formula_of_the_paper() -> None:
    seen = observe([8] * 4, [5.0, 6.0, 7.0, 6.0], 3.0)
    small, big, b, whole = 6.0, 3.0, 8, 32
    assert seen.noise == pytest.approx((small - big) / (1 / b - 1 / whole))
    assert seen.signal == pytest.approx((whole * big - b * small) / (whole - b))


@pytest.mark.parametrize("how", [squares, cheap_squares])
@pytest.mark.parametrize("sizes", [[8] * 4, [16, 16, 16, 5]])
def test_the_average_over_many_steps_is_the_truth(sizes: list[int], how: Callable[..., tuple]) -> None:
    draw = random.Random(3)
    seen = [observe(sizes, *how(sizes, 200.0, draw)) for _ in range(1500)]
    assert fmean(one.noise for one in seen) == pytest.approx(200, rel=0.03)
    assert fmean(one.signal for one in seen) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize(
    ("sizes", "norms", "weights", "text"),
    [
        ([8], [1.0], None, "sizes must name at least two parts"),
        ([8, 0], [1.0], None, "sizes must be above 0"),
        ([8, 8], [], None, "norms must be 1 to 2, not 0"),
        ([8, 8], [1.0] * 3, None, "norms must be 1 to 2, not 3"),
        ([8, 8], [1.0], [1.0], "weights must be one number above 0 a part"),
        ([8, 8], [1.0], [1.0, 0.0], "weights must be one number above 0 a part"),
        ([16, 1], [1.0], [0.1, 0.9], "more precise than its parts"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    sizes: list[int], norms: list[float], weights: list[float] | None, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        observe(sizes, norms, 1.0, weights=weights)


# ---- a planted noise scale


@pytest.mark.parametrize(
    ("scale", "sizes", "steps"),
    [
        (64, [8] * 4, 200),
        (64, [12, 9, 7, 4], 200),
        (64, [4, 12, 6, 10] * 4, 200),
        (1_000, [8] * 16, 200),
        (1_000, [4, 12, 6, 10] * 4, 300),
        (10_000, [8] * 64, 1500),
    ],
)
def test_a_planted_scale_is_found_within_five_percent(scale: int, sizes: list[int], steps: int) -> None:
    readings = [run(sizes, scale, steps, seed) for seed in range(8)]
    scales = [reading.scale for reading in readings if reading.scale is not None]
    assert len(scales) >= 7
    noise = fmean(reading.noise or 0.0 for reading in readings)
    signal = fmean(reading.signal or 0.0 for reading in readings)
    assert noise / signal == pytest.approx(scale, rel=0.05 if scale < 10_000 else 0.15)
    assert median(scales) == pytest.approx(scale, rel=0.12 if scale < 10_000 else 0.25)


@pytest.mark.parametrize("scale", [100, 1_000])
def test_intervals_cover_as_often_as_they_say(scale: int) -> None:
    """A short form of benchmarks/noise_planted.py: strong and weak signal, those that give an estimate."""
    sizes = [8] * 4
    readings = [run(sizes, scale, 60, seed) for seed in range(200)]
    given_ones = [reading for reading in readings if reading.scale is not None]
    for some in (readings, given_ones) if len(given_ones) > 100 else (readings,):
        covered = sum(_covers(reading, scale) for reading in some)
        assert 0.90 * len(some) <= covered <= 0.995 * len(some), (covered, len(some))
    if scale == 1_000:
        assert len(given_ones) < 100


def _covers(reading: NoiseReading, scale: float) -> bool:
    assert reading.low is not None
    return reading.low <= scale and (reading.high is None or scale <= reading.high)


def test_a_signal_that_is_lost_in_noise_gives_no_estimate_but_a_bound() -> None:
    reading = run([8] * 4, 100_000, 100, seed=1)
    assert reading.scale is None
    assert reading.high is None
    assert reading.low is not None
    assert 50 < reading.low < 100_000
    assert "cannot be distinguished from zero" in reading.reason
    assert "it is at least" in str(reading)


def test_estimates_that_pass_by_luck_say_that_they_have_no_upper_end() -> None:
    """Far less than the truth, shown only where it came out large: the interval must know."""
    readings = [run([8] * 4, 1_000, 80, seed) for seed in range(200)]
    lucky = [reading for reading in readings if reading.scale is not None]
    assert 3 <= len(lucky) <= 60
    assert median(reading.scale or 0.0 for reading in lucky) < 600
    assert sum(_covers(reading, 1_000) for reading in lucky) >= len(lucky) - 1


# ---- the averages


def observation(noise: float, signal: float, samples: float = 32) -> NoiseObservation:
    small_rate, big_rate = 1 / 8, 1 / 32
    return NoiseObservation(
        signal + noise * small_rate, small_rate, signal + noise * big_rate, big_rate, samples
    )


@examples(60)
@given(st.lists(st.tuples(numbers, numbers, st.floats(1, 1e4)), min_size=2, max_size=30), st.floats(10, 1e5))
def test_the_averages_are_weighted_by_samples_as_if_made_in_one_go(
    reported: list[tuple[float, float, float]], decay: float
) -> None:
    state, seen = NoiseState(decay_samples=decay), []
    for noise, signal, samples in reported:
        seen.append(observation(noise, signal, samples))
        state = state.with_step(seen[-1])
    weights, later = [], 0.0
    for one in reversed(seen):
        weights.append(-math.expm1(-one.samples / decay) * math.exp(-later / decay))
        later += one.samples
    weights.reverse()
    total = math.fsum(weights)
    noise = math.fsum(w * one.noise for w, one in zip(weights, seen, strict=True)) / total
    signal = math.fsum(w * one.signal for w, one in zip(weights, seen, strict=True)) / total
    close = {"rel": 1e-6, "abs": 1e-3}
    assert state.noise == pytest.approx(noise, **close)
    assert state.signal == pytest.approx(signal, **close)
    count = total**2 / math.fsum(w * w for w in weights)
    assert state.effective_steps == pytest.approx(count, rel=1e-6)
    if count > 1.01:
        factor = count / (count - 1) / total**2
        nn = factor * math.fsum(
            w * w * (one.noise - noise) ** 2 for w, one in zip(weights, seen, strict=True)
        )
        ns = factor * math.fsum(
            w * w * (one.noise - noise) * (one.signal - signal) for w, one in zip(weights, seen, strict=True)
        )
        got = state.errors()
        assert got[0] == pytest.approx(nn, rel=1e-4, abs=1e-2)
        assert got[1] == pytest.approx(ns, rel=1e-4, abs=1e-4 * math.sqrt(nn * max(got[2], 1e-9)) + 1e-2)


def test_decay_is_per_sample_so_cutting_a_step_in_two_changes_nothing() -> None:
    whole, halves = NoiseState(decay_samples=500), NoiseState(decay_samples=500)
    for number in range(20):
        whole = whole.with_step(observation(number, 1.0, 100))
        for _ in range(2):
            halves = halves.with_step(observation(number, 1.0, 50))
    assert halves.noise == pytest.approx(whole.noise)


def test_a_step_that_is_not_finite_is_skipped_and_counted() -> None:
    state = NoiseState().with_step(observation(3.0, 1.0))
    for wrong in (math.nan, math.inf, -math.inf):
        reported = state.with_step(replace(observation(3.0, 1.0), big=wrong))
        assert reported == replace(state, skipped=1)


def test_nothing_is_clamped_before_it_is_averaged() -> None:
    state = NoiseState(decay_samples=1e9)
    for signal in (-9.0, 11.0) * 20:
        state = state.with_step(observation(50.0, signal))
    assert state.signal == pytest.approx(1.0, rel=1e-5)


def test_why_there_is_no_estimate() -> None:
    state = NoiseState()
    assert state.reading().reason == "0 of 20 steps so far"
    assert state.reading().noise is None
    single = state.with_single().with_single()
    assert "all 2 steps had one microbatch" in single.reading().reason
    assert "microbatch_size" in single.reading().reason
    broken = state.with_step(replace(observation(1.0, 1.0), big=math.nan))
    assert broken.reading().reason == "the gradients of all 1 steps were not finite"
    some = state
    for _ in range(8):
        some = some.with_step(observation(1.0, 1.0))
    assert some.reading().reason == "8 of 20 steps so far"
    assert some.reading(min_steps=8).scale == pytest.approx(1.0)
    forgetful = NoiseState(decay_samples=20)
    for _ in range(50):
        forgetful = forgetful.with_step(observation(1.0, 1.0))
    assert "too few for a standard error" in forgetful.reading().reason
    assert str(some.reading()) == "no noise scale: 8 of 20 steps so far"


def test_steps_without_any_spread_are_a_point() -> None:
    state = NoiseState()
    for _ in range(30):
        state = state.with_step(observation(640.0, 2.0))
    reading = state.reading()
    assert reading.scale == pytest.approx(320)
    assert reading.low == pytest.approx(320)
    assert reading.high == pytest.approx(320)
    assert str(reading).startswith("noise scale 320 samples (95 %: 320 to 320)")


@pytest.mark.parametrize("decay", [0, -1, math.nan, math.inf])
def test_decay_must_be_above_zero(decay: float) -> None:
    with pytest.raises(ValueError, match="decay_samples must be a number above 0, not"):
        NoiseState(decay_samples=decay)


def test_the_default_memory_is_two_hundred_first_steps() -> None:
    assert NoiseState().with_step(observation(1.0, 1.0, samples=64)).decay_samples == 200 * 64


# ---- the interval


@examples(100)
@given(positive, positive, st.floats(0, 0.2), st.floats(0, 0.2), st.floats(-0.9, 0.9))
def test_fieller_holds_the_estimate_and_its_ends_are_just_not_refuted(
    noise: float, signal: float, first: float, second: float, correlation: float
) -> None:
    errors = ((first * noise) ** 2, correlation * first * noise * second * signal, (second * signal) ** 2)
    low, high = fieller(noise, signal, errors, 1.96)
    assert high is not None
    assert low <= noise / signal * (1 + 1e-9)
    assert high >= noise / signal * (1 - 1e-9)
    for end in (low, high):
        if end > 0:
            variance = errors[0] - 2 * end * errors[1] + end**2 * errors[2]
            gap = abs(noise - end * signal)
            assert gap == pytest.approx(1.96 * math.sqrt(max(0.0, variance)), rel=1e-5, abs=1e-6 * noise)


@examples(100)
@given(positive, numbers, st.floats(0, 0.2))
def test_fieller_has_no_upper_end_where_the_signal_may_be_zero(
    noise: float, signal: float, first: float
) -> None:
    errors = ((first * noise) ** 2, 0.0, (abs(signal) + 1) ** 2)
    low, high = fieller(noise, signal, errors, 1.96)
    assert high is None
    assert low >= 0
    if low > 0:
        variance = errors[0] + low**2 * errors[2]
        assert abs(noise - low * signal) == pytest.approx(1.96 * math.sqrt(variance), rel=1e-6)


@pytest.mark.parametrize(
    ("noise", "signal", "errors"), [(-5.0, 1.0, (1.0, 0.0, 4.0)), (5.0, -9.0, (1.0, 0.0, 1.0))]
)
def test_fieller_says_nothing_where_the_averages_make_no_sense(
    noise: float, signal: float, errors: tuple[float, float, float]
) -> None:
    assert fieller(noise, signal, errors, 1.96) == (0.0, None)


@pytest.mark.parametrize(
    ("freedom", "table"), [(4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (1e9, 1.960)]
)
def test_students_t_is_that_of_the_tables(freedom: float, table: float) -> None:
    assert student(0.95, freedom) == pytest.approx(table, abs=0.002)


def test_selection_moves_what_only_just_passed_and_leaves_the_rest() -> None:
    assert selected(CLEARLY + 0.001, 1.96) == (1.0, None)
    assert selected(CLEARLY + 0.1, 1.96)[1] is None
    pairs = [selected(z, 1.96) for z in (4.5, 5, 6, 8, 40, math.inf)]
    above, below = [pair[0] for pair in pairs], [pair[1] or math.inf for pair in pairs]
    assert above == sorted(above)
    assert below == sorted(below, reverse=True)
    assert below[0] > 2.5
    assert pairs[3] == (pytest.approx(1.96, abs=0.01), pytest.approx(1.96, abs=0.01))
    assert pairs[4:] == [(1.96, 1.96)] * 2


@pytest.mark.parametrize("g", [1.0, 2.5, 4.0, 6.0])
def test_estimates_that_are_given_cover_the_truth(g: float) -> None:
    """A plain N(g, 1), given above the border only: 95 % of what is given, or more where very few are."""
    draw, reported, covered = random.Random(5), 0, 0
    while reported < 3000:
        z = draw.gauss(g, 1) if g > 2 else NormalDist(g, 1).inv_cdf(1 - draw.random() * 0.0227)
        if z <= CLEARLY:
            continue
        above, below = selected(z, 1.96)
        reported += 1
        covered += z - (math.inf if below is None else below) <= g <= z + above
    assert 0.94 <= covered / reported <= (0.98 if g > 2 else 1.0)


# ---- as data


@examples(50)
@given(st.lists(st.tuples(numbers, numbers, st.floats(1, 1e4)), max_size=30), st.integers(0, 3))
def test_a_state_goes_through_json_unchanged(reported: list[tuple[float, float, float]], single: int) -> None:
    state = NoiseState()
    for one in reported:
        state = state.with_step(observation(*one))
    for _ in range(single):
        state = state.with_single()
    assert NoiseState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("steps", 1.5), ("noise", "3"), ("signal", None), ("total", math.nan), ("steps", True)],
)
def test_a_state_that_cannot_be_read_says_which_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        NoiseState.from_dict({**NoiseState().to_dict(), field: value})


def test_ranks_that_saw_different_samples_are_as_sure_as_all_of_them() -> None:
    states = []
    for seed in range(8):
        draw, state = random.Random(seed), NoiseState(decay_samples=1e9)
        for _ in range(60):
            state = state.with_step(observe([8] * 4, *cheap_squares([8] * 4, 64, draw)))
        states.append(state)
    joined = joined_reading(states)
    alone = states[0].reading()
    assert joined.scale == pytest.approx(64, rel=0.1)
    assert joined.low is not None
    assert joined.low <= 64 <= (joined.high or math.inf)
    assert joined.signal_error == pytest.approx((alone.signal_error or 0) / math.sqrt(8), rel=0.3)
    assert joined.samples == sum(state.samples for state in states)
    assert asdict(joined_reading([states[0]])) == asdict(alone)
    assert joined_reading([NoiseState(), states[0]]).scale == alone.scale
    assert joined_reading([NoiseState()]).reason == "0 of 20 steps so far"
    with pytest.raises(ValueError, match="states must hold at least one"):
        joined_reading([])
