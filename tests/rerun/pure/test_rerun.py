"""Which size a whole program is run at next: the promises of `_rerun.pure.rerun`, without torch."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._rerun.pure.rerun import Ending, Rerun, RunObservation, RunRequest


def play(
    runs: Rerun, largest: int, *, late_above: int | None = None, steps_in_all: int = 1000, evaluates: int = 0
) -> Rerun:
    """A program that trains at up to `largest`, fails late above `late_above`, and evaluates before it."""
    for _ in range(200):
        ask = runs.ask()
        if ask is None:
            return runs
        steps = steps_in_all if ask.steps is None else min(ask.steps, steps_in_all)
        ending: Ending = "done" if steps == steps_in_all else "cut"
        if evaluates and ask.size > evaluates:
            ending, steps = "oom", 0
        elif evaluates and ask.forwards:
            ending, steps = "cut", 0
        elif ask.size > largest:
            ending, steps = "oom", 0
        elif late_above is not None and ask.size > late_above and steps > steps_in_all // 2:
            ending, steps = "oom", steps_in_all // 2
        runs = runs.tell(RunObservation(ask, ending, steps))
    raise AssertionError("it does not end")


@pytest.mark.parametrize(
    ("start", "largest", "asked"),
    [
        (128, 128, [(128, None)]),
        (128, 1000, [(128, None)]),
        (128, 100, [(128, None), (64, 3), (96, 3), (112, 3), (104, 3), (100, 3), (100, None)]),
        (128, 7, [(128, None), (64, 3), (32, 3), (16, 3), (8, 3), (4, 3), (6, 3), (7, 3), (7, None)]),
        (2, 1, [(2, None), (1, 3), (1, None)]),
        (4, 0, [(4, None), (2, 3), (1, 3)]),
        (1, 0, [(1, None)]),
    ],
)
def test_sizes_are_halved_and_bisected(start: int, largest: int, asked: list[tuple[int, int | None]]) -> None:
    runs = play(Rerun(start=start), largest)
    assert [(one.ask.size, one.ask.steps) for one in runs.observations] == asked
    assert runs.answer == (asked[-1][0] if largest else None)


@given(
    start=st.integers(1, 5000),
    largest=st.integers(0, 6000),
    tolerance=st.sampled_from([0.0, 0.05, 0.3]),
    probe_steps=st.integers(0, 4),
    steps_in_all=st.integers(1, 8),
    late=st.none() | st.integers(0, 6000),
    evaluates=st.integers(0, 6000),
)
@examples(300)
def test_what_holds_for_every_program(
    start: int,
    largest: int,
    tolerance: float,
    probe_steps: int,
    steps_in_all: int,
    late: int | None,
    evaluates: int,
) -> None:
    runs = Rerun(start=start, probe_steps=probe_steps, tolerance=tolerance)
    runs = play(runs, largest, late_above=late, steps_in_all=steps_in_all, evaluates=evaluates)
    ends = [one.ending for one in runs.observations]
    assert ends.count("done") <= 1  # what has done its work is not run again
    assert "done" not in ends[:-1]
    for number, one in enumerate(runs.observations):
        assert 1 <= one.ask.size <= start
        failed = [other.ask.size for other in runs.observations[:number] if other.ending == "oom"]
        assert not failed or one.ask.size < min(failed)
    works = min(largest, start, start if late is None else late, evaluates or start)
    # Whether or not it finds the largest, it finds one where there is one.
    assert (runs.answer is None) == (works == 0)


@given(start=st.integers(1, 5000), largest=st.integers(1, 6000), tolerance=st.sampled_from([0.0, 0.05, 0.2]))
def test_the_answer_is_within_the_tolerance(start: int, largest: int, tolerance: float) -> None:
    runs = play(Rerun(start=start, tolerance=tolerance), largest)
    best = min(start, largest)
    assert runs.answer is not None
    assert best - max(1, tolerance * best) < runs.answer <= best or runs.answer == best
    assert len(runs.observations) <= 3 + 2 * start.bit_length()
    assert (
        sum(one.ask.steps is None for one in runs.observations) <= 2
    )  # the first run, and the one that is the answer


def test_late_failures_step_down_by_growing_parts() -> None:
    runs = play(Rerun(start=100), 100, late_above=40)
    assert [(one.ask.size, one.ask.steps) for one in runs.observations] == [
        (100, None),
        (90, None),
        (72, None),
        (44, None),
        (22, None),
    ]


def test_an_evaluation_before_the_training_misleads_twice_and_no_more() -> None:
    runs = play(Rerun(start=512), 60, evaluates=400)
    assert runs.answer in (58, 59, 60)
    wholes = [one for one in runs.observations if one.ask.steps is None]
    assert len(wholes) == 4  # the start, two that were vouched for wrongly, the answer
    assert not runs.observations[-1].ask.forwards


def test_a_program_without_steps_is_run_less_a_tenth_where_forwards_misled() -> None:
    runs = Rerun(start=128)
    for ask, ending in [
        (RunRequest(128), "oom"),
        (RunRequest(64, 3, True), "cut"),
        (RunRequest(96, 3, True), "oom"),
    ]:
        assert runs.ask() == ask
        runs = runs.tell(RunObservation(ask, ending))
    runs = runs.tell(RunObservation(RunRequest(78, 3, True), "cut")).tell(
        RunObservation(RunRequest(80, 3, True), "oom")
    )
    assert runs.ask() == RunRequest(78)
    assert runs.tell(RunObservation(RunRequest(78), "oom")).ask() == RunRequest(71)
