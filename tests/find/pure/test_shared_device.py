"""The budget of a search while other programs come and go: it only goes down, what is known stays true."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._find.pure.search import SLACK_BYTES, SLACK_SHARE, Observation, Search, SharedBudget, run

MiB = 2**20


def room(budget_bytes: int) -> SharedBudget:
    return SharedBudget(budget_bytes, budget_bytes)


def test_a_little_less_is_no_less() -> None:
    small, large = room(1000 * MiB), room(100_000 * MiB)
    assert not small.lacks(1000 * MiB - SLACK_BYTES)
    assert small.lacks(1000 * MiB - SLACK_BYTES - 1)
    assert not large.lacks(100_000 * MiB - int(100_000 * MiB * SLACK_SHARE))
    assert large.lacks(100_000 * MiB - int(100_000 * MiB * SLACK_SHARE) - 1)
    assert small.after(1000 * MiB - SLACK_BYTES) is small


def test_what_goes_is_counted_from_the_beginning() -> None:
    twice = room(1000 * MiB).after(800 * MiB).after(600 * MiB)
    assert (twice.budget_bytes, twice.begun_bytes, twice.gone_bytes) == (600 * MiB, 1000 * MiB, 400 * MiB)
    assert twice.after(1000 * MiB) is twice
    assert twice.is_exceeded(700 * MiB)
    assert not twice.is_exceeded(664 * MiB)
    assert not twice.has_grown(1000 * MiB)
    assert twice.has_grown(1100 * MiB)
    assert room(1000 * MiB).after(0).budget_bytes == 1, "a budget is positive"


@given(budget=st.integers(1, 2**40), seen=st.lists(st.integers(0, 2**41), max_size=8))
@examples(200)
def test_the_budget_only_goes_down_and_nothing_is_lacked_after(budget: int, seen: list[int]) -> None:
    now = room(budget)
    for reachable in seen:
        after = now.after(reachable)
        assert 1 <= after.budget_bytes <= now.budget_bytes
        assert not after.lacks(max(1, reachable))
        assert after.begun_bytes == budget
        now = after


def test_what_ran_with_more_is_forgotten_and_what_failed_is_not() -> None:
    search = Search(budget_bytes=1000, predicted=90, max_trials=9)
    for observation in (
        Observation(size=1, fits=True, allocated_bytes=10, reserved_bytes=20),
        Observation(size=50, fits=True, allocated_bytes=490, reserved_bytes=500),
        Observation(
            size=51, fits=True, allocated_bytes=499, reserved_bytes=501
        ),  # took more, might have done with less
        Observation(size=60, fits=True, allocated_bytes=600),
        Observation(size=99, fits=False, allocated_bytes=700, reserved_bytes=999),
        Observation(size=2, fits=True),  # nothing was read
    ):
        search = search.tell(observation)
    smaller = search.under(500)
    assert [one.size for one in smaller.observations] == [1, 50, 99, 2]
    assert (smaller.budget_bytes, smaller.predicted, smaller.max_trials) == (500, None, 7)
    same = search.under(1000)
    assert same == search, "nothing took more than the budget"


@given(
    slope=st.integers(1, 50),
    fixed=st.integers(0, 5000),
    drops=st.dictionaries(st.integers(0, 12), st.floats(0.2, 0.95), max_size=3),
    soak=st.booleans(),
)
@examples(150)
def test_a_search_whose_budget_drops_ends_below_it(
    slope: int, fixed: int, drops: dict[int, float], soak: bool
) -> None:
    """Budgets drop before any of the trials; the answer needs no more than the last, and is near it."""
    search = Search(budget_bytes=100_000, soak=soak)
    trials = 0
    while search.ask() is not None:
        if trials in drops:
            search = search.under(int((search.budget_bytes or 0) * drops[trials]))
        request = search.ask()
        if request is None:
            break
        need = fixed + slope * request.size
        fits = need <= (search.budget_bytes or 0)
        search = search.tell(
            Observation(
                size=request.size, fits=fits, soak=request.soak, allocated_bytes=need, held_bytes=fixed
            )
        )
        trials += 1
        assert trials < 100
    budget = search.budget_bytes or 0
    true = (budget - fixed) // slope
    if true < 1:
        assert search.best is None
        return
    assert search.best is not None
    assert 0.93 * true - 1 <= search.best <= true


def test_max_trials_counts_trials_that_are_forgotten() -> None:
    search = Search(budget_bytes=10_000, max_trials=4)
    for size in (1, 30, 60):
        search = search.tell(Observation(size=size, fits=True, allocated_bytes=100 * size))
    search = search.under(2000)
    assert [one.size for one in search.observations] == [1]
    ended = run(
        search, lambda request: Observation(size=request.size, fits=request.size <= 20, soak=request.soak)
    )
    assert len(ended.observations) - 1 == 1, "three were run before"


def test_attempts_count_sizes_that_are_forgotten() -> None:
    """grow: three sizes were tried, two of which no longer count; soaks are no attempts."""
    search = Search(strategy="grow", start=10, attempts=5, budget_bytes=10_000)
    for size, soak in ((10, False), (30, True), (30, False), (60, False)):
        search = search.tell(Observation(size=size, fits=True, soak=soak, allocated_bytes=100 * size))
    search = search.under(2000)
    assert [one.size for one in search.observations] == [10]
    ended = run(
        search, lambda request: Observation(size=request.size, fits=request.size <= 20, soak=request.soak)
    )
    assert sum(not one.soak for one in ended.observations) - 1 == 2, "three were tried before"
    assert ended.stopped_because == "attempts"


def test_a_search_that_has_used_its_limits_up_gets_one_more_size() -> None:
    search = Search(strategy="grow", start=30, attempts=1, max_trials=1, budget_bytes=10_000, soak=False)
    search = search.tell(Observation(size=30, fits=True, allocated_bytes=3000)).under(2000)
    assert (search.observations, search.attempts, search.max_trials) == ((), 1, 1)
