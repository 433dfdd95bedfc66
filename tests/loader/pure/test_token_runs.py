"""Runs of samples that fit, and the steps of a window: nothing lost, nothing too large, as much as fits."""

from __future__ import annotations

from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._loader.pure.tokens import (
    TokenLimits,
    TokenPosition,
    cut_by_tokens,
    evened,
    longest_runs,
    plan_window,
)


@pytest.mark.parametrize(
    ("lengths", "limits", "runs"),
    [
        ([5, 4, 4, 2, 1, 1], TokenLimits(8), [(0, 1), (1, 3), (3, 6)]),
        ([1, 1, 2, 4, 4, 5], TokenLimits(8), [(0, 3), (3, 5), (5, 6)]),
        ([5, 4, 4, 2, 1, 1], TokenLimits(8, max_rows=2), [(0, 1), (1, 3), (3, 5), (5, 6)]),
        ([1] * 7, TokenLimits(8, multiple_of=2), [(0, 6), (6, 7)]),
        ([3] * 4, TokenLimits(8, pad_to_multiple_of=4), [(0, 2), (2, 4)]),
        ([3] * 4, TokenLimits(8), [(0, 2), (2, 4)]),
        ([5, 3, 1, 7, 2], TokenLimits(8, packed=True), [(0, 2), (2, 4), (4, 5)]),
        ([1] * 5, TokenLimits(8, packed=True, max_rows=2), [(0, 2), (2, 4), (4, 5)]),
        ([], TokenLimits(8), []),
    ],
)
def test_a_run_is_as_long_as_fits(
    lengths: list[int], limits: TokenLimits, runs: list[tuple[int, int]]
) -> None:
    assert cut_by_tokens(lengths, limits) == runs


windows = st.tuples(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.builds(
        TokenLimits,
        st.integers(32, 120),
        max_rows=st.none() | st.integers(4, 9),
        multiple_of=st.integers(1, 4),
        pad_to_multiple_of=st.sampled_from([1, 8]),
        packed=st.booleans(),
    ),
    st.booleans(),
)


def in_order(lengths: list[int], limits: TokenLimits, falls: bool) -> list[int]:
    return lengths if limits.packed else sorted(lengths, reverse=falls)


@examples(300)
@given(windows)
def test_runs_are_a_partition_within_the_limits(window: tuple[list[int], TokenLimits, bool]) -> None:
    lengths, limits, _ = window
    lengths = in_order(*window)
    runs = cut_by_tokens(lengths, limits)
    assert [at for run in runs for at in range(*run)] == list(range(len(lengths)))
    for start, stop in runs:
        taken, more = lengths[start:stop], lengths[start : start + limits.multiple_of + stop - start]
        assert limits.tokens(taken) <= limits.max_tokens
        assert len(taken) <= (limits.max_rows or len(taken))
        # As many more as make a multiple again would be too much, or there are none.
        too_many = limits.max_rows is not None and len(more) > limits.max_rows
        whole = len(taken) % limits.multiple_of == 0 and len(more) == len(taken) + limits.multiple_of
        assert not whole or too_many or limits.tokens(more) > limits.max_tokens


@examples(300)
@given(windows, st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_window_gives_each_rank_a_batch_in_each_step(
    window: tuple[list[int], TokenLimits, bool], world_size: int, is_last: bool, drop_last: bool, seed: int
) -> None:
    _, limits, _ = window
    lengths = in_order(*window)
    random = Random(seed) if seed else None
    plan = plan_window(
        lengths, limits, world_size=world_size, random=random, is_last=is_last, drop_last=drop_last
    )
    assert all(len(step) == world_size for step in plan.steps)
    dealt = [at for step in plan.steps for run in step for at in range(*run)]
    assert len(dealt) - len(set(dealt)) == plan.repeated < world_size
    assert sorted({*dealt, *plan.rest}) == list(range(len(lengths)))
    assert not set(dealt) & set(plan.rest)
    for step in plan.steps:
        for run in step:
            assert limits.tokens(lengths[slice(*run)]) <= limits.max_tokens
    if is_last and not drop_last:
        assert not plan.rest
        if len(lengths) >= 2 * world_size * len(plan.steps):
            assert not plan.repeated
    else:
        assert not plan.repeated
    if plan.repeated:  # only where nothing was left to cut in two
        assert all(stop - start == 1 for step in plan.steps for start, stop in step)


def test_batches_are_cut_in_two_until_every_rank_has_one() -> None:

    runs, repeated = evened([(0, 2), (2, 9)], 4)
    assert (len(runs), repeated, runs[0][0], runs[-1][1]) == (4, 0, 0, 9)
    assert evened([(0, 1)], 3) == ([(0, 1)] * 3, 2)
    assert evened([(0, 1), (1, 2), (2, 3)], 2) == ([(0, 1), (1, 2), (2, 3), (2, 3)], 1)
    assert evened([(0, 3)], 1) == ([(0, 3)], 0)


@examples(200)
@given(windows)
def test_the_longest_run_from_each_sample_is_the_first_of_a_cut(
    window: tuple[list[int], TokenLimits, bool],
) -> None:
    lengths, limits, _ = window
    lengths = sorted(lengths, reverse=True)
    for run in longest_runs(lengths, limits, 0):
        later = lengths[run[0] :]
        assert run[1] - run[0] == cut_by_tokens(later, limits)[0][1]


def test_a_position_is_plain_data() -> None:
    at = TokenPosition(held=(3, 4), start=5, max_tokens=64, world_size=2, dealt=1, steps=9, samples=80)
    assert TokenPosition.from_dict(at.to_dict()) == at
    assert at.to_dict()["held"] == [3, 4]
