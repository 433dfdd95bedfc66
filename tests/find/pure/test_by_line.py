"""Readings on a line: the end lies between what is said, and nothing is said of readings that lie on none."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from batchfit._find.pure.by_line import SEGMENT_BYTES, line_end

MIB = 2**20


def rounded(size: int) -> int:
    """Up to a multiple of 2 MiB."""
    return -(-size // SEGMENT_BYTES) * SEGMENT_BYTES


def peak(kind: str, fixed: int, each: int, size: int) -> int:
    """A line as it is, all of it rounded up, or the block that grows as the caching allocator rounds it."""
    grown = each * size
    if kind == "reading":
        return rounded(fixed + grown)
    if kind == "block":
        block = -(-grown // 512) * 512
        large = block >= 10 * MIB and rounded(block) - block <= MIB
        return fixed + (rounded(block) if large else block)
    return fixed + grown


@examples(400)
@given(
    st.sampled_from(["exact", "reading", "block"]),
    st.integers(0, 2**34),
    st.integers(2**12, 2**28),
    st.lists(st.integers(1, 5000), min_size=3, max_size=7, unique=True),
    st.integers(1, 20_000),
    st.integers(0, 4),
    st.booleans(),
)
def test_the_end_of_a_line_lies_between_what_is_said(
    kind: str, fixed: int, each: int, sizes: list[int], more: int, quarters: int, failed: bool
) -> None:
    sizes.sort()
    budget = peak(kind, fixed, each, sizes[-1] + more)
    largest = max(
        size
        for size in range(sizes[-1], sizes[-1] + more + SEGMENT_BYTES // each + 2)
        if peak(kind, fixed, each, size) <= budget
    )
    points = [(size, peak(kind, fixed, each, size)) for size in sizes]
    end = line_end(
        points,
        budget_bytes=budget,
        floor_bytes=fixed * quarters // 4,
        failed=largest + 1 if failed else None,
    )
    assert end is not None
    assert end.sure < largest + 1, "what is sure fits"
    assert end.high >= largest - 1e-6 * largest
    assert end.low <= end.high


@examples(200)
@given(
    st.integers(2**20, 2**34),
    st.integers(2**12, 2**28).map(lambda half: 2 * half + 1),  # never rounded, as it seems
    st.lists(st.integers(1, 5000), min_size=3, max_size=3, unique=True),
)
def test_no_line_explains_a_failure_below_what_is_sure(fixed: int, each: int, sizes: list[int]) -> None:
    """The curve turns up behind the last reading."""
    sizes.sort()
    points = [(size, fixed + each * size) for size in sizes]
    budget = fixed + each * sizes[-1] * 4
    end = line_end(points, budget_bytes=budget)
    assert end is not None
    assume(end.sure > sizes[-1] + 2)
    assert line_end(points, budget_bytes=budget, failed=int(end.sure) - 1) is None


@pytest.mark.parametrize("up", [0.05, 0.5, 2.0])
def test_a_curve_that_turns_up_is_no_line(up: float) -> None:
    each = 2**20
    points = [(size, int(2**30 + each * size * (1 + up * (size > 60)))) for size in (1, 60, 100)]
    assert line_end(points, budget_bytes=2**32) is None
    # What lies behind the knee is.
    behind = [(size, int(2**30 + each * size * (1 + up))) for size in (150, 200)]
    end = line_end([*points, *behind], budget_bytes=2**32)
    assert end is not None
    assert end.low <= 3 * 2**30 / each / (1 + up) <= end.high


def test_readings_that_do_not_grow_have_an_end_that_is_sure_and_none_that_is_likely() -> None:
    """Under 2 MiB of growth is hidden in what is rounded up: so much and no more may come of each sample."""
    end = line_end([(1, 32 * MIB), (2, 32 * MIB), (17, 32 * MIB)], budget_bytes=64 * MIB)
    assert end is not None
    assert (end.flat, end.clear) == (True, False)
    assert end.sure == pytest.approx(17 + 16 * 16, abs=1)
    assert line_end([(1, 32 * MIB), (2, 32 * MIB)], budget_bytes=64 * MIB) is None
