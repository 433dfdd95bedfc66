"""An evaluation within a program's steps is seen; a teacher's pass is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from batchfit._program.probe.evaluation import EvaluationWatch


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[EvaluationWatch]:
    """One that leaves `nn.Module.train` as it was."""
    monkeypatch.setattr(nn.Module, "train", nn.Module.train)
    return EvaluationWatch()


def test_loading_a_model_is_no_evaluation(watch: EvaluationWatch) -> None:
    nn.Linear(1, 1).eval()
    assert not watch.seen


def test_a_pass_before_the_first_step(watch: EvaluationWatch) -> None:
    model = nn.Linear(1, 1)
    watch.take_pass(model)  # as in training
    with torch.no_grad():
        watch.take_pass(model)  # a loop that forgot eval(), or a part of training
    watch.take_pass(model.eval())  # with gradients
    assert not watch.seen
    with torch.no_grad():
        watch.take_pass(model)
    assert watch.seen


def test_a_mode_after_the_first_step(watch: EvaluationWatch) -> None:
    watch.take_step()
    nn.Linear(1, 1).train()
    assert not watch.seen
    model = nn.Linear(1, 1)
    assert model.eval() is model
    assert not model.training
    assert watch.seen


class OwnEval(nn.Linear):
    """As transformers' models have it."""

    def eval(self) -> Any:
        return self.train(False)


def test_a_model_with_an_eval_of_its_own(watch: EvaluationWatch) -> None:
    watch.take_step()
    nn.Sequential(nn.Linear(1, 1), OwnEval(1, 1)).requires_grad_(False).train(False)
    assert not watch.seen
    model = OwnEval(1, 1)
    assert model.eval() is model
    assert watch.seen


def test_a_teacher_is_none(watch: EvaluationWatch) -> None:
    watch.take_step()
    teacher = nn.Linear(1, 1).requires_grad_(False).eval()
    with torch.no_grad():
        watch.take_pass(teacher)
    assert not watch.seen
