"""The contract of `AskTell`, for each of the three searches and any order of answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfit._ask_tell import AskTell
from batchfit._find.pure.search import Observation, Request, Search
from batchfit._profile.pure.knee import Knee, Timed, TimingRequest
from batchfit._rerun.pure.rerun import Rerun, RunObservation, RunRequest


def fit(request: Request, largest: int) -> Observation:
    return Observation(size=request.size, fits=request.size <= largest, soak=request.soak)


def timed(request: TimingRequest, largest: int) -> Timed:
    return Timed(request.size, 0.01 + 0.001 * request.size, fits=request.size <= largest, fine=request.fine)


def ran(request: RunRequest, largest: int) -> RunObservation:
    if request.size > largest:
        return RunObservation(request, "oom")
    return RunObservation(request, "done" if request.steps is None else "cut", request.steps or 10)


CASES: dict[str, tuple[AskTell[Any, Any], Callable[[Any, int], Any]]] = {
    "find": (Search(max_size=4096), fit),
    "profile": (Knee(limit=4096), timed),
    "rerun": (Rerun(start=4096), ran),
}


@pytest.mark.parametrize("name", CASES)
@given(largest=st.integers(1, 5000))
def test_a_search_is_a_value_that_ends(name: str, largest: int) -> None:
    search, measure = CASES[name]
    for reported in range(100):
        request = search.ask()
        assert search.ask() == request, "asking changes nothing"
        if request is None:
            break
        before, after = search, search.tell(measure(request, largest))
        assert len(before.observations) == reported, "telling changes nothing"
        assert len(after.observations) == reported + 1
        assert type(after) is type(before)
        search = after
    assert search.ask() is None, "every search ends"
