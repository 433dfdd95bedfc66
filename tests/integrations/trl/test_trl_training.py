"""Training and evaluation with TRL's trainers where memory is short: `adapt` ends as plain training would."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from examples import some_slow  # noqa: E402

import batchfit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT packed": ("SFT", {"packing": True, "max_length": 24}),
    "DPO": ("DPO", {}),
    "KTO": ("KTO", {}),
    "Reward": ("Reward", {}),
    "ORPO": ("ORPO", {}),
}
QUICK = {"SFT packed", "DPO"}
MORE: dict[str, Any] = {"batch": 12, "count": 24, "steps": 2}


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("trl", reason="needs trl")
    pytest.importorskip("peft", reason="needs peft")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainer_for(name: str, folder: Path, *, dropout: float = 0.0, **more: Any) -> Any:
    from trl_cases import model_for, trainer_of

    kind, given = CASES[name]
    given = {**MORE, **given, **more}
    if dropout and kind == "DPO":
        given["disable_dropout"] = False
    return trainer_of(kind, folder, model=model_for(kind, dropout=dropout), **given)


def adapted(trainer: Any, **options: Any) -> Any:
    from batchfit.integrations.transformers import adapt

    return adapt(trainer, **options)


def parameters(trainer: Any) -> Any:
    return torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


def peaks(trainer: Any) -> tuple[int, int]:
    """Bytes before a training, and at its peak."""
    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        before = memory.allocated_bytes
        memory.reset_peak()
        trainer.train()
        return before, memory.peak_bytes


# Whether a search finds the size, or training learns it.
WAYS = [f"{name}, {how}" for name in CASES for how in ("found", "learned")]


@pytest.mark.parametrize(
    "way", some_slow(WAYS, is_slow=lambda way: way not in ("SFT packed, found", "DPO, learned"))
)
def test_training_where_the_plain_trainer_dies(way: str, tmp_path: Path) -> None:
    name, how = way.split(", ")
    find = how == "found"
    plain = trainer_for(name, tmp_path)
    before, peak = peaks(plain)
    wanted = parameters(plain)
    del plain
    budget = before + (peak - before) // 2
    short = trainer_for(name, tmp_path)
    with pytest.raises(torch.OutOfMemoryError), batchfit.virtual_memory(budget):
        short.train()
    del short
    gc.collect()
    trainer = adapted(trainer_for(name, tmp_path), find=find)
    with batchfit.virtual_memory(budget):
        trainer.train()
    assert float((parameters(trainer) - wanted).norm() / wanted.norm()) < 1e-6
    assert (trainer.found is not None) == find
    logged = [entry for entry in trainer.state.log_history if "microbatch_size" in entry]
    assert any(entry.get("out_of_memory") for entry in logged) or find
    if find and name != "SFT packed":
        assert trainer.found.batch_size < MORE["batch"]


@pytest.mark.parametrize("name", some_slow(CASES, is_slow=lambda name: name not in QUICK))
def test_a_retried_batch_ends_as_one_that_began_at_that_size(name: str, tmp_path: Path) -> None:
    """With dropout, bit for bit, metrics too."""
    trainer = trainer_for(name, tmp_path, dropout=0.2, steps=1)
    before, peak = peaks(trainer)
    ends = []
    for budget, size in ((before + (peak - before) // 3, None), (None, 1)):
        trainer = adapted(trainer_for(name, tmp_path, dropout=0.2, steps=1), find=False)
        if budget is None:
            trainer._batchfit.microbatch_size = ends[0][2]
            trainer.train()
        else:
            with batchfit.virtual_memory(budget):
                trainer.train()
        (entry,) = [one for one in trainer.state.log_history if "loss" in one]
        retries = [one for one in trainer.state.log_history if "out_of_memory" in one]
        assert bool(retries) == (budget is not None)
        times = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
        entry = {key: value for key, value in entry.items() if key not in times}
        ends.append((parameters(trainer), entry, retries[0]["microbatch_size"] if retries else size))
    (found, logged, _), (wanted, wanted_log, _) = ends
    if name == "KTO":  # its estimate, made first, has microbatches of its own, and other sums with them
        assert float((found - wanted).norm() / wanted.norm()) < 1e-6
        return
    assert torch.equal(found, wanted)
    assert logged == wanted_log


def test_an_oom_in_the_reference_leaves_the_adapter_on(tmp_path: Path) -> None:
    from trl_cases import gradients_of, lora_config, model_for, trainer_of

    utils = importlib.import_module("trl.trainer.utils")
    whole, calls = utils._ChunkedLogProbFunction, []

    class Failing:
        @staticmethod
        def apply(*given: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            if calls == [True, False]:  # the policy, then the reference
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return whole.apply(*given)

    def trainer() -> Any:
        return trainer_of("DPO", tmp_path, model=model_for("DPO"), more={"peft_config": lora_config()})

    wanted = gradients_of(trainer())
    with mock.patch.object(utils, "_ChunkedLogProbFunction", Failing):
        failed = adapted(trainer(), find=False)
        found = gradients_of(failed)
    assert [entry["out_of_memory"] for entry in failed.state.log_history if "out_of_memory" in entry] == [1]
    assert failed.model.get_model_status().enabled is True
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("name", some_slow(CASES, is_slow=lambda name: name != "DPO"))
def test_evaluation_is_cut_too(name: str, tmp_path: Path) -> None:
    from trl_cases import rows

    kind = CASES[name][0]
    data = rows(kind, 16, seed=5)
    found = []
    for size in (None, 3):
        trainer = trainer_for(name, tmp_path, batch=8, more={"eval_dataset": data})
        if size is not None:
            adapted(trainer)._batchfit.evaluator_of(trainer, trainer.model)._uniform._most = size
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_outputs_of_an_evaluation_keep_the_order_of_trl(tmp_path: Path) -> None:
    """All chosen rows of a batch, then all rejected ones."""
    from trl_cases import rows, trainer_of

    found = []
    for size in (None, 2):
        seen: list[Any] = []

        def keep(given: Any, seen: list[Any] = seen) -> dict[str, float]:
            seen.append((given.predictions, given.label_ids))
            return {}

        more = {
            "compute_metrics": keep,
            "eval_dataset": rows("DPO", 5),
        }
        trainer = trainer_of("DPO", tmp_path, more=more, batch=5)
        if size is not None:
            adapted(trainer)._batchfit.evaluator_of(trainer, trainer.model)._uniform._most = size
        trainer.evaluate()
        found.append(seen[0])
    (logits, labels), (cut_logits, cut_labels) = found
    assert (labels == cut_labels).all()
    assert abs(logits - cut_logits).max() < 1e-5
