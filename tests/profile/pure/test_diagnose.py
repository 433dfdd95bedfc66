"""Each bottleneck is named from its readings, and a clean run names none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._profile.pure.diagnose import Facts, Loaded, ShapeTimes, diagnose, ms

CLEAN = Facts(
    size=64,
    step_s=0.1,
    steps=10,
    has_own_clock=True,
    busy_s=0.098,
    host_s=0.03,
    kernels=900,
    batch_s=0.002,
    reserved_bytes=10 * 2**30,
    budget_bytes=20 * 2**30,
    growth=1.9,
    flops_share=0.45,
)
LOADED = Loaded(size=64, loader_s=0.02, step_s=0.1, both_s=0.101, batches=20, shapes=1)


def kinds(facts: Facts) -> list[str]:
    return [one.kind for one in diagnose(facts)]


@pytest.mark.parametrize(
    "facts",
    [
        CLEAN,
        replace(CLEAN, loaded=LOADED),
        replace(CLEAN, own_s=[0.098, 0.1, 0.097, 0.099]),
        replace(CLEAN, shapes=ShapeTimes(steps=8, distinct=8, cold_s=0.82, warm_s=0.8)),
        replace(CLEAN, batch_s=0.09),  # hidden behind a busy device
        replace(CLEAN, alloc_retries=1),
        replace(CLEAN, cut_off_by_memory=True),  # memory ends where a doubling brings 5 %
    ],
)
def test_a_clean_run_is_compute_bound_and_nothing_else(facts: Facts) -> None:
    found = diagnose(facts)
    assert [one.kind for one in found] == ["compute-bound"]
    assert "x1.90" in found[0].evidence
    assert "45%" in found[0].evidence


def test_nothing_is_said_without_readings() -> None:
    bare = Facts(size=1, step_s=0.1, steps=2, has_own_clock=False)
    assert diagnose(bare) == ()
    assert diagnose(replace(bare, growth=1.2)) == ()


def test_a_slow_loader() -> None:
    (one,) = diagnose(replace(CLEAN, loaded=replace(LOADED, loader_s=0.3, both_s=0.305)))
    assert one.kind == "data-bound"
    assert one.share == pytest.approx(1 - 0.1 / 0.305)
    assert "300 ms" in one.evidence
    assert "num_workers" in one.advice


def test_a_step_that_is_slower_for_another_reason_is_not_the_loaders_fault() -> None:
    assert kinds(replace(CLEAN, loaded=replace(LOADED, loader_s=0.001, both_s=0.2))) == ["compute-bound"]


def test_a_batch_that_takes_long_to_make() -> None:
    on_cpu = replace(CLEAN, has_own_clock=False, busy_s=None, batch_s=0.06)
    (one,) = diagnose(on_cpu)
    assert (one.kind, one.share) == ("data-bound", pytest.approx(0.6))
    assert kinds(replace(CLEAN, busy_s=0.04, batch_s=0.06)) == ["data-bound"]  # not host-bound as well


def test_an_idle_device() -> None:
    (one,) = diagnose(replace(CLEAN, busy_s=0.04, host_s=0.095))
    assert one.kind == "host-bound"
    assert one.share == pytest.approx(0.6)
    assert "900 kernels" in one.evidence
    assert "95 ms" in one.evidence


def test_an_allocator_that_retries() -> None:
    (one,) = diagnose(replace(CLEAN, alloc_retries=7, reserved_bytes=19 * 2**30))
    assert one.kind == "memory-bound"
    assert "7 times in 10 steps" in one.evidence
    assert "95%" in one.evidence
    (larger,) = diagnose(replace(CLEAN, crowded=[(96, 1, 10), (128, 9, 10)]))
    assert (larger.kind, larger.size) == ("memory-bound", 128)


def test_memory_that_ends_while_throughput_rises() -> None:
    (one,) = diagnose(replace(CLEAN, growth=1.1, cut_off_by_memory=True))
    assert one.kind == "memory-bound"
    assert "x1.82" in one.evidence
    assert diagnose(replace(CLEAN, growth=1.1)) == ()


def test_new_shapes() -> None:
    (one,) = diagnose(replace(CLEAN, shapes=ShapeTimes(steps=8, distinct=8, cold_s=1.6, warm_s=0.8)))
    assert (one.kind, one.share) == ("shape-bound", pytest.approx(0.5))
    ragged = replace(LOADED, batches=20, shapes=18)
    first = ShapeTimes(steps=1, distinct=1, cold_s=0.3, warm_s=0.11)
    assert kinds(replace(CLEAN, loaded=ragged, shapes=first)) == ["shape-bound"]
    assert kinds(replace(CLEAN, loaded=LOADED, shapes=first)) == ["compute-bound"]
    assert kinds(replace(CLEAN, loaded=ragged, shapes=replace(first, cold_s=0.12))) == ["compute-bound"]


def test_a_rank_that_lags_and_an_exchange_that_is_slow() -> None:
    (one,) = diagnose(replace(CLEAN, own_s=[0.06, 0.1, 0.06, 0.06]))
    assert one.kind == "sync-bound"
    assert "rank 1" in one.evidence
    assert "40%" in one.evidence
    (two,) = diagnose(replace(CLEAN, own_s=[0.06, 0.061]))
    assert two.kind == "sync-bound"
    assert "exchange" in two.evidence


def test_two_ranks_of_which_one_lags() -> None:
    (one,) = diagnose(replace(CLEAN, own_s=[0.1, 0.05]))
    assert "rank 0" in one.evidence


def test_several_at_once_come_in_the_order_of_their_cost() -> None:
    facts = replace(
        CLEAN, loaded=replace(LOADED, loader_s=0.3, both_s=0.3), alloc_retries=9, own_s=[0.1, 0.08, 0.08]
    )
    assert kinds(facts) == ["data-bound", "sync-bound", "memory-bound"]


@given(
    step_s=st.floats(1e-5, 100),
    busy=st.none() | st.floats(0, 2),
    batch=st.none() | st.floats(0, 2),
    retries=st.integers(0, 50),
    growth=st.none() | st.floats(0.5, 3),
    loader=st.none() | st.tuples(st.floats(1e-6, 10), st.floats(1e-6, 10)),
    own=st.lists(st.floats(1e-6, 10), max_size=4),
    cut=st.booleans(),
)
@examples(200)
def test_every_finding_has_figures_and_advice(
    step_s: float,
    busy: float | None,
    batch: float | None,
    retries: int,
    growth: float | None,
    loader: tuple[float, float] | None,
    own: list[float],
    cut: bool,
) -> None:
    facts = replace(
        CLEAN,
        step_s=step_s,
        busy_s=None if busy is None else busy * step_s,
        batch_s=None if batch is None else batch * step_s,
        alloc_retries=retries,
        growth=growth,
        loaded=None if loader is None else replace(LOADED, loader_s=loader[0], both_s=loader[1]),
        own_s=own,
        cut_off_by_memory=cut,
    )
    found = diagnose(facts)
    assert len({one.kind for one in found}) == len(found)
    assert "compute-bound" not in {one.kind for one in found} or len(found) == 1
    for one in found:
        assert one.share is None or 0 < one.share <= 1
        assert any(letter.isdigit() for letter in one.evidence)
        assert one.advice


def test_times_are_written_with_their_unit() -> None:
    assert (ms(0.0352), ms(1.5)) == ("35.2 ms", "1.5 s")
