"""The peak that a trace predicts for a step of a trainer of TRL, and the live peak of its real step here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from examples import some_slow  # noqa: E402

import batchfit  # noqa: E402
from batchfit.errors import UntraceableError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 8
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": 512,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT packed": ("SFT", {"packing": True, "max_length": 64}),
    "DPO": ("DPO", {}),
    "Reward": ("Reward", {}),
    "ORPO": ("ORPO", {}),
}


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("trl", reason="needs trl")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Taken(Exception):
    """No error: it ends the training once the search has begun."""


def trainer_for(name: str, folder: Path) -> Any:
    from trl_cases import model_for, trainer_of

    kind, given = CASES.get(name, (name, {}))
    more = {"ref_model": model_for(kind, seed=1, **SHAPE)} if kind in ("DPO", "KTO") else {}
    return trainer_of(
        kind, folder, model=model_for(kind, **SHAPE), more=more, optim="adamw_torch", batch=SIZE, **given
    )


def searched(name: str, folder: Path, kept: list[Any]) -> Any:
    """The workload that `adapt` searches with."""
    from batchfit.integrations.transformers import adapt

    trainer = adapt(trainer_for(name, folder))
    found = []

    def take(work: Any, **_: Any) -> Any:
        found.append(work)
        raise Taken

    with mock.patch.object(batchfit, "find_batch_size", take), pytest.raises(Taken):
        trainer.train()
    trainer._batchfit.searches = True
    kept.append(trainer)
    return found[0]


def plain(name: str, folder: Path, kept: list[Any]) -> Any:
    """The trainer's own step, with its metrics, on the same batches."""
    from batchfit.integrations.transformers import adapt
    from batchfit.integrations.trl.search import search_batches

    other = adapt(trainer_for(name, folder))  # it notes the longest sequence
    trainer = trainer_for(name, folder)
    trainer.current_gradient_accumulation_steps = 1
    optimizer = trainer.create_optimizer()
    batches = search_batches(other, trainer.get_train_dataloader().dataset, trainer.data_collator, SIZE)

    def step(size: int) -> None:
        # All microbatches but the first run while gradients are allocated.
        optimizer.zero_grad(set_to_none=size >= batches.largest)
        inputs = batches.restored(batches.source(size))
        count = (inputs["labels"] != -100).sum() if "labels" in inputs else None
        trainer.training_step(trainer.model, inputs, count)
        optimizer.step()

    kept.append(trainer)
    return batchfit.Workload(step, state=[trainer.model, optimizer])


@pytest.mark.parametrize("name", some_slow(CASES, is_slow=lambda name: name not in ("SFT packed", "DPO")))
def test_the_peak_of_a_real_step(name: str, tmp_path: Path) -> None:
    from cpu_truth import measured, predicted

    kept: list[Any] = []
    work, truth = measured(lambda: searched(name, tmp_path, kept), SIZE)
    told = predicted(work, SIZE)
    assert told.peak == pytest.approx(truth.peak, rel=0.01)
    assert told.held == pytest.approx(truth.held, rel=0.01)
    _, real = measured(lambda: plain(name, tmp_path, kept), SIZE)
    assert told.peak == pytest.approx(real.peak, rel=0.01)


def test_labels_that_choose_rows_cannot_be_predicted(tmp_path: Path) -> None:
    """KTO's chosen and rejected samples are picked by their labels: a search measures instead."""
    from cpu_truth import predicted

    with pytest.raises(UntraceableError, match=r"kto_trainer\.py"):
        predicted(searched("KTO", tmp_path, []), SIZE)
