"""The table of needs: what a refusal says, and that every ground names what is lost and what to do."""

from __future__ import annotations

import pytest
import torch

from batchfit._engine.torch_private import needs
from batchfit.errors import BatchfitError, SnapshotError

GROUNDS = [value for value in vars(needs).values() if isinstance(value, needs.Ground)]


def test_a_refusal_names_the_version_what_is_lost_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    with pytest.raises(SnapshotError) as raised:
        raise needs.FSDP2_RESET.refusal(SnapshotError)
    assert str(raised.value) == (
        "a retry after a step that failed inside FSDP2 needs torch 2.8 or later, and this is 2.6.0: FSDP2 "
        "stays in the middle of that step, and cannot be reset. Install a newer torch, or begin with a size "
        "that fits"
    )
    assert type(needs.DDP_RESET.refusal()) is BatchfitError
    assert "needs what torch 2.6 to 2.15 has, and 2.6.0 has not: " in needs.DDP_RESET.why()


def test_names_that_are_gone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [needs.missing(feature) for feature in needs.NAMES] == [[]] * len(needs.NAMES)
    monkeypatch.delattr(torch, "_foreach_add_")
    assert [needs.missing(feature) for feature in needs.NAMES if needs.missing(feature)] == [
        ["torch._foreach_add_"]
    ]


def test_every_ground_is_distinct_and_complete() -> None:
    assert len(GROUNDS) >= 12
    assert len({ground.feature for ground in GROUNDS}) == len(GROUNDS)
    for ground in GROUNDS:
        assert ground.lost
        assert not ground.remedy.endswith(".")
