"""Footprints: lines through traces, and the exact envelope of the peak, each beside a slow way to get it."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from batchfit._engine.allocator.footprint import (
    OPTIONAL,
    Footprint,
    Origin,
    ShapeChangedError,
    Trace,
    check_same_stream,
    expected_end,
)

HERE = Origin("activations", "forward", "block", "model.py:3", "aten.mm.default")


def traced(
    size: int,
    sizes: list[int],
    events: list[int],
    *,
    begins: int = 0,
    ends: tuple[int, ...] | None = None,
    origins: list[Origin] | None = None,
) -> Trace:
    return Trace(
        size,
        tuple(sizes),
        tuple(origins or [HERE] * len(sizes)),
        tuple(events),
        begins,
        (len(events),) if ends is None else ends,
    )


@st.composite
def streams(draw: st.DrawFn) -> list[int]:
    """Any order of allocations and frees of what is live."""
    events: list[int] = []
    live: list[int] = []
    count = 0
    for pick in draw(st.lists(st.integers(-20, 20), min_size=1, max_size=40)):
        if pick < 0 and live:
            events.append(~live.pop(pick % len(live)))
        else:
            live.append(count)
            events.append(count)
            count += 1
    return events


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """Whole bytes and whole bytes a sample, so that nothing is rounded."""
    events = draw(streams())
    count = max(events) + 1
    whole = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    fixed = tuple(map(float, draw(whole)))
    slopes = tuple(map(float, draw(whole)))
    return Footprint(fixed, slopes, (HERE,) * count, tuple(events), 0, (len(events),))


def at(footprint: Footprint, size: int) -> Trace:
    """The trace that this footprint is the truth about."""
    return traced(size, footprint.sizes_at(size), list(footprint.events), ends=footprint.step_ends)


def slow_peak(footprint: Footprint, size: float) -> float:
    live: dict[int, float] = {}
    most = float("-inf")
    for event in footprint.events:
        if event >= 0:
            live[event] = footprint.fixed[event] + footprint.per_sample[event] * size
        else:
            del live[~event]
        most = max(most, sum(live.values()))
    return most


# ---------------------------------------------------------------- lines


@given(footprints(), st.integers(1, 40), st.integers(1, 40), st.integers(1, 500))
def test_lines_through_two_traces_give_every_other_size(
    truth: Footprint, low: int, gap: int, other: int
) -> None:
    found = Footprint.between(at(truth, low), at(truth, low + gap))
    assert found.sizes_at(other) == truth.sizes_at(other)
    assert found.error_at(at(truth, other)) == 0
    assert found.peak_bytes(other) == pytest.approx(at(truth, other).peak_bytes)


def test_a_block_that_is_no_line_is_seen_by_the_check() -> None:
    def square(size: int) -> Trace:
        return traced(size, [100, size * size], [0, 1, ~1])

    found = Footprint.between(square(2), square(4))  # 6 * size - 8
    assert found.sizes_at(3) == [100, 10]
    assert found.error_at(square(3)) == pytest.approx(1 / 109)
    assert found.error_at(square(10)) == pytest.approx((100 - 52) / 200)


def test_a_later_step_grows_as_the_first_one_did() -> None:
    """An activation, its gradient, and state that stays; the second step is the same without the state."""
    forward, update = (
        Origin("activations", "forward", operation="a"),
        Origin("optimizer", "optimizer", operation="o"),
    )
    brief = Origin("temporaries", "optimizer", operation="sqrt")
    weights = Origin("weights", "held")
    events = (0, 1, 2, ~2, ~1, 3, 4, 5, ~5, ~4, 6, ~6)
    origins = (weights, forward, forward, update, forward, forward, brief)

    def step(size: int, *, steps: int) -> Trace:
        sizes = (100, 8 * size, 4 * size + 7, 50, 8 * size, 4 * size + 7, 30)
        if steps == 1:
            return Trace(size, sizes[:4], origins[:4], events[:6], 1, (6,))
        return Trace(size, sizes, origins, events, 1, (6, 12))

    found = Footprint.through(step(2, steps=1), step(40, steps=2))
    for size in (1, 2, 17, 40, 200):
        assert found.sizes_at(size) == list(step(size, steps=2).sizes)
    assert found.step_ends == (6, 12)
    # Something new on the way forward of a later step: there is nothing to tell how it grows.
    strange = Trace(40, (*step(40, steps=2).sizes[:6], 999), (*origins[:6], forward), events, 1, (6, 12))
    with pytest.raises(ShapeChangedError):
        Footprint.through(step(2, steps=1), strange)


def test_the_end_is_expected_where_what_grows_meets_what_stays() -> None:
    made = Origin("activations", "forward", operation="a")
    kept, brief = Origin("weights", "held"), Origin("temporaries", "optimizer", operation="sqrt")
    small = Trace(2, (100, 20, 20, 90), (kept, made, made, brief), (0, 1, 2, ~1, ~2, 3, ~3), 1, (7,))
    assert expected_end(small, 1100) == 50  # 1000 over 20 a sample; the optimizer's does not grow
    assert expected_end(small, 50) == 0
    assert expected_end(Trace(2, (100,), (kept,), (0,), 1, (1,)), 1100) == 2


def test_state_is_counted_where_the_most_of_it_is_there_at_once() -> None:
    kinds = ("weights", "activations", "gradients", "gradients", "optimizer", "temporaries")
    origins = [Origin(kind, "forward") for kind in kinds]
    # One gradient is gone before the optimizer's state comes.
    events = [0, 1, 2, 3, ~1, ~2, 4, 5, ~5, ~3]
    footprint = Footprint.of(traced(2, [100, 999, 20, 30, 60, 999], events, origins=origins))
    assert footprint.state_bytes == 100 + 30 + 60
    assert Footprint.of(traced(2, [], [])).state_bytes == 0


def test_a_shorter_trace_checks_the_beginning() -> None:
    """One step of two, measured against the peak at the end and not against its own."""
    lines = Footprint((60.0, 0.0), (0.0, 10.0), (HERE,) * 2, (0, 1, -2, 1, -2), 1, (3, 5))
    small = Trace(2, (60, 26), (HERE,) * 2, (0, 1, -2), 1, (3,))
    assert lines.error_at(small) == pytest.approx(6 / 86)
    assert lines.error_at(small, of_bytes=lines.peak_bytes(60)) == pytest.approx(6 / 660)
    with pytest.raises(ShapeChangedError):
        lines.error_at(Trace(2, (60, 26), (HERE,) * 2, (0, 1, -1), 1, (3,)))


def test_errors_that_cancel_in_the_sum_count_where_they_are_apart() -> None:
    """One block too large, freed before one too small is made: the totals agree, the moments do not."""
    lines = Footprint((60.0, 40.0), (0.0, 0.0), (HERE,) * 2, (0, -1, 1, -2), 0, (4,))
    assert lines.error_at(traced(1, [40, 60], [0, -1, 1, -2])) == pytest.approx(20 / 60)


def test_a_block_never_has_less_than_nothing() -> None:
    found = Footprint.between(traced(10, [100], [0]), traced(20, [10], [0]))
    assert found.sizes_at(30) == [0]


@pytest.mark.parametrize(
    ("one", "two", "says"),
    [
        ([0, 1, ~0], [0, 1, ~1], "3 and 3 events"),
        ([0, 1], [0, 1, ~1], "2 and 3 events"),
        ([0, ~0, 1], [0, 1, ~0], r"at aten\.mm\.default \(model\.py:3\)"),
    ],
)
def test_another_order_is_refused_and_named(one: list[int], two: list[int], says: str) -> None:
    with pytest.raises(ShapeChangedError, match=says):
        Footprint.between(traced(1, [8, 8], one), traced(2, [8, 8], two))


def test_steps_that_end_elsewhere_are_another_stream() -> None:
    with pytest.raises(ShapeChangedError):
        check_same_stream(traced(1, [8, 8], [0, 1], ends=(1, 2)), traced(2, [8, 8], [0, 1], ends=(2, 2)))


def test_one_trace_alone_says_the_same_at_every_size() -> None:
    only = Footprint.of(traced(7, [3, 5], [0, 1, ~0]))
    assert only.sizes_at(7) == only.sizes_at(700) == [3, 5]
    assert only.peak_bytes(7) == 8


# ---------------------------------------------------------------- the peak


@given(footprints(), st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_the_peak_is_the_largest_sum_of_what_is_live(footprint: Footprint, sizes: list[int]) -> None:
    for size in sizes:
        assert footprint.peak_bytes(size) == slow_peak(footprint, size)
        moment = footprint.moment_of_peak(size)
        events = footprint.events[: moment + 1]
        blocks = [event for event in events if event >= 0 and ~event not in events]
        assert sum(footprint.sizes_at(size)[block] for block in blocks) == slow_peak(footprint, size)


@given(footprints(), st.lists(st.floats(1, 1000), min_size=1, max_size=12))
def test_pieces_are_the_peak_at_any_size(footprint: Footprint, sizes: list[float]) -> None:
    lines = footprint.peak_lines()
    starts = [line.size for line in lines]
    assert starts[0] == 1.0
    assert starts == sorted(set(starts))
    assert [p.per_sample for p in lines] == sorted({p.per_sample for p in lines})
    fixed, slopes = footprint.live_lines()
    for size in sizes:
        line = [one for one in lines if one.size <= size][-1]
        assert line.fixed + line.per_sample * size == pytest.approx(slow_peak(footprint, size))
        assert (line.fixed, line.per_sample) == (fixed[line.moment], slopes[line.moment])


@given(footprints(), st.floats(1, 50))
def test_pieces_beyond_the_largest_size_are_left_out(footprint: Footprint, largest: float) -> None:
    every = footprint.peak_lines()
    assert footprint.peak_lines(largest) == [line for line in every if line.size <= largest]


def test_knees_by_hand() -> None:
    """Weights of 100, then 10 + 3 a sample for a moment, then 7 a sample: the peak moves at size 2.5."""
    footprint = Footprint((100.0, 10.0, 0.0), (0.0, 3.0, 7.0), (HERE,) * 3, (0, 1, ~1, 2, ~2), 1, (5,))
    assert [(p.size, p.moment, p.fixed, p.per_sample) for p in footprint.peak_lines()] == [
        (1.0, 1, 110.0, 3.0),
        (2.5, 3, 100.0, 7.0),
    ]


def test_the_first_of_two_equal_moments_is_the_peak() -> None:
    footprint = Footprint((4.0, 4.0), (0.0, 0.0), (HERE,) * 2, (0, ~0, 1, ~1), 0, (4,))
    assert footprint.moment_of_peak(1) == 0
    assert [line.moment for line in footprint.peak_lines()] == [0]


# ---------------------------------------------------------------- traces


@given(streams(), st.randoms(use_true_random=False))
def test_frees_in_any_order_are_one_stream(events: list[int], chance: random.Random) -> None:
    """Python frees a set in the order of its hashes: the same step, another order, must be one stream."""
    shuffled: list[int] = []
    run: list[int] = []
    for event in [*events, max(events) + 1]:
        if event < 0:
            run.append(event)
            continue
        chance.shuffle(run)
        shuffled += [*run, event]
        run = []
    count = max(shuffled) + 1
    one, two = (traced(1, [8] * count, order).ordered() for order in ([*events, max(events) + 1], shuffled))
    assert one.events == two.events
    assert sorted(one.events) == sorted(shuffled)


@given(streams())
def test_putting_frees_in_order_moves_nothing_over_an_allocation(events: list[int]) -> None:
    sizes = [3**n % 97 for n in range(max(events) + 1)]
    before, after = traced(1, sizes, events), traced(1, sizes, events).ordered()
    assert [e for e in before.events if e >= 0] == [e for e in after.events if e >= 0]
    assert before.peak_bytes == after.peak_bytes
    for place, event in enumerate(before.events):
        if event >= 0:
            assert set(before.events[:place]) == set(after.events[:place])


def test_frees_do_not_cross_the_end_of_a_step() -> None:
    found = traced(1, [1, 1, 1], [0, 1, 2, ~0, ~2, ~1], begins=3, ends=(4, 6)).ordered()
    assert found.events == (0, 1, 2, ~0, ~1, ~2)
    found = traced(1, [1, 1, 1], [0, 1, 2, ~2, ~0, ~1], begins=3, ends=(4, 6)).ordered()
    assert found.events == (0, 1, 2, ~2, ~0, ~1)


def test_a_trace_counts_its_peak_and_its_batch() -> None:
    batch = Origin("batch", "batch")
    trace = traced(
        4, [100, 16, 40, 16], [0, 1, 2, ~2, ~1, 3, ~3], ends=(5, 7), origins=[HERE, batch, HERE, batch]
    )
    assert trace.peak_bytes == 156
    assert trace.batch_bytes == 16  # of one step of the two
    assert traced(1, [], []).peak_bytes == 0


# ---------------------------------------------------------------- steps that repeat


def two_steps(old_frees: list[int], *, second: tuple[int, int] = (8, 9)) -> Footprint:
    """Blocks 0 and 1 of 8 and 9 bytes stay after the first step, 2 and 3 after the second."""
    events = (0, 1, 2, *old_frees, 3)
    fixed = (8.0, 9.0, float(second[0]), float(second[1]))
    return Footprint(fixed, (0.0,) * 4, (HERE,) * 4, events, 0, (2, len(events)))


def test_what_a_step_frees_of_the_one_before_it_is_carried() -> None:
    assert two_steps([~0, ~1]).carried == ((0, 2), (1, 3))
    assert two_steps([~1, ~0]).carried == ((0, 2), (1, 3))
    assert two_steps([~1, ~0], second=(9, 8)).carried == ((0, 3), (1, 2))


def test_steps_that_are_not_alike_are_not_carried() -> None:
    assert two_steps([~0]).carried is None  # memory grows with every step
    assert two_steps([~0, ~1], second=(8, 10)).carried is None
    one = Footprint.of(traced(1, [8], [0]))
    assert one.carried is None


def test_a_step_that_leaves_nothing_carries_nothing() -> None:
    footprint = Footprint((8.0, 8.0), (0.0, 0.0), (HERE,) * 2, (0, ~0, 1, ~1), 0, (2, 4))
    assert footprint.carried == ()


def test_blocks_of_one_plan_go_together() -> None:
    plan = Origin("workspaces", "forward", operation=OPTIONAL + "aten.convolution.default")
    other = Origin("workspaces", "forward", operation=OPTIONAL + "aten.convolution_backward.default")
    origins = (plan, HERE, plan, plan, other)
    footprint = Footprint((8.0, 8.0, 8.0, 9.0, 8.0), (1.0,) * 5, origins, (0, 1, 2, 3, 4), 0, (5,))
    assert footprint.optional == {0: (0, 2), 2: (0, 2), 3: (3,), 4: (4,)}
    assert footprint.bare.sizes_at(2) == [0, 10, 0, 0, 0]


@examples(50)
@given(footprints(), st.integers(1, 50))
def test_live_lines_are_the_running_sums(footprint: Footprint, size: int) -> None:
    assume(footprint.events)
    sizes = footprint.sizes_at(size)
    fixed, slopes = footprint.live_lines()
    running = list(accumulate(sizes[e] if e >= 0 else -sizes[~e] for e in footprint.events))
    assert [a + b * size for a, b in zip(fixed, slopes, strict=True)] == pytest.approx(running)
