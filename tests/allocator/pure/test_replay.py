"""Simulated steps beside steps that are really repeated, and the search for the largest size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from replayed import replay

from batchfit._engine.allocator.caching import AllocatorSettings, CachingAllocator
from batchfit._engine.allocator.footprint import OPTIONAL, Footprint, Origin
from batchfit._engine.allocator.replay import STEPS, Simulation, largest, residual_of, simulate

MIB = 2**20
HERE = Origin("activations", "forward")
PLAN = Origin("workspaces", "forward", operation=OPTIONAL + "convolution")
BYTES = st.sampled_from([512, 300_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 25 * MIB, 40 * MIB])


@dataclass(frozen=True)
class Step:
    """One step as it repeats: n >= 0 allocates, ~n frees, and `old` frees block n of the step before."""

    fixed: tuple[int, ...]
    slopes: tuple[int, ...]
    order: tuple[tuple[str, int], ...]

    def footprint(self, steps: int) -> Footprint:
        count = len(self.fixed)
        events: list[int] = []
        ends = []
        for number in range(steps):
            base = number * count
            for what, block in self.order:
                if what == "new":
                    events.append(base + block)
                elif what == "free":
                    events.append(~(base + block))
                elif number:
                    events.append(~(base - count + block))
            ends.append(len(events))
        fixed, slopes = (tuple(map(float, values * steps)) for values in (self.fixed, self.slopes))
        return Footprint(fixed, slopes, (HERE,) * (count * steps), tuple(events), 0, tuple(ends))


@st.composite
def repeated(draw: st.DrawFn) -> Step:
    count = draw(st.integers(1, 7))
    fixed = draw(st.lists(BYTES, min_size=count, max_size=count))
    slopes = draw(st.lists(st.sampled_from([0, 4096, 700_000, 3 * MIB]), min_size=count, max_size=count))
    order: list[tuple[str, int]] = []
    for block in range(count):
        order.append(("new", block))
        what = draw(st.sampled_from(["free", "old", "soon"]))
        if what == "soon":
            order.append(("free", block))
        elif what == "free":
            order.insert(draw(st.integers(order.index(("new", block)) + 1, len(order))), ("free", block))
        else:  # lives into the next step
            order.insert(draw(st.integers(0, len(order))), ("old", block))
    return Step(tuple(fixed), tuple(slopes), tuple(order))


def by_hand(step: Step, size: int, capacity: int | None, steps: int) -> list[tuple[bool, int, int, int]]:
    """Each step of a stream that was really written out: whether it fits, retries, peaks so far."""
    footprint = step.footprint(steps)
    sizes = footprint.sizes_at(size)
    found = []
    for end in footprint.step_ends:
        done = replay(sizes, footprint.events[:end], capacity_bytes=capacity)
        found.append((done.fits, done.retries, done.peak_allocated_bytes, done.peak_reserved_bytes))
    return found


@examples(150)
@given(repeated(), st.integers(1, 6), st.integers(20 * MIB, 400 * MIB))
def test_repeating_the_last_step_is_as_good_as_writing_all_steps_out(
    step: Step, size: int, capacity: int
) -> None:
    said = simulate(step.footprint(2), size, capacity_bytes=capacity)
    truth = by_hand(step, size, capacity, STEPS)
    assert said.fits == all(fits for fits, *_ in truth)
    if said.fits:
        # It stops once settled: then the rest of the steps must not retry either. (Peaks may still wander by
        # a rest that is not split off, up to 1 MiB a block.)
        assert said.retries == truth[-1][1]
        assert truth[-1][2] - len(step.fixed) * MIB <= said.peak_allocated_bytes <= truth[-1][2]
        last_two = truth[-1][1] - truth[-3][1]
        assert said.sustained == (last_two == 0)


@given(repeated(), st.integers(1, 6))
def test_without_a_limit_it_is_a_replay(step: Step, size: int) -> None:
    footprint = step.footprint(2)
    said = simulate(footprint, size, capacity_bytes=None, steps=2)
    done = replay(footprint.sizes_at(size), footprint.events, capacity_bytes=None)
    assert said == Simulation(size, True, True, 0, done.peak_allocated_bytes, done.peak_reserved_bytes)


@given(repeated(), st.integers(1, 6), st.integers(MIB, 200 * MIB))
def test_it_fails_where_a_replay_fails(step: Step, size: int, capacity: int) -> None:
    footprint = step.footprint(2)
    done = replay(footprint.sizes_at(size), footprint.events, capacity_bytes=capacity)
    said = simulate(footprint, size, capacity_bytes=capacity)
    if not done.fits:
        assert (said.fits, said.sustained, said.failed_at) == (False, False, done.failed_at)
    assert said.retries >= done.retries


def test_what_is_held_beside_the_step_takes_room() -> None:
    footprint = Step((40 * MIB,), (0,), (("new", 0), ("free", 0))).footprint(2)
    assert simulate(footprint, 1, capacity_bytes=60 * MIB).sustained
    assert simulate(footprint, 1, capacity_bytes=60 * MIB, extra_bytes=20 * MIB).sustained
    too_much = simulate(footprint, 1, capacity_bytes=60 * MIB, extra_bytes=22 * MIB)
    assert (too_much.fits, too_much.failed_at) == (False, 0)
    assert not simulate(footprint, 1, capacity_bytes=60 * MIB, extra_bytes=61 * MIB).fits


def test_steps_that_grow_are_not_repeated() -> None:
    """Nothing frees what the step leaves behind: the two steps that were traced are all that is known."""
    footprint = Footprint((8.0 * MIB,) * 2, (0.0,) * 2, (HERE,) * 2, (0, 1), 0, (1, 2))
    assert footprint.carried is None
    assert simulate(footprint, 1, capacity_bytes=20 * MIB).sustained
    assert simulate(footprint, 1, capacity_bytes=None).peak_allocated_bytes == 16 * MIB


def test_a_plan_without_room_is_given_up_for_good() -> None:
    """Weights of 40 MiB, a plan of 30: the first try fails, and later steps do not even ask."""
    origins = (HERE, PLAN, PLAN)
    footprint = Footprint(
        (40.0 * MIB, 30.0 * MIB, 30.0 * MIB), (0.0,) * 3, origins, (0, 1, ~1, 2, ~2), 1, (3, 5)
    )
    assert simulate(footprint, 1, capacity_bytes=80 * MIB).peak_allocated_bytes == 70 * MIB
    tight = simulate(footprint, 1, capacity_bytes=60 * MIB)
    assert (tight.fits, tight.sustained, tight.retries) == (True, True, 1)
    assert tight.peak_allocated_bytes == 40 * MIB
    must = Footprint(footprint.fixed, footprint.per_sample, (HERE,) * 3, footprint.events, 1, (3, 5))
    assert simulate(must, 1, capacity_bytes=60 * MIB).failed_at == 1


# ---------------------------------------------------------------- the largest size


@examples(60)
@given(repeated(), st.integers(20 * MIB, 600 * MIB), st.integers(1, 64))
def test_the_largest_size_is_sustained_and_none_above_it_by_much(
    step: Step, capacity: int, most: int
) -> None:
    footprint = step.footprint(2)
    found = largest(footprint, capacity_bytes=capacity, most=most)
    sustained = [
        size for size in range(1, most + 1) if simulate(footprint, size, capacity_bytes=capacity).sustained
    ]
    if found is None:
        # A size that fails below others that run is possible, but none at all was found near the end.
        assert not sustained or sustained[0] > 1
        return
    assert found.size in sustained
    assert found == simulate(footprint, found.size, capacity_bytes=capacity)
    assert found.size <= footprint.upper_bound(capacity, most=most)
    # Between what was found and the first failure above it there is nothing left to gain, but what a retry
    # makes fit in one replay and not with a little more held.
    above = simulate(footprint, found.size + 1, capacity_bytes=capacity)
    assert found.size + 1 > most or not above.sustained or above.retries


# 40 samples run after a retry, and not with 0.2 or 0.9 MiB held besides.
BY_LUCK = Step(
    (40 * MIB, 512, 512, 512, 512),
    (3 * MIB, 700_000, 700_000, 3 * MIB, 700_000),
    (
        *(("new", 0), ("old", 3), ("old", 0), ("new", 1), ("free", 1), ("new", 2), ("free", 2)),
        *(("new", 3), ("new", 4), ("free", 4)),
    ),
)


@example(BY_LUCK, 442 * MIB, 40)
@examples(60)
@given(repeated(), st.integers(20 * MIB, 600 * MIB), st.integers(1, 64))
def test_a_retry_alone_does_not_decide_the_largest_size(step: Step, capacity: int, most: int) -> None:
    footprint = step.footprint(2)
    found = largest(footprint, capacity_bytes=capacity, most=most)
    if found is not None and found.retries and found.size > 1:
        more = (capacity / 2000, capacity / 500)
        again = [
            simulate(footprint, found.size, capacity_bytes=capacity, extra_bytes=held).sustained
            for held in more
        ]
        assert any(again)


@given(repeated(), st.integers(1, 1000 * MIB), st.integers(0, 500 * MIB))
def test_live_bytes_alone_bound_the_size(step: Step, capacity: int, more: int) -> None:
    footprint = step.footprint(2)
    bound = footprint.upper_bound(capacity, most=10_000)
    if bound:
        assert footprint.peak_bytes(bound) <= capacity
    if bound < 10_000:
        assert footprint.peak_bytes(bound + 1) > capacity
    assert footprint.upper_bound(capacity + more, most=10_000) >= bound


def line(fixed: int, slope: int) -> Footprint:
    """Weights that stay, and one block that grows with the batch."""
    return Footprint(
        (float(fixed), 0.0, 0.0), (0.0, float(slope), float(slope)), (HERE,) * 3, (0, 1, ~1, 2, ~2), 1, (3, 5)
    )


def test_the_largest_size_by_hand() -> None:
    found = largest(line(100 * MIB, 2 * MIB), capacity_bytes=1000 * MIB)
    assert found is not None
    assert (found.size, found.peak_allocated_bytes) == (450, 1000 * MIB)


@pytest.mark.parametrize(("capacity", "most"), [(99, None), (1000, 0)])
def test_nothing_fits(capacity: int, most: int | None) -> None:
    assert largest(line(100 * MIB, 2 * MIB), capacity_bytes=capacity * MIB, most=most) is None


def test_weights_that_fit_without_a_single_sample() -> None:
    assert largest(line(100 * MIB, 20 * MIB), capacity_bytes=110 * MIB) is None
    found = largest(line(100 * MIB, 20 * MIB), capacity_bytes=120 * MIB)
    assert found is not None
    assert found.size == 1


def test_what_the_footprint_does_not_show_counts() -> None:
    footprint = line(100 * MIB, 2 * MIB)
    fixed = largest(footprint, capacity_bytes=1000 * MIB, extra=(100.0 * MIB, 0.0))
    growing = largest(footprint, capacity_bytes=1000 * MIB, extra=(0.0, 2.0 * MIB))
    assert fixed is not None
    assert growing is not None
    assert (fixed.size, growing.size) == (400, 225)
    assert footprint.upper_bound(1000 * MIB, (0.0, 2.0 * MIB)) == 225


def test_a_step_that_does_not_grow_ends_at_what_is_wanted() -> None:
    found = largest(line(100 * MIB, 0), capacity_bytes=200 * MIB, most=4096)
    assert found is not None
    assert found.size == 4096
    assert line(300 * MIB, 0).upper_bound(200 * MIB) == 0


def test_the_allocators_settings_are_used() -> None:
    """25 MiB blocks, freed and asked for again in another size: only expandable segments join them."""
    fixed = (25.0 * MIB, 25.0 * MIB, 45.0 * MIB) * 2
    events = (0, 1, ~0, ~1, 2, ~2, 3, 4, ~3, ~4, 5, ~5)
    footprint = Footprint(fixed, (0.0,) * 6, (HERE,) * 6, events, 0, (6, 12))
    plain = simulate(footprint, 1, capacity_bytes=70 * MIB)
    joined = simulate(
        footprint, 1, capacity_bytes=70 * MIB, rules=AllocatorSettings(expandable_segments=True)
    )
    assert (plain.fits, plain.retries) == (False, 2)  # 25 of the 45 that it had to make room for are taken
    assert (joined.fits, joined.sustained) == (True, True)


def test_a_device_is_made_again_for_each_simulation() -> None:
    footprint = line(MIB, MIB)
    first = simulate(footprint, 5, capacity_bytes=100 * MIB)
    assert first == simulate(footprint, 5, capacity_bytes=100 * MIB)
    assert CachingAllocator(None).peak_allocated_bytes == 0


def test_what_stays_of_a_small_first_step_lies_in_no_large_block() -> None:
    """As seen on an H200: 32 MiB stay in a block of 2.9 GiB, and the next such block finds no room."""
    work, kept = (
        Origin("activations", "forward", operation="a"),
        Origin("workspaces", "backward", operation="b"),
    )
    # A large block is freed, the workspace is carved out of it and stays; then the large one comes again.
    step = Footprint(
        (0.0, 32.0 * MIB, 0.0),
        (100.0 * MIB, 0.0, 100.0 * MIB),
        (work, kept, work),
        (0, ~0, 1, 2, ~2),
        0,
        (3, 5),
    )
    capacity = 1900 * MIB
    assert not simulate(step, 10, capacity_bytes=capacity).fits
    assert simulate(step, 10, capacity_bytes=capacity, first_size=1).sustained
    assert not simulate(step, 19, capacity_bytes=capacity, first_size=1).fits
    assert not simulate(step, 10, capacity_bytes=capacity, first_size=30).fits
    found = largest(step, capacity_bytes=capacity, first_size=1)
    assert found is not None
    assert found.size == 18


def generation(layers: int, passes: int, each: int, growth: int) -> Footprint:
    """A cache for each layer, made anew and longer in every pass; beside it something of each pass."""
    fixed, slopes, events = [8.0 * MIB], [0.0], [0]
    caches: dict[int, int] = {}
    for number in range(passes):
        for layer in range(layers):
            for slope in (each + number * growth, 3 * growth):
                fixed.append(0.0)
                slopes.append(float(slope))
            longer, beside = len(fixed) - 2, len(fixed) - 1
            events += [beside, longer, *([~caches[layer]] if number else []), ~beside]
            caches[layer] = longer
    events += [~block for block in caches.values()]
    return Footprint(tuple(fixed), tuple(slopes), (HERE,) * len(fixed), tuple(events), 1, (len(events),))


def test_one_sample_that_runs_is_an_answer() -> None:
    """Whatever hangs on small things there: nothing is below it."""
    footprint = generation(2, 8, 20_000_000, 2_000_000)
    told = 0
    for capacity in range(100 * MIB, 150 * MIB, MIB // 2):
        found = largest(footprint, capacity_bytes=capacity, may_retry=True)
        runs = simulate(footprint, 1, capacity_bytes=capacity, may_retry=True).sustained
        assert (found is not None) == runs
        more = simulate(footprint, 1, capacity_bytes=capacity, extra_bytes=0.002 * capacity, may_retry=True)
        told += runs and not more.sustained
    assert told, "none hangs on small things"


@examples(25)
@given(
    st.integers(2, 5),
    st.integers(8, 30),
    st.integers(20_000, 200_000),
    st.integers(1_000, 20_000),
    st.integers(200, 2000),
)
def test_generation_gets_a_size_that_does_not_hang_on_small_things(
    layers: int, passes: int, each: int, growth: int, capacity_mib: int
) -> None:
    footprint, capacity = generation(layers, passes, each, growth), capacity_mib * MIB
    found = largest(footprint, capacity_bytes=capacity, may_retry=True)
    assert found is not None
    for less, more in ((0.0, 0.0005), (0.0, 0.002), (0.005, 0.0), (0.01, 0.0005), (0.02, 0.0), (0.1, 0.0)):
        size = max(1, round(found.size * (1 - less)))
        held = more * capacity
        assert simulate(footprint, size, capacity_bytes=capacity, extra_bytes=held, may_retry=True).sustained
    assert found.size <= footprint.upper_bound(capacity)


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ((8, 0), (24, 0), (0.0, 0.0)),
        ((8, 10 * MIB), (24, 10 * MIB), (10.0 * MIB, 0.0)),  # a workspace
        ((8, 40 * MIB), (24, 120 * MIB), (0.0, 5.0 * MIB)),  # of each sample
        ((8, 20 * MIB), (24, 100 * MIB), (-20.0 * MIB, 5.0 * MIB)),
        ((8, -99 * MIB), (24, -48 * MIB), (0.0, 0.0)),  # a trace that says too much at small sizes
        ((8, -99 * MIB), (24, 5 * MIB), (5.0 * MIB, 0.0)),
        ((8, 90 * MIB), (24, 30 * MIB), (90.0 * MIB, 0.0)),
    ],
)
def test_what_two_runs_say(first: Any, second: Any, wanted: tuple[float, float]) -> None:
    assert residual_of(first, second, small=25 * MIB) == pytest.approx(wanted)


@given(
    st.integers(1, 100),
    st.integers(1, 100),
    st.integers(-(2**30), 2**30),
    st.integers(-(2**30), 2**30),
)
def test_both_runs_are_covered_and_the_trace_is_never_lowered(a: int, more: int, low: int, high: int) -> None:
    small = 2**26
    fixed, slope = residual_of((a, low), (a + more, high), small=small)
    for size, gap in ((a, low), (a + more, high)):
        assert fixed + slope * size >= min(gap, max(0, high)) - 1e-3
    assert fixed + slope * (a + more) >= max(0, high) - 1e-3
    assert slope >= 0
    if high <= small:
        assert slope == 0


def test_a_footprint_on_two_streams_needs_what_both_cache() -> None:
    origins = (HERE, replace(HERE, stream=1))
    one_by_one = (0, ~0, 1, ~1)
    apart = Footprint((12.0 * MIB,) * 2, (0.0,) * 2, origins, one_by_one, 0, (4,))
    together = replace(apart, origins=(HERE, HERE))
    assert apart.streams == {1: 1}
    assert simulate(together, 1, capacity_bytes=None).peak_reserved_bytes == 12 * MIB
    assert simulate(apart, 1, capacity_bytes=None).peak_reserved_bytes == 24 * MIB
    assert simulate(apart, 1, capacity_bytes=16 * MIB).fits, "after a retry"
