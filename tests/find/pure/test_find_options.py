"""Options values: checked when they are made, and read by the command line without torch."""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, replace
from typing import Any

import pytest

from batchfit._explain.pure.options import ExplainOptions
from batchfit._find.pure.options import FindOptions
from batchfit._options import flags_in
from batchfit._predict.pure.options import PredictOptions
from batchfit._profile.pure.options import ProfileOptions


@pytest.mark.parametrize(
    ("options", "given", "refusal"),
    [
        (FindOptions, {"steps": 1}, "steps must be an integer of at least 2, not 1"),
        (FindOptions, {"strategy": "best"}, "strategy must be one of "),
        (FindOptions, {"timeout_s": 2.0}, "timeout_s must be None without isolate=True"),
        (FindOptions, {"isolate": True, "store": True}, "store must be False with isolate=True"),
        (FindOptions, {"fresh": True}, "fresh must be False without store=True or key"),
        (FindOptions, {"budget": "much"}, "budget must be bytes"),
        (PredictOptions, {"budget": []}, "budget must name at least one budget"),
        (PredictOptions, {"margin": 1}, "margin must be at least 0 and below 1, not 1"),
        (ExplainOptions, {"batch_size": 0}, "batch_size must be a positive integer, not 0"),
        (ProfileOptions, {"sizes": [4], "largest": 8}, "largest must be None where sizes are given, not 8"),
        (ProfileOptions, {"loader": [1], "diagnose": False}, "diagnose must be True where a loader is given"),
    ],
)
def test_wrong_options_are_refused_when_they_are_made(
    options: type[Any], given: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ValueError, match=f"^{refusal}"):
        options(**given)


def test_options_do_not_change_and_a_changed_copy_is_checked() -> None:
    options = FindOptions(budget="1GiB", soak_steps=0)
    assert options.budget_bytes == 2**30
    assert not options.search().soak
    with pytest.raises(FrozenInstanceError):
        options.steps = 4  # type: ignore[misc]
    with pytest.raises(ValueError, match="min_size must be a positive integer"):
        replace(options, min_size=0)


def test_a_key_turns_the_store_on_and_a_store_needs_a_model_or_a_key() -> None:
    assert FindOptions(key="mine").uses_store
    FindOptions(store=True).check_key(has_model=True)
    FindOptions(key="mine").check_key(has_model=False)
    with pytest.raises(ValueError, match="key must be given to store the answer of a step without a model"):
        FindOptions(store=True).check_key(has_model=False)


def test_sizes_that_can_be_read_only_once_are_kept() -> None:
    options = ProfileOptions(sizes=iter([4, 8, 4]))  # type: ignore[arg-type]
    assert options.knee().sizes == options.knee().sizes == (4, 8)


def test_every_flag_is_described() -> None:
    for options in (FindOptions, PredictOptions, ExplainOptions, ProfileOptions):
        described = {name: (default, flag) for name, default, flag in flags_in(options)}
        assert described
        for name, (default, flag) in described.items():
            assert flag.help.endswith("."), f"{name} has no help"
            assert flag.kind is bool or flag.metavar, f"{name} takes a value without a name"
            assert default is None or default is MISSING or isinstance(default, flag.kind)
