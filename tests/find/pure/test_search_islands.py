"""Memory that does not only grow with the size: a search ends in time, with a size that has run."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._find.pure.search import Observation, Request, Search, run

BUDGET = 1000


@given(
    islands=st.dictionaries(st.integers(2, 600), st.integers(10, 1500), max_size=40),
    wave=st.integers(0, 200),
    strategy=st.sampled_from(["guided", "bisect", "grow", "halve", "powers"]),
    tolerance=st.sampled_from([0.0, 0.02]),
    held=st.booleans(),
)
@examples(400)
def test_islands_do_not_fool_a_search(
    islands: dict[int, int], wave: int, strategy: str, tolerance: float, held: bool
) -> None:
    """Some sizes need more than larger ones do: cuDNN chooses its workspace by the shape."""

    def need(size: int) -> int:
        jagged = wave * (size * 7919 % 13) // 13  # differs from size to size, always the same
        return 50 + 2 * size + jagged + islands.get(size, 0)

    def trial(request: Request) -> Observation:
        fits = need(request.size) <= BUDGET
        held_bytes = 50 if held else None
        return Observation(
            size=request.size,
            fits=fits,
            soak=request.soak,
            allocated_bytes=need(request.size),
            held_bytes=held_bytes,
        )

    start = 300 if strategy in ("grow", "halve") else None
    ended = run(Search(budget_bytes=BUDGET, strategy=strategy, tolerance=tolerance, start=start), trial)
    assert ended.best is not None
    assert any(one.size == ended.best and one.fits and one.soak for one in ended.observations)
    failed = [one.size for one in ended.observations if not one.fits]
    assert ended.best < min(failed, default=2**30), "nothing above a size that failed is trusted"
    assert len(ended.observations) <= 24
    if not islands and strategy in ("guided", "bisect"):
        # a wave alone, which nothing hides: the answer is not far below where it begins to run out
        first_failure = next(size for size in range(1, 1000) if need(size) > BUDGET)
        assert ended.best >= 0.9 * first_failure - 1


@pytest.mark.parametrize("strategy", ["guided", "bisect"])
def test_the_search_ends_below_an_island_that_it_met(strategy: str) -> None:
    """96 needs more than 128 does: below it is where the search looks on, above it nothing is trusted."""
    search = Search(strategy=strategy, budget_bytes=400, start=96, tolerance=0.0, soak=False)
    ended = run(
        search,
        lambda request: Observation(
            size=request.size,
            fits=request.size != 96 and request.size <= 200,
            allocated_bytes=2 * request.size,
        ),
    )
    assert ended.observations[0] == Observation(size=96, fits=False, allocated_bytes=192)
    assert ended.best == 95
