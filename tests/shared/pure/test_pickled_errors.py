"""Errors go through pickle as they are: what a process pool or a Ray task raises."""

from __future__ import annotations

import pickle

import pytest

from batchfit import errors

RAISED = (
    errors.NothingFitsError(
        1, device="cpu", budget_bytes=10, holders=[("a", 1)], changes=[("LoRA", "peft")], changed_bytes=3
    ),
    errors.UntraceableError("aten.item", "train.py:3", "its value is not known", raised=True),
    errors.ChildDiedError("was killed", exit_code=-9),
    errors.ChildRaisedError("ValueError", "wrong"),
    errors.ProgramError("ended", lines=["last"]),
    errors.SettingsDifferError("search.json", ["steps: 3, not 5"]),
    errors.RankMissingError([1], doing="a vote", timeout_s=3.0),
    errors.RankFailedError([(1, "wrong")], doing="a vote"),
    errors.ReadOnceError("loader", samples_read=3),
    errors.ResultFileError("no file"),
)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_pickle_as_it_went_in(error: errors.BatchfitError) -> None:
    error.add_note("at batch size 3")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))
