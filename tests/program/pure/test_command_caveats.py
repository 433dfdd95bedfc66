"""What is said of an answer that a program's first steps gave."""

from __future__ import annotations

from batchfit._program.pure.caveats import caveats_of_runs

STEPS = "only the first 25 optimizer steps were run: a later one may need more memory"
EVALUATION = "no evaluation was seen: one that comes later may need more memory"


def test_later_steps_and_an_evaluation_are_said() -> None:
    assert caveats_of_runs(25, whole=False, evaluation=False, only_evaluates=False) == (STEPS, EVALUATION)


def test_an_evaluation_that_was_seen_is_not() -> None:
    assert caveats_of_runs(25, whole=False, evaluation=True, only_evaluates=False) == (STEPS,)


def test_a_program_that_only_evaluates_has_passes() -> None:
    (one,) = caveats_of_runs(3, whole=False, evaluation=False, only_evaluates=True)
    assert one == "only the first 3 forward passes were run: a later one may need more memory"
    (one,) = caveats_of_runs(1, whole=False, evaluation=False, only_evaluates=True)
    assert one == "only the first forward pass was run: a later one may need more memory"


def test_nothing_is_left_of_a_program_that_ran_to_its_end() -> None:
    assert caveats_of_runs(7, whole=True, evaluation=False, only_evaluates=False) == ()
