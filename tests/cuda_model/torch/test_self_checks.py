"""The installed torch beside the one that predictions take it for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchfit._engine.cuda_model import self_checks


def test_this_torch_is_the_one_that_predictions_know() -> None:
    assert self_checks.unlisted() == []
    assert self_checks.cast_otherwise() == []
    assert self_checks.changed(self_checks.RECURRENT) == []
    assert self_checks.changed(self_checks.ATTENTION) == []


def test_an_operation_that_no_list_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_checks, "FP32", tuple(one for one in self_checks.FP32 if one != "exp"))
    assert self_checks.unlisted() == ["exp"]


def test_an_operation_that_is_cast_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_checks, "LOWER", (*self_checks.LOWER, "log"))
    assert self_checks.cast_otherwise() == ["log"]

    def unknown(operation: Any, *args: Any) -> None:
        return None

    monkeypatch.setattr(self_checks, "cuda_dtype", unknown)  # a torch that cannot be asked
    assert self_checks.cast_otherwise() == []


def test_other_arguments_and_missing_operations_are_named() -> None:
    known = {"_cudnn_rnn": self_checks.RECURRENT["_cudnn_rnn"] + " more", "_no_such_operation": "input"}
    assert self_checks.changed(known) == ["_cudnn_rnn", "_no_such_operation"]
    assert torch.get_autocast_dtype("cuda") is torch.float16  # as before
