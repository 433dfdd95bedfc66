"""A search whose trials each start a program: few starts, at most about one OOM, within the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_search import play

from batchfit._find.pure.search import Observation, Request, Search

BUDGET = 24 * 2**30


def search_of(peak: Callable[[int], float], held: int | None, largest: int, **settings: Any) -> Search:
    """A search over a program's sizes at its end, where sizes up to `largest` fit."""

    def readings(size: int) -> dict[str, int]:
        read = {"allocated_bytes": int(peak(size))}
        return read if held is None else {**read, "held_bytes": held}

    return play(Search(**{"budget_bytes": BUDGET, "costly_trials": True, **settings}), largest, readings)


def starts(search: Search) -> int:
    return len({one.size for one in search.observations})


def ooms(search: Search) -> int:
    return sum(not one.fits for one in search.observations)


FLOORS = st.floats(0.02, 0.6)
LARGEST = st.floats(0, 12).map(lambda log: int(2**log))


@examples(300)
@given(LARGEST, FLOORS, st.floats(0.0, 0.2), st.booleans())
def test_a_line_takes_six_starts_and_one_oom(largest: int, floor: float, fixed: float, knows: bool) -> None:
    held = floor * BUDGET
    at_zero = held + fixed * (BUDGET - held)
    slope = (BUDGET - at_zero) / (largest + 0.5)
    done = search_of(lambda size: at_zero + slope * size, int(held) if knows else None, largest)
    assert done.best is not None
    assert done.best >= 0.96 * largest
    assert starts(done) <= 8
    assert ooms(done) <= 1 + (largest == 1)
    if knows and not fixed:
        assert starts(done) <= 4


@examples(300)
@given(LARGEST, FLOORS, st.floats(0.0, 0.2), st.floats(0.01, 0.6), st.floats(0.1, 0.8))
def test_a_flat_part_and_a_line_take_a_few_more(
    largest: int, floor: float, fixed: float, flatness: float, meets: float
) -> None:
    held = floor * BUDGET
    at_zero = held + fixed * (BUDGET - held)
    end = largest + 0.5
    slope = (BUDGET - at_zero) / end
    low = at_zero + slope * (1 - flatness) * meets * end
    done = search_of(
        lambda size: max(at_zero + slope * size, low + flatness * slope * size), int(held), largest
    )
    assert done.best is not None
    assert done.best >= 0.88 * largest
    assert starts(done) <= 12
    assert ooms(done) <= 5


@examples(200)
@given(LARGEST, st.lists(st.integers(1, BUDGET), min_size=1, max_size=9), st.integers(0, BUDGET))
def test_whatever_the_readings_say_it_ends_with_a_size_that_ran(
    largest: int, readings: list[int], held: int
) -> None:
    done = search_of(lambda size: readings[size % len(readings)], held, largest)
    assert done.ask() is None
    assert done.best in [one.size for one in done.observations if one.fits and one.soak]
    assert len(done.observations) <= 24


@pytest.mark.parametrize(
    ("peak", "held", "budget", "largest", "most_starts", "most_ooms"),
    [
        (lambda n: max(10_513_000 + 16_384 * n, 7_359_488 + 212_992 * n), 6_325_760, 16, 44, 6, 1),
        (lambda n: max(12_280_800 + 3_640 * n, 9_841_900 + 12_629 * n), 7_410_048, 14, 383, 8, 1),
        (lambda n: 243_712 + 536_576 * n, None, 24, 43, 6, 2),
    ],
    ids=["starts in 20 s", "lit", "evaluate"],
)
def test_programs_as_they_were_measured(
    peak: Callable[[int], float],
    held: int | None,
    budget: int,
    largest: int,
    most_starts: int,
    most_ooms: int,
) -> None:
    """10 starts with 4 OOMs, 12 with 6 and 10 with 3, where failures count for more than sizes that fit."""
    done = search_of(peak, held, largest, budget_bytes=budget * 2**20)
    assert done.best is not None
    assert done.best >= 0.98 * largest
    assert starts(done) <= most_starts
    assert ooms(done) <= most_ooms


def test_what_is_held_of_a_batch_is_no_floor() -> None:
    """nanoGPT's style keeps its last batch: a ray from what is held beside it would end beyond the end."""
    search = Search(budget_bytes=32 * 2**20, costly_trials=True)
    while (request := search.ask()) is not None:
        size = request.size
        search = search.tell(
            Observation(
                size=size,
                fits=size <= 30,
                soak=request.soak,
                allocated_bytes=1_452_544 + 1_053_184 * size,
                held_bytes=1_455_104 + 66_560 * size,
            )
        )
    assert search.best == 30
    assert (starts(search), ooms(search)) == (2, 0)


def test_an_exact_search_is_exact() -> None:
    done = search_of(
        lambda size: 7_359_488 + 212_992 * size, 6_325_760, 44, budget_bytes=16 * 2**20, tolerance=0.0
    )
    assert done.best == 44


def test_the_limits_hold() -> None:
    limits = {"max_size": 40, "min_size": 8, "multiple_of": 4}
    done = search_of(lambda size: size * 2**20, None, 1000, **limits)
    assert done.best == 40
    assert done.observations[0].size == 16


def test_an_estimate_is_where_it_begins() -> None:
    assert Search(budget_bytes=BUDGET, costly_trials=True, start=30).ask() == Request(30, False)
    assert Search(budget_bytes=BUDGET, costly_trials=True).ask() == Request(2, False)
    assert Search(budget_bytes=BUDGET, costly_trials=True, max_size=1).ask() == Request(1, True)
    assert Search(budget_bytes=BUDGET).ask() == Request(1, False)
