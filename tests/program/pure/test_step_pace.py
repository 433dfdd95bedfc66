"""Which steps of a run are timed, and when there are enough of them."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._profile.pure.steady import BRIEF, FINE, warmup_of
from batchfit._program.pure.step_pace import MEMORY_STEPS, MOST_STEPS, TimedSteps

times = st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=60)


def test_warm_up_is_dropped() -> None:
    steps = TimedSteps.of([30.0, 5.0, 0.1, 0.1, 0.1], FINE)
    assert (steps.warmup, steps.counted) == (4, (0.1,))
    assert TimedSteps.of([30.0, 5.0], FINE).counted == (5.0,)  # it ended within its warm-up
    assert warmup_of([30.0, 5.0], most=12) == 2


def test_a_run_goes_on_while_it_warms_up() -> None:
    assert TimedSteps.of([30.0, 5.0], BRIEF).more(BRIEF, start_s=1.0) > 0


def test_steps_that_cost_little_beside_the_start_are_timed_finely() -> None:
    wobbling = TimedSteps.of([1.0, *[1.0, 1.2] * 4], BRIEF)
    assert wobbling.more(BRIEF, start_s=2.0) == 0
    assert wobbling.more(BRIEF, start_s=100.0) > 0
    assert TimedSteps.of([0.1] * 9, FINE).more(FINE, start_s=100.0) == 0


@given(times=times, start_s=st.floats(0.0, 100.0), brief=st.booleans())
@examples(200)
def test_a_run_ends(times: list[float], start_s: float, brief: bool) -> None:
    timing = BRIEF if brief else FINE
    taken = times[:1]
    while more := TimedSteps.of(taken, timing).more(timing, start_s=start_s):
        taken += (times * 60)[len(taken) : len(taken) + more]
    assert len(taken) <= max(1, MOST_STEPS - MEMORY_STEPS)
    assert TimedSteps.of(taken, timing).counted
