"""The search: for any capacity, settings and readings the answer was run, is allowed and is right."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from batchfit._find.pure.search import STRATEGIES, Observation, Request, Search, run
from batchfit.errors import ResultFileError
from batchfit.results import REASONS

GIB = 2**30
BUDGET = 24 * GIB
H200_CURVES = Path(__file__).parents[2] / "data" / "h200_curves.json"
SEARCH_CASES = json.loads((Path(__file__).parents[2] / "data" / "search_cases.json").read_text())

Readings = Callable[[int], dict[str, int]]


def no_readings(size: int) -> dict[str, int]:
    return {}


def linear(capacity: int, *, fixed: float = 0.2, held: bool = False, room: float = 0.5) -> Readings:
    """Peaks on a line that meets the budget between `capacity` and the next size."""

    def read(size: int) -> dict[str, int]:
        peak = BUDGET * (fixed + (1 - fixed) * size / (capacity + room))
        return {"allocated_bytes": int(peak), **({"held_bytes": int(BUDGET * fixed)} if held else {})}

    return read


def convex(capacity: int, *, held: bool = False, room: float = 0.5) -> Readings:
    """Flat at first, where the optimizer step is the peak; then two knees."""

    def read(size: int) -> dict[str, int]:
        share = size / (capacity + room)
        peak = max(0.25, 0.22 + 0.553 * share, 0.18 + 0.82 * share)
        return {"allocated_bytes": int(BUDGET * peak), **({"held_bytes": int(BUDGET * 0.15)} if held else {})}

    return read


def lies(seed: int) -> Readings:
    """Readings that have nothing to do with the size."""
    kind = seed % 7
    level = random.Random(seed).random()

    def read(size: int) -> dict[str, int]:
        rng = random.Random(f"{seed}/{size}")
        flat = int(BUDGET * level)
        return [
            {},
            {"allocated_bytes": 0},
            {"allocated_bytes": flat},
            {"allocated_bytes": BUDGET},
            {"allocated_bytes": rng.randrange(BUDGET), "held_bytes": rng.randrange(BUDGET)},
            {"allocated_bytes": flat // size},
            {
                "allocated_bytes": rng.randrange(BUDGET),
                "reserved_bytes": rng.randrange(2 * BUDGET),
                "split_bytes": rng.randrange(BUDGET),
                "largest_bytes": rng.randrange(BUDGET),
                "retries": rng.randrange(2),
            },
        ][kind]

    return read


def play(
    search: Search,
    capacity: int,
    readings: Readings = no_readings,
    *,
    sustained: int | None = None,
    most: int = 120,
) -> Search:
    """Run `search` against a device on which sizes up to `capacity` run, checking every step of it."""
    asked: set[Request] = set()
    while (request := search.ask()) is not None:
        assert search.stopped_because is None
        assert request not in asked, "no size is asked twice with the same flag"
        asked.add(request)
        assert request.size in search.sizes
        assert request.size >= search.min_size
        assert search.max_size is None or request.size <= search.max_size
        assert request.size % search.multiple_of == 0
        assert not search.power_of_two or request.size & (request.size - 1) == 0
        assert search.soak or not request.soak
        assert all(request.size < one.size for one in search.observations if not one.fits)
        assert len(asked) <= most, f"still asking after {[one.size for one in search.observations]}"
        fits = request.size <= capacity and not (
            request.soak and sustained is not None and request.size > sustained
        )
        search = search.tell(
            Observation(size=request.size, fits=fits, soak=request.soak, **readings(request.size))
        )
    check_end(search)
    return search


def check_end(search: Search) -> None:
    """What holds at the end of any search."""
    reason = search.stopped_because
    assert reason in REASONS or reason == "nothing_fits"
    ran = {one.size for one in search.observations if one.fits}
    failed = [one.size for one in search.observations if not one.fits]
    if search.best is None:
        assert reason in ("nothing_fits", "max_trials", "attempts")
        assert (reason == "nothing_fits") == (search.sizes.first in failed)
        return
    assert search.best in ran
    assert all(search.best < size for size in failed)
    if search.soak and search.max_trials is None:
        assert any(one.soak and one.fits for one in search.observations if one.size == search.best)
    if reason == "max_size":
        assert search.best == search.sizes.last


@st.composite
def searches(draw: st.DrawFn, /, *, strategy: str | None = None, **fixed: Any) -> Search:
    """Any valid settings."""
    min_size = draw(st.integers(1, 40))
    power_of_two = draw(st.booleans())
    multiple_of = draw(st.sampled_from([1, 2, 8, 64] if power_of_two else [1, 1, 1, 2, 3, 8, 64]))
    values: dict[str, Any] = {
        "strategy": strategy or draw(st.sampled_from(sorted(STRATEGIES))),
        "budget_bytes": draw(st.sampled_from([BUDGET, None])),
        "min_size": min_size,
        "max_size": draw(st.none() | st.integers(min_size, 9000)),
        "multiple_of": multiple_of,
        "power_of_two": power_of_two,
        "tolerance": draw(st.sampled_from([0, 0.02, 0.1])),
        "start": draw(st.none() | st.integers(1, 9000)),
        "attempts": draw(st.integers(1, 8)),
        "soak": draw(st.booleans()),
        "costly_trials": draw(st.booleans()),
        **fixed,
    }
    if values["strategy"] in ("halve", "grow") and values["start"] is None and values["max_size"] is None:
        values["start"] = 100
    first = Search(**{**values, "max_size": None, "start": 1}).sizes.first
    assume(values["max_size"] is None or values["max_size"] >= first)  # some size is allowed
    return Search(**values)


capacities = st.integers(0, 8191) | st.integers(0, 70)


# --- any settings, any readings -------------------------------------------------------------------


@examples(400)
@given(searches(), capacities, st.integers(0, 1000), st.none() | st.floats(0, 1))
def test_any_search_ends_with_something_that_ran(
    search: Search, capacity: int, seed: int, survives: float | None
) -> None:
    sustained = None if survives is None else int(capacity * survives)
    play(search, capacity, lies(seed), sustained=sustained)


@examples(300)
@given(searches(), capacities, st.integers(0, 1000))
def test_a_round_trip_through_json_changes_nothing(search: Search, capacity: int, seed: int) -> None:
    read = lies(seed)
    while True:
        again = Search.from_json(search.to_json())
        assert again == search
        assert again.ask() == search.ask()
        assert again.best == search.best
        assert again.stopped_because == search.stopped_because
        if (request := search.ask()) is None:
            break
        search = search.tell(
            Observation(
                size=request.size, fits=request.size <= capacity, soak=request.soak, **read(request.size)
            )
        )


@examples(300)
@given(st.data(), searches())
def test_an_oracle_that_contradicts_itself_neither_loops_nor_crashes(
    data: st.DataObject, search: Search
) -> None:
    # Fits at random, so that a size may pass and fail its soak, and a smaller one fail where a larger ran.
    rng = random.Random(data.draw(st.integers(0, 10_000)))
    for _ in range(150):
        if (request := search.ask()) is None:
            break
        fits = request.size < 9000 and rng.random() < 0.6
        search = search.tell(
            Observation(
                size=request.size, fits=fits, soak=request.soak, allocated_bytes=rng.randrange(BUDGET)
            )
        )
    check_end(search)


@examples(200)
@given(searches(), capacities, st.integers(0, 1000), st.integers(1, 12))
def test_max_trials_is_a_limit_and_leaves_an_answer(
    search: Search, capacity: int, seed: int, max_trials: int
) -> None:
    limited = play(dataclasses.replace(search, max_trials=max_trials), capacity, lies(seed))
    assert len(limited.observations) <= max_trials
    free = play(search, capacity, lies(seed))
    if len(free.observations) < max_trials:
        assert limited.observations == free.observations
        assert limited.stopped_because == free.stopped_because
    if limited.best is not None and search.soak and limited.observations[-1].fits:
        assert limited.observations[-1].soak, "the last trial is the soak"


def test_a_soak_forced_by_max_trials_is_no_decision() -> None:
    done = play(Search(budget_bytes=BUDGET, max_trials=2), 100, linear(100))
    assert [(one.size, one.soak) for one in done.observations] == [(1, False), (1, True)]
    assert done.stopped_because == "max_trials"


@examples(200)
@given(
    st.integers(0, 8191), st.integers(0, 1000), st.sampled_from([0, 0.02, 0.1]), st.booleans(), st.booleans()
)
def test_guided_needs_at_most_24_trials_whatever_the_readings_say(
    capacity: int, seed: int, tolerance: float, soak: bool, budget: bool
) -> None:
    search = Search(budget_bytes=BUDGET if budget else None, tolerance=tolerance, soak=soak)
    done = play(search, capacity, lies(seed))
    assert len(done.observations) <= 24
    if tolerance == 0:
        assert done.best == (capacity or None)


@pytest.mark.parametrize("tolerance", [0, 0.02])
@pytest.mark.parametrize("capacity", [1, 2, 4095, 4096, 6000, 8190, 8191])
def test_guided_without_readings_doubles_and_bisects(capacity: int, tolerance: float) -> None:
    done = play(Search(tolerance=tolerance), capacity)
    assert len(done.observations) <= 24
    assert done.best is not None
    assert done.best >= (1 - tolerance) * capacity
    if not tolerance:
        assert done.best == capacity
        assert done.stopped_because == "bracketed"


@examples(150)
@given(
    searches(strategy="guided", tolerance=0) | searches(strategy="bisect"), capacities, st.integers(0, 1000)
)
def test_exact_strategies_are_exact(search: Search, capacity: int, seed: int) -> None:
    done = play(search, capacity, lies(seed))
    sizes = search.sizes
    assert done.best == (None if capacity < sizes.first else sizes.at(sizes.index(capacity)))
    expected = "nothing_fits" if done.best is None else "bracketed"
    assert done.stopped_because == (
        "max_size" if done.best == search.sizes.last and search.max_size else expected
    )


@examples(150)
@given(
    searches(strategy="guided", tolerance=0, soak=True) | searches(strategy="bisect", soak=True),
    capacities,
    st.floats(0, 1),
)
def test_exact_strategies_are_exact_about_what_survives_a_soak(
    search: Search, capacity: int, survives: float
) -> None:
    sustained = int(capacity * survives)
    done = play(search, capacity, linear(max(1, capacity)), sustained=sustained)
    sizes = search.sizes
    assert done.best == (None if sustained < sizes.first else sizes.at(sizes.index(sustained)))


# --- guided on honest readings --------------------------------------------------------------------


@examples(300)
@given(
    st.integers(1, 8191) | st.integers(1, 100),
    st.floats(0, 0.6),
    st.floats(0, 0.99),
    st.booleans(),
    st.sampled_from([0.02, 0.05]),
)
def test_guided_is_within_its_tolerance_on_a_line(
    capacity: int, fixed: float, room: float, held: bool, tolerance: float
) -> None:
    readings = linear(capacity, fixed=fixed, held=held, room=room)
    done = play(Search(budget_bytes=BUDGET, tolerance=tolerance), capacity, readings)
    assert done.best is not None
    assert capacity >= done.best >= (1 - tolerance) * capacity - 1
    assert len(done.observations) <= 12


@examples(200)
@given(st.integers(1, 8191) | st.integers(1, 100), st.floats(0, 0.99), st.booleans())
def test_guided_comes_close_on_a_curve_with_knees(capacity: int, room: float, held: bool) -> None:
    done = play(Search(budget_bytes=BUDGET), capacity, convex(capacity, held=held, room=room))
    assert done.best is not None
    assert (
        capacity >= done.best >= 0.95 * capacity - 1
    )  # the tolerance, and the noise that readings are granted
    assert len(done.observations) <= 12


@examples(150)
@given(
    st.integers(1, 2000) | st.integers(1, 60),
    st.floats(0.61, 0.98),
    st.sampled_from([None, 1.0, 1.02, 1.08]),
    st.sampled_from([None, 2, 7]),
)
def test_a_program_that_holds_most_of_the_budget_is_searched_like_any_other(
    capacity: int, fixed: float, rests: float | None, start: int | None
) -> None:
    """Frozen weights fill the card (LoRA, inference): what the readings are granted is no share of those."""
    held = int(BUDGET * fixed)
    slope = (BUDGET - held) / (rests or 1.0) / (capacity + 0.5)

    def read(size: int) -> dict[str, int]:
        grown = int(slope * size)
        peaks = {"allocated_bytes": held + grown, "held_bytes": held}
        if rests is not None:  # a caching allocator
            peaks["reserved_bytes"] = held + int(grown * rests)
            peaks["split_bytes"] = int(grown * (rests - 1))
        return peaks

    done = play(Search(budget_bytes=BUDGET, start=start), capacity, read)
    assert done.best is not None
    # The tolerance, and the share that live tensors are thought to fill at most, as with less held.
    assert capacity >= done.best >= 0.93 * capacity - 1
    assert len(done.observations) <= 8
    assert sum(not one.fits for one in done.observations) <= 3


@examples(300)
@given(
    st.integers(1, 8191) | st.integers(1, 100),
    st.floats(0.02, 0.99),
    st.floats(0, 0.99),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_readings_on_a_line_are_enough_however_much_of_the_budget_is_taken(
    capacity: int, fixed: float, room: float, held: float
) -> None:
    """A plain step may load its weights itself, and gradients are no held bytes: the readings say it all."""
    if held == 0.5 and fixed < 0.45:
        held = 0.0  # a floor that is too low, and little taken: one size more

    def read(size: int) -> dict[str, int]:
        peak = BUDGET * (fixed + (1 - fixed) * size / (capacity + room))
        return {"allocated_bytes": int(peak), **({"held_bytes": int(BUDGET * fixed * held)} if held else {})}

    done = play(Search(budget_bytes=BUDGET), capacity, read)
    assert len({one.size for one in done.observations}) <= 6
    # Of 141,000 random cases 28 had a second OOM, all below 16 samples, where one sample is much; and 7 a
    # third stability check with more than 45 % taken.
    assert sum(not one.fits for one in done.observations) <= 1 + (capacity < 16)
    assert sum(one.soak for one in done.observations) <= 2 + (fixed < 0.55)
    assert (done.best or 0) >= 0.97 * capacity - 1


@pytest.mark.parametrize("fixed", [0.5, 0.7, 0.9, 0.95])
@pytest.mark.parametrize("capacity", [40, 300, 2500])
def test_memory_that_is_rounded_up_is_a_line_too(fixed: float, capacity: int) -> None:
    """An allocator takes 2 MiB at a time: under 2 GiB, with little of it left, that is a staircase."""
    budget, block = 2 * GIB, 2 * 2**20

    def peak(size: int) -> int:
        return -(-int(budget * (fixed + (1 - fixed) * size / (capacity + 0.5))) // block) * block

    largest = max(size for size in range(1, capacity + 1) if peak(size) <= budget)
    done = play(Search(budget_bytes=budget), largest, lambda size: {"allocated_bytes": peak(size)})
    assert len({one.size for one in done.observations}) <= 7
    assert sum(not one.fits for one in done.observations) <= 1
    assert (done.best or 0) >= 0.94 * largest


@pytest.mark.parametrize("make", [linear, convex])
def test_the_figures_of_the_design(make: Callable[..., Readings]) -> None:
    """Means over log-uniform maxima; benchmarks/search_simulated.py has all variants and the peers."""
    capacities = [int(8192 ** ((i + 0.5) / 60)) for i in range(60)]
    done = [play(Search(budget_bytes=BUDGET), size, make(size)) for size in capacities]
    assert sum(len(one.observations) for one in done) <= 5 * len(done)
    assert sum(not trial.fits for one in done for trial in one.observations) <= 0.3 * len(done)
    assert sum((one.best or 0) / size for one, size in zip(done, capacities, strict=True)) >= 0.98 * len(done)
    exact = [play(Search(budget_bytes=BUDGET, tolerance=0), size, make(size)) for size in capacities]
    assert sum(len(one.observations) for one in exact) <= 7 * len(exact)


def test_guided_begins_at_the_smallest_size_and_needs_no_failure() -> None:
    done = play(Search(budget_bytes=BUDGET), 8000, linear(8000))
    assert done.observations[0].size == 1
    assert all(one.fits for one in done.observations)
    assert len(done.observations) <= 5
    assert done.stopped_because == "within_tolerance"


@pytest.mark.parametrize("capacity", [20, 100, 3000])
def test_a_step_of_nothing_but_activations_fails_once(capacity: int) -> None:
    """All of the first reading is a sample's own: beyond the ray from zero nothing fits."""
    done = play(Search(budget_bytes=BUDGET), capacity, linear(capacity, fixed=0.0))
    assert sum(not one.fits for one in done.observations) <= 1
    assert len(done.observations) <= 4
    assert (done.best or 0) >= 0.95 * capacity


@pytest.mark.parametrize(("asked", "best"), [({"max_size": 520}, 512), ({"max_size": 64, "start": 63}, 63)])
def test_what_ends_a_little_below_max_size_was_not_ended_by_memory(asked: dict[str, int], best: int) -> None:
    """A tenth of it is used, and a larger size is not wanted: nothing is left to gain."""
    done = play(Search(budget_bytes=BUDGET, **asked), 8000, linear(8000, fixed=0.0))
    assert (done.best, done.stopped_because) == (best, "near_max_size")
    assert "max_size" in REASONS["near_max_size"]


def test_memory_that_ends_below_max_size_is_the_reason() -> None:
    done = play(Search(budget_bytes=BUDGET, max_size=1100), 1000, linear(1000))
    assert done.stopped_because == "within_tolerance"


def test_guided_uses_an_estimate() -> None:
    done = play(Search(budget_bytes=BUDGET, start=990), 1000, linear(1000, held=True))
    assert done.observations[0].size == 990
    assert len(done.observations) <= 3
    too_high = play(Search(budget_bytes=BUDGET, start=1020), 1000, linear(1000, held=True))
    assert too_high.observations[1].size == 1020 * 7 // 8
    assert len(too_high.observations) <= 4


def test_room_that_a_prediction_leaves_beyond_doubt_is_used() -> None:
    """Memory in pieces was foreseen, and did not come about: what was reserved says so."""
    done = play(Search(budget_bytes=BUDGET, predicted=700), 1000, linear(1000))
    sizes = [one.size for one in done.observations]
    assert sizes[0] == 700
    assert done.best is not None
    assert 0.94 * 1000 <= done.best <= 1000
    assert all(one.fits for one in done.observations)  # by the ray: no failure on the way
    assert done.stopped_because == "predicted"


@pytest.mark.parametrize("fixed", [0.65, 0.7, 0.8, 0.9])
def test_room_beside_weights_that_fill_most_of_the_budget_is_used(fixed: float) -> None:
    """A share of all that is taken would be more than what is left."""
    done = play(Search(budget_bytes=BUDGET, predicted=700), 1000, linear(1000, fixed=fixed, held=True))
    assert done.best is not None
    assert 0.94 * 1000 <= done.best <= 1000
    assert all(one.fits for one in done.observations)


def test_guided_tries_what_is_predicted_at_once() -> None:
    done = play(Search(budget_bytes=BUDGET, predicted=980), 1000, linear(1000))
    assert [(one.size, one.soak) for one in done.observations] == [(980, True)]
    assert done.stopped_because == "predicted"
    exact = play(Search(budget_bytes=BUDGET, predicted=980, tolerance=0), 1000, linear(1000))
    assert (exact.observations[0].size, exact.best) == (980, 1000)


def test_a_failure_above_says_nothing_about_a_prediction() -> None:
    search = Search(budget_bytes=BUDGET, predicted=980, start=1100).tell(
        Observation(size=1100, fits=False, soak=True)
    )
    done = play(search, 1000, linear(1000))
    assert [one.size for one in done.observations] == [1100, 980]
    assert done.stopped_because == "predicted"


@pytest.mark.parametrize("failed", [980, 979, 500])
def test_a_failure_there_or_below_ends_a_prediction(failed: int) -> None:
    search = Search(budget_bytes=BUDGET, predicted=980).tell(Observation(size=failed, fits=False, soak=True))
    done = play(search, 400, linear(400))
    assert done.stopped_because == "within_tolerance"
    assert done.best is not None
    assert done.best >= 0.98 * 400


@examples(200)
@given(
    searches(strategy="guided"),
    capacities,
    st.integers(0, 1000),
    st.integers(1, 9000),
    st.none() | st.floats(0, 1),
)
def test_with_any_prediction_a_search_ends_with_something_that_ran(
    search: Search, capacity: int, seed: int, predicted: int, survives: float | None
) -> None:
    sustained = None if survives is None else int(capacity * survives)
    search = dataclasses.replace(search, predicted=predicted)
    play(search, capacity, lies(seed), sustained=sustained)


def test_guided_goes_straight_to_a_max_size_that_surely_fits() -> None:
    done = play(Search(budget_bytes=BUDGET, max_size=4), 8000, linear(8000))
    assert [(one.size, one.soak) for one in done.observations] == [(1, False), (4, True)]
    assert done.stopped_because == "max_size"


def test_a_pool_taken_beforehand_is_no_reading() -> None:
    done = play(Search(budget_bytes=BUDGET), 3000, lambda size: {"reserved_bytes": BUDGET})
    assert done.best is not None
    assert done.best >= 0.98 * 3000


def test_readings_that_stay_away_do_not_send_it_to_the_moon() -> None:
    # A step that allocates elsewhere: each trial may grow by a few hundred times at most.
    done = play(Search(budget_bytes=BUDGET), 10**6, lambda size: {"allocated_bytes": 1000})
    sizes = [one.size for one in done.observations if one.fits]
    assert all(second <= 512 * first for first, second in pairwise(sizes))
    assert done.best is not None
    assert done.best >= 0.98 * 10**6


# --- soaks ----------------------------------------------------------------------------------------


def test_a_size_expected_to_be_the_answer_is_soaked_at_once() -> None:
    done = play(Search(budget_bytes=BUDGET), 100, linear(100))
    assert [one.soak for one in done.observations] == [False] * (len(done.observations) - 1) + [True]
    assert len({one.size for one in done.observations}) == len(done.observations)


def test_a_failed_soak_backs_off_by_the_tolerance_and_twice_as_far_each_time() -> None:
    search = Search(strategy="grow", start=562, max_size=562)
    search = search.tell(Observation(size=562, fits=True))
    sizes = []
    for _ in range(4):
        request = search.ask()
        assert request is not None
        assert request.soak
        sizes.append(request.size)
        search = search.tell(Observation(size=request.size, fits=False, soak=True))
    assert sizes == [562, 550, 528, 485]


def test_after_a_failed_soak_the_search_stays_near() -> None:
    # ResNet-50 on an H200: 562 passes 3 steps, 556 dies in the soak, 549 survives.
    for strategy in ("guided", "bisect"):
        search = Search(strategy=strategy, max_size=562).tell(Observation(size=562, fits=True))
        done = play(search, 562, sustained=549)
        assert done.best is not None
        assert done.best == 549 if strategy == "bisect" else 538 <= done.best <= 549
        assert min(one.size for one in done.observations) > 500


def test_once_a_soak_has_failed_short_runs_count_for_nothing() -> None:
    search = Search(max_size=556)
    for size in (100, 551, 555, 556):
        search = search.tell(Observation(size=size, fits=True))
    search = search.tell(Observation(size=556, fits=False, soak=True))
    assert search.ask() == Request(544, True)
    done = search.tell(Observation(size=544, fits=True, soak=True))
    assert done.ask() is None
    assert done.best == 544
    assert done.stopped_because == "within_tolerance"
    # Failing on, it passes the sizes that ran short without stopping at them.
    for expected in (544, 522, 480):
        assert search.ask() == Request(expected, True)
        search = search.tell(Observation(size=expected, fits=False, soak=True))
    assert search.best == 100


@examples(100)
@given(st.integers(1, 8191), st.floats(0, 1), st.sampled_from([0, 0.02]), st.integers(0, 1000))
def test_soaks_that_fail_cost_a_second_search_at_most(
    capacity: int, survives: float, tolerance: float, seed: int
) -> None:
    search = Search(budget_bytes=BUDGET, tolerance=tolerance)
    play(search, capacity, lies(seed), sustained=int(capacity * survives), most=45 if tolerance else 56)


@pytest.mark.parametrize("held", [False, True])
def test_sizes_that_run_but_do_not_last_are_not_the_answer(held: bool) -> None:
    for capacity in [int(8192 ** (i / 60)) for i in range(26, 60)]:
        sustained = int(0.985 * capacity)
        done = play(Search(budget_bytes=BUDGET), capacity, linear(capacity, held=held), sustained=sustained)
        assert done.best is not None
        assert sustained >= done.best >= min(0.96 * capacity, sustained - 1)


def test_nothing_survives_the_soak() -> None:
    for strategy in STRATEGIES:
        done = play(Search(strategy=strategy, max_size=100), 80, sustained=0)
        assert done.best is None
        assert done.stopped_because == "nothing_fits"


def test_without_soak_no_trial_is_one() -> None:
    done = play(Search(budget_bytes=BUDGET, soak=False), 100, linear(100))
    assert not any(one.soak for one in done.observations)
    assert done.best == 100


# --- the other strategies -------------------------------------------------------------------------


def sizes_tried(capacity: int, **values: Any) -> list[str]:
    done = play(Search(soak=False, **values), capacity)
    return [f"{one.size}{'' if one.fits else 'x'}" for one in done.observations]


@pytest.mark.parametrize(
    ("start", "capacity", "trace"),
    [
        (19, 64, ["19", "28", "42", "63", "64"]),
        (19, 16, ["19x", "9", "14", "16", "17x"]),
        (19, 23, ["19", "28x", "23", "25x", "24x"]),
        (16, 24, ["16", "24", "36x", "30x", "27x"]),
    ],
)
def test_grow_follows_the_seed_and_uses_the_attempts_that_are_left(
    start: int, capacity: int, trace: list[str]
) -> None:
    assert sizes_tried(capacity, strategy="grow", start=start, max_size=64) == trace


@examples(150)
@given(searches(strategy="grow"), capacities)
def test_grow_makes_at_most_its_attempts_and_one_soak(search: Search, capacity: int) -> None:
    done = play(search, capacity)
    assert sum(not one.soak for one in done.observations) <= search.attempts
    assert sum(one.soak for one in done.observations) <= 1
    if done.stopped_because == "attempts":
        assert sum(not one.soak for one in done.observations) == search.attempts


def test_bisect_is_the_binary_search_of_the_seed() -> None:
    low, high, expected, best = 1, 1000, [], 0
    while low <= high:
        middle = (low + high) // 2
        expected.append(f"{middle}{'' if middle <= 700 else 'x'}")
        low, high, best = (middle + 1, high, middle) if middle <= 700 else (low, middle - 1, best)
    assert sizes_tried(700, strategy="bisect", max_size=1000) == expected
    assert best == 700


@pytest.mark.parametrize(
    ("start", "tried"), [(4, [4, 8, 16, 32, 64, 48, 40, 44, 42, 41]), (60, [60, 30, 45, 37, 41, 43, 42])]
)
def test_bisect_begins_at_the_estimate_where_there_is_one(start: int, tried: list[int]) -> None:
    search = Search(strategy="bisect", start=start, max_size=1000, soak=False)
    ended = run(search, lambda request: Observation(size=request.size, fits=request.size <= 41))
    assert ended.best == 41
    assert [one.size for one in ended.observations] == tried


def test_bisect_doubles_where_there_is_no_largest_size() -> None:
    assert sizes_tried(11, strategy="bisect") == ["1", "2", "4", "8", "16x", "12x", "10", "11"]
    assert sizes_tried(11, strategy="bisect", start=6) == ["6", "12x", "9", "10", "11"]


@examples(150)
@given(searches(strategy="halve"), capacities)
def test_halve_is_the_first_half_that_runs(search: Search, capacity: int) -> None:
    sizes = search.sizes
    size = sizes.at(max(0, sizes.index(search.start or sizes.last)))
    while size > capacity and size != sizes.first:
        size = sizes.at(max(0, sizes.index(size / 2)))
    assert play(search, capacity).best == (size if size <= capacity else None)


@examples(150)
@given(searches(strategy="powers"), capacities)
def test_powers_is_the_last_power_that_runs(search: Search, capacity: int) -> None:
    done = play(search, capacity)
    powers = [search.multiple_of << i for i in range(15)]
    top = capacity if search.max_size is None else min(capacity, search.max_size)
    assert done.best == max((one for one in powers if search.min_size <= one <= top), default=None)


def test_powers_goes_up_from_one() -> None:
    assert sizes_tried(20, strategy="powers") == ["1", "2", "4", "8", "16", "32x"]
    assert sizes_tried(20, strategy="powers", start=100) == ["64x", "32x", "16"]


# --- on curves measured on an H200 ----------------------------------------------------------------


def as_measured(ran: list[dict[str, Any]]) -> Readings:
    """What was read at the sizes of `ran` (MiB), and between them on a line."""

    def between(name: str, size: int) -> dict[str, int]:
        known = [row for row in ran if row.get(name) is not None]
        low = max((row for row in known if row["size"] <= size), key=lambda row: row["size"], default=None)
        high = min((row for row in known if row["size"] >= size), key=lambda row: row["size"], default=low)
        if low is None or high is None:
            return {}
        part = (size - low["size"]) / max(1, high["size"] - low["size"])
        return {f"{name}_bytes": int((low[name] + part * (high[name] - low[name])) * 2**20)}

    def read(size: int) -> dict[str, int]:
        below = max((row for row in ran if row["size"] <= size), key=lambda row: row["size"])
        peaks = [between(name, size) for name in ("allocated", "reserved", "split", "largest", "held")]
        return {key: value for part in peaks for key, value in part.items()} | {"retries": below["retries"]}

    return read


def h200_models() -> list[str]:
    return list(json.loads(H200_CURVES.read_text())["models"])


@pytest.mark.parametrize("model", h200_models())
def test_on_real_curves_four_trials_find_98_per_cent_without_a_failure(model: str) -> None:
    data = json.loads(H200_CURVES.read_text())
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["models"][model]]
    ran = [row for row in rows if row["fits"]]
    truth = max(row["size"] for row in ran)
    # Sizes between the largest that ran and the smallest that failed were not measured: half of them fit.
    capacity = (truth + min(row["size"] for row in rows if not row["fits"])) // 2

    done = play(Search(budget_bytes=data["budget_bytes"]), capacity, as_measured(ran))
    assert done.best is not None
    assert all(one.fits for one in done.observations)
    assert len(done.observations) <= 4
    assert done.best >= min(0.98 * truth, truth - 1)
    # A size at which cached memory is expected to be handed back is a step on the way, and not worth a soak.
    assert sum(one.soak for one in done.observations) <= (2 if model == "llama110m" else 1)


@pytest.mark.parametrize("name", SEARCH_CASES["cases"])
def test_with_the_largest_block_known_four_trials_do_without_a_failure(name: str) -> None:
    # Retries had been taken for a promise that all rests can be used: T5-small under 24 GiB went from 82 to
    # 94, 92 and 87, which fail, and BERT under 40 from 188 to 222; where small blocks had not been retried
    # yet, ResNet-50 ended a tenth below the end.
    case = SEARCH_CASES["cases"][name]
    rows = [dict(zip(SEARCH_CASES["columns"], row, strict=True), held=case["held"]) for row in case["rows"]]
    done = play(Search(budget_bytes=int(name.rpartition("/")[2]) * GIB), case["end"], as_measured(rows))
    assert done.best is not None
    assert [one.size for one in done.observations if not one.fits] == []
    assert len(done.observations) <= 4
    assert done.best >= min(0.97 * case["end"], case["end"] - 1)


def test_a_workspace_among_small_blocks_costs_trials_and_not_the_size() -> None:
    # ResNet-50 on an H200, with a workspace as large as logits: it retries, and has handed back enough.
    data = json.loads(H200_CURVES.read_text())
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["models"]["resnet"]]
    ran = [dict(row, largest=row["allocated"] / 8) for row in rows if row["fits"]]
    done = play(Search(budget_bytes=data["budget_bytes"]), 553, as_measured(ran))
    assert all(one.fits for one in done.observations)
    assert len(done.observations) <= 5
    assert done.best is not None
    assert done.best >= 0.98 * 552


def small_blocks(size: int, *, fits: bool = True, soak: bool = False) -> Observation:
    """Of 24 GiB, 5 % are fixed, and live tensors fill 97.2 % at size 1000; the blocks are small."""
    peak = int(BUDGET * (0.05 + 0.922 * size / 1000))
    return Observation(
        size=size,
        fits=fits,
        soak=soak,
        allocated_bytes=peak,
        reserved_bytes=int(1.1 * peak),
        largest_bytes=peak // 50,
        held_bytes=int(BUDGET * 0.05),
    )


def test_the_soak_that_is_due_is_of_the_expected_end() -> None:
    search = Search(budget_bytes=BUDGET, observations=tuple(map(small_blocks, (1, 300, 985))))
    request = search.ask()
    assert request is not None
    assert request.soak
    assert 990 <= request.size <= 1005, "985 is within the tolerance, and needs a soak all the same"
    search = search.tell(small_blocks(request.size, soak=True))
    assert search.ask() is None
    assert search.best == request.size


def test_where_that_soak_fails_the_size_that_ran_is_the_answer() -> None:
    search = Search(budget_bytes=BUDGET, observations=tuple(map(small_blocks, (1, 300, 985))))
    request = search.ask()
    assert request is not None
    search = search.tell(small_blocks(request.size, fits=False, soak=True))
    assert search.ask() == Request(985, True)
    assert search.tell(small_blocks(985, soak=True)).best == 985


def test_one_failure_where_good_readings_promised_more_is_no_reason_to_bisect() -> None:
    observations = [*map(small_blocks, (1, 300)), small_blocks(980, fits=False, soak=True)]
    request = Search(budget_bytes=BUDGET, observations=tuple(observations)).ask()
    assert request is not None
    assert 950 <= request.size < 980


# --- the value ------------------------------------------------------------------------------------


def test_a_search_is_a_value() -> None:
    search = Search(max_size=64)
    after = search.tell(Observation(size=1, fits=True))
    assert search.observations == ()
    assert after.observations == (Observation(size=1, fits=True),)
    assert {search: "a value can be a key"}[Search(max_size=64)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        search.observations = after.observations  # type: ignore[misc]


def test_the_driver_runs_what_is_asked() -> None:
    asked: list[Request] = []

    def trial(request: Request) -> Observation:
        asked.append(request)
        return Observation(size=request.size, fits=request.size <= 5, soak=request.soak)

    done = run(Search(strategy="powers"), trial)
    assert asked == [
        Request(1, False),
        Request(2, False),
        Request(4, False),
        Request(8, False),
        Request(4, True),
    ]
    assert (done.best, done.stopped_because, done.ask()) == (4, "strategy", None)


def test_the_best_so_far_is_the_largest_that_ran() -> None:
    search = Search(strategy="powers")
    assert search.best is None
    search = search.tell(Observation(size=1, fits=True)).tell(Observation(size=2, fits=True))
    assert search.best == 2
    search = search.tell(Observation(size=4, fits=False))
    assert search.best == 2
    search = search.tell(Observation(size=2, fits=False, soak=True))
    assert search.best == 1


@pytest.mark.parametrize(
    "allowed", [{"power_of_two": True}, {"multiple_of": 8}, {"min_size": 8, "max_size": 8}]
)
def test_nothing_fits(allowed: dict[str, Any]) -> None:
    for strategy in STRATEGIES:
        done = play(Search(strategy=strategy, attempts=10, **{"max_size": 100, **allowed}), 0)
        assert done.best is None
        assert done.stopped_because == "nothing_fits"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "magic"}, "strategy must be one of guided, bisect, halve, grow, powers, not 'magic'"),
        ({"strategy": []}, "strategy must be one of guided, bisect, halve, grow, powers, not []"),
        ({"observations": [], "min_size": 0}, "min_size must be a positive integer, not 0"),
        ({"min_size": 1.5}, "min_size must be a positive integer, not 1.5"),
        ({"min_size": True}, "min_size must be a positive integer, not True"),
        ({"max_size": -1}, "max_size must be a positive integer, not -1"),
        ({"max_size": "64"}, "max_size must be a positive integer, not '64'"),
        ({"min_size": 8, "max_size": 7}, "max_size must be at least min_size (8), not 7"),
        ({"multiple_of": 0}, "multiple_of must be a positive integer, not 0"),
        (
            {"multiple_of": 3, "power_of_two": True},
            "multiple_of must be a power of two with power_of_two, not 3",
        ),
        ({"multiple_of": 8, "max_size": 7}, "max_size must leave an allowed size (the smallest is 8), not 7"),
        ({"power_of_two": True, "min_size": 5, "max_size": 7}, "(the smallest is 8), not 7"),
        ({"power_of_two": 1}, "power_of_two must be True or False, not 1"),
        ({"soak": None}, "soak must be True or False, not None"),
        ({"tolerance": -0.1}, "tolerance must be at least 0 and below 1, not -0.1"),
        ({"tolerance": 1}, "tolerance must be at least 0 and below 1, not 1"),
        ({"tolerance": float("nan")}, "tolerance must be at least 0 and below 1, not nan"),
        ({"tolerance": "2%"}, "tolerance must be at least 0 and below 1, not '2%'"),
        ({"start": 0}, "start must be a positive integer, not 0"),
        ({"attempts": 0}, "attempts must be a positive integer, not 0"),
        ({"max_trials": 0}, "max_trials must be a positive integer, not 0"),
        ({"budget_bytes": 0}, "budget_bytes must be a positive integer, not 0"),
        ({"strategy": "halve"}, "start must be given for strategy 'halve' without max_size, not None"),
        ({"strategy": "grow"}, "start must be given for strategy 'grow' without max_size, not None"),
        (
            {"multiple_of": 8, "observations": (Observation(size=9, fits=True),)},
            "observations must hold allowed sizes only, not 9",
        ),
    ],
)
def test_bad_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        Search(**values)
    assert message in str(caught.value)


def test_only_what_a_trial_observed_can_be_reported() -> None:
    with pytest.raises(TypeError, match="observation must be an Observation, not 7"):
        Search().tell(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="observations must hold allowed sizes only, not 100"):
        Search(max_size=64).tell(Observation(size=100, fits=True))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "must be 'search'"),
        ('{"kind": "fit"}', "must be 'search'"),
        ('{"kind": "search"}', "schema_version is None"),
        ('{"kind": "search", "schema_version": 99}', "Upgrade batchfit"),
        ('{"kind": "search", "schema_version": 1, "told": []}', "of an older batchfit"),
        (
            '{"kind": "search", "schema_version": 2, "observations": [], "min_size": 0}',
            "min_size must be a positive integer, not 0",
        ),
        ('{"kind": "search", "schema_version": 2, "observations": [{"size": 1}]}', "fits"),
        ('{"kind": "search", "schema_version": 2, "observations": [1]}', "not a search"),
        ('{"kind": "search", "schema_version": 2, "observations": 5}', "not a search"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(ResultFileError) as caught:
        Search.from_json(text)
    assert message in str(caught.value)


def test_fields_of_a_later_version_are_ignored() -> None:
    data = json.loads(Search(max_size=8).tell(Observation(size=1, fits=True)).to_json())
    data["mood"] = data["observations"][0]["mood"] = "sunny"
    assert Search.from_json(json.dumps(data)) == Search(max_size=8).tell(Observation(size=1, fits=True))
