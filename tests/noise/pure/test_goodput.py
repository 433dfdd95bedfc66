"""Decisions from the noise scale: capped, calm, explained, and never without an estimate."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._noise.pure.estimate import NoiseReading
from batchfit._noise.pure.goodput import DecideSettings, decide, efficiency

SIZES = [32, 64, 128, 256, 512, 1024]
counts = st.integers(1, 100_000)
candidate_lists = st.lists(counts, min_size=1, max_size=12)


def reading(
    scale: float, low: float | None = None, high: float | None = None, *, bounded: bool = True
) -> NoiseReading:
    low = scale if low is None else low
    high = scale if high is None else high
    return NoiseReading(
        scale=scale,
        low=low,
        high=high if bounded else None,
        noise=scale,
        signal=1.0,
        noise_error=0.1,
        signal_error=0.1,
        steps=100,
        samples=6400,
        effective_steps=90.0,
        skipped=0,
        reason="",
    )


def saturating(half: float) -> Callable[[int], float]:
    """Samples/s of a device that is half busy at `half` samples."""
    return lambda size: 1000 * size / (size + half)


NONE = replace(reading(1.0), scale=None, high=None, reason="3 of 20 steps so far")


@st.composite
def readings(draw: st.DrawFn) -> NoiseReading:
    ends = sorted(draw(st.lists(st.floats(0, 1e6), min_size=3, max_size=3)))
    return reading(ends[1], ends[0], ends[2], bounded=draw(st.booleans()))


settings_drawn = st.builds(
    DecideSettings,
    ratio=st.floats(1.1, 8),
    hysteresis=st.floats(0.01, 0.5),
    min_steps=st.integers(0, 100),
    target=st.floats(0.1, 4),
    can_shrink=st.booleans(),
    use_bound=st.booleans(),
)
curves = st.none() | st.floats(0.1, 1e5).map(saturating)


@examples(100)
@given(
    readings() | st.none() | st.just(NONE),
    counts,
    candidate_lists,
    curves,
    settings_drawn,
    st.none() | counts,
)
def test_never_beyond_the_cap_and_never_a_size_that_was_not_offered(
    seen: NoiseReading | None,
    current: int,
    candidates: list[int],
    throughput: Callable[[int], float] | None,
    how: DecideSettings,
    largest: int | None,
) -> None:
    decision = decide(seen, current, candidates, throughput, how, largest=largest)
    if largest is not None:
        assert decision.size <= largest
    assert decision.size in {current, largest, *candidates}
    assert (decision.size == current) == (decision.action == "stay")
    assert decision.reason
    if decision.action == "grow":
        assert decision.size > current
    if decision.action in ("shrink", "cap"):
        assert decision.size < current
    if decision.action == "shrink":
        assert how.can_shrink


@examples(100)
@given(
    st.none() | st.just(NONE),
    counts,
    candidate_lists,
    curves,
    settings_drawn.filter(lambda how: not how.use_bound),
)
def test_no_estimate_no_change(
    seen: NoiseReading | None,
    current: int,
    candidates: list[int],
    throughput: Callable[[int], float] | None,
    how: DecideSettings,
) -> None:
    decision = decide(seen, current, candidates, throughput, how)
    assert (decision.size, decision.action) == (current, "stay")
    assert decision.reason.startswith("no estimate of the noise scale: ")


@examples(300)
@given(readings(), counts, candidate_lists, curves, settings_drawn)
def test_a_reading_that_does_not_change_leads_to_one_chain_of_moves(
    seen: NoiseReading,
    current: int,
    candidates: list[int],
    throughput: Callable[[int], float] | None,
    how: DecideSettings,
) -> None:
    visited, directions = [current], set()
    for _ in range(len(candidates) + 2):
        decision = decide(seen, visited[-1], candidates, throughput, how)
        if decision.action == "stay":
            break
        assert decision.size not in visited, "in a circle"
        visited.append(decision.size)
        directions.add(decision.action)
    else:
        pytest.fail(f"no end: {visited}")
    if throughput is None:
        assert len(directions) <= 1


@examples(100)
@given(readings(), counts, candidate_lists, curves, settings_drawn, st.integers(0, 99))
def test_a_change_waits_for_its_steps(
    seen: NoiseReading,
    current: int,
    candidates: list[int],
    throughput: Callable[[int], float] | None,
    how: DecideSettings,
    steps: int,
) -> None:
    decision = decide(seen, current, candidates, throughput, how, steps_since_change=steps)
    if steps < how.min_steps:
        assert decision.action == "stay"
        assert f"{steps} of {how.min_steps} steps" in decision.reason
    else:
        assert decision == decide(seen, current, candidates, throughput, how)


@examples(100)
@given(st.floats(1, 1e6), st.floats(1.001, 100), counts, candidate_lists, curves, settings_drawn)
def test_more_noise_never_means_a_smaller_batch(
    scale: float,
    more: float,
    current: int,
    candidates: list[int],
    throughput: Callable[[int], float] | None,
    how: DecideSettings,
) -> None:
    less_noise = decide(reading(scale), current, candidates, throughput, how)
    more_noise = decide(reading(scale * more), current, candidates, throughput, how)
    assert more_noise.size >= less_noise.size


@examples(400)
@given(readings(), counts, candidate_lists, curves, settings_drawn)
def test_every_noise_scale_in_the_interval_agrees(
    seen: NoiseReading,
    current: int,
    candidates: list[int],
    throughput: Callable[[int], float] | None,
    how: DecideSettings,
) -> None:
    decision = decide(seen, current, candidates, throughput, how)
    if decision.action == "stay":
        return
    assert seen.low is not None
    for scale in (seen.low, seen.scale or 0.0, 1e9 if seen.high is None else seen.high):
        if throughput is not None:
            gain = throughput(decision.size) / throughput(current)
            gain *= (scale + current) / (scale + decision.size)
            assert gain >= (1 + how.hysteresis) * (1 - 1e-9)
            assert decision.gain is not None
            assert gain >= decision.gain * (1 - 1e-9)
        elif decision.action == "grow":
            assert decision.size <= how.target * scale
        else:
            assert decision.size >= how.target * scale


def test_a_doubt_about_the_noise_is_a_reason_to_stay() -> None:
    throughput = saturating(500)
    assert decide(reading(2000), 128, SIZES, throughput).size == 256
    assert decide(reading(2000, low=10, high=9000), 128, SIZES, throughput).size == 128
    assert decide(reading(2000, low=900, bounded=False), 128, SIZES, throughput).size == 256
    assert decide(reading(20, low=15, high=25), 512, SIZES, saturating(5)).size == 256
    assert decide(reading(20, low=15, bounded=False), 512, SIZES, saturating(5)).size == 512


def test_a_lower_bound_alone_may_grow_a_batch_where_that_is_asked_for() -> None:
    bound = replace(
        reading(1.0, low=2000.0, bounded=False), scale=None, reason="cannot be distinguished from zero"
    )
    asked = DecideSettings(use_bound=True)
    assert decide(bound, 128, SIZES).size == 128
    grown = decide(bound, 128, SIZES, settings=asked)
    assert (grown.size, grown.reason) == (
        256,
        "noise scale of at least 2,000 is above 256 in all of its interval",
    )
    assert decide(bound, 128, SIZES, saturating(500), asked).size == 256
    assert decide(replace(bound, low=0.0), 512, SIZES, saturating(1), asked).size == 512
    assert decide(replace(bound, low=None), 128, SIZES, settings=asked).size == 128


def test_goodput_is_weighed_with_what_a_size_costs() -> None:
    """A busy device gains nothing from more samples; an idle one gains until the noise is used up."""
    assert decide(reading(500), 128, SIZES, lambda size: 1000.0).action == "shrink"
    assert decide(reading(500), 128, SIZES, lambda size: 10.0 * size).size == 256
    chain, sizes = [64], [*SIZES, 2048, 4096]
    while decide(reading(500), chain[-1], sizes, saturating(2000)).action == "grow":
        chain.append(decide(reading(500), chain[-1], sizes, saturating(2000)).size)
    assert chain == [64, 128, 256, 512, 1024]  # goodput s(B)/(phi + B) is best at sqrt(500 * 2000) = 1000


def test_without_samples_per_second_the_aim_is_the_noise_scale() -> None:
    assert decide(reading(300), 64, SIZES).size == 128
    assert decide(reading(300), 128, SIZES).size == 256
    assert decide(reading(300), 256, SIZES).size == 256
    assert decide(reading(300), 512, SIZES).size == 512  # neither 256 nor 1024 is clearly better
    assert decide(reading(200), 512, SIZES).size == 256
    assert decide(reading(300), 256, SIZES, settings=DecideSettings(target=2)).size == 512
    assert decide(reading(300, low=100), 128, SIZES).size == 128


def test_each_decision_explains_itself_with_its_numbers() -> None:
    grown = decide(reading(2000, 1500, 2600), 128, SIZES, saturating(500))
    assert str(grown).startswith("batch size 256 (grow): noise scale 2,000 (1,500 to 2,600); 256 has 1.66x")
    assert re.search(r"goodput x1\.54$", grown.reason)
    stays = decide(reading(2000), 1024, SIZES, saturating(500))
    assert "less than the x1.05 that a change must bring" in stays.reason
    assert decide(reading(2000), 1024, [1024], saturating(1)).reason.endswith("no other size is allowed")
    assert "1024 is the largest size" in decide(reading(9000), 1024, SIZES).reason
    capped = decide(None, 1024, SIZES, largest=600)
    assert (capped.size, capped.reason) == (512, "1024 is above the limit of 600")
    assert decide(None, 1024, SIZES, largest=20).size == 20


def test_a_step_is_at_most_the_ratio_where_that_is_possible() -> None:
    assert decide(reading(1e6), 32, SIZES).size == 64
    assert decide(reading(1e6), 32, SIZES, settings=DecideSettings(ratio=4)).size == 128
    assert decide(reading(1e6), 32, [32, 512]).size == 512
    assert decide(reading(1), 1024, SIZES, settings=DecideSettings(ratio=4)).size == 256


def test_efficiency_is_that_of_the_papers() -> None:
    assert efficiency(100, 100) == 0.5
    assert efficiency(512, 1000, reference=128) == pytest.approx(1128 / 1512)
    assert efficiency(64, math.inf) == 1.0


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"current": 0}, "current must be an integer of at least 1, not 0"),
        ({"candidates": [1, 2.5]}, "candidates must be integers of at least 1, not 2.5"),
        ({"largest": 0}, "largest must be an integer of at least 1, not 0"),
        ({"steps_since_change": -1}, "steps_since_change must be an integer of at least 0, not -1"),
        ({"throughput": lambda size: 0.0}, "throughput must give a number above 0 for a size of 64, not 0.0"),
    ],
)
def test_wrong_arguments(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        decide(reading(10.0), **{"current": 64, "candidates": SIZES, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("ratio", 1), ("hysteresis", 0), ("min_steps", -1), ("min_steps", 1.5), ("target", math.nan)],
)
def test_wrong_settings(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        DecideSettings(**{name: value})  # type: ignore[arg-type]
