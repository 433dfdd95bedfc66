"""What is said of an answer that a program's first steps gave."""

from __future__ import annotations

from batchfit._program.pure.caveats import unseen_of

STEPS = "only the first 25 optimizer steps were run: a later one may need more memory"
EVALUATION = "no evaluation was seen: one that comes later may need more memory"


def test_later_steps_and_an_evaluation_are_said() -> None:
    assert unseen_of(25, whole=False, evaluation=False, only_evaluates=False) == (STEPS, EVALUATION)


def test_an_evaluation_that_was_seen_is_not() -> None:
    assert unseen_of(25, whole=False, evaluation=True, only_evaluates=False) == (STEPS,)


def test_a_program_that_only_evaluates_has_passes() -> None:
    (one,) = unseen_of(3, whole=False, evaluation=False, only_evaluates=True)
    assert one == "only the first 3 forward passes were run: a later one may need more memory"
    (one,) = unseen_of(1, whole=False, evaluation=False, only_evaluates=True)
    assert one == "only the first forward pass was run: a later one may need more memory"


def test_nothing_is_left_of_a_program_that_ran_to_its_end() -> None:
    assert unseen_of(7, whole=True, evaluation=False, only_evaluates=False) == ()
