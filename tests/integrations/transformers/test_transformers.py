"""batchfit in Hugging Face's Trainer: exact gradients, nothing lost, and what users complain of gone."""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

import batchfit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")

from examples import some_slow  # noqa: E402
from hf_models import (  # noqa: E402
    DIVIDES_TWICE,
    VERSION,
    Tokens,
    arguments,
    bert,
    dividing_once,
    gpt2,
    padded,
    parameters_of,
    run_of,
    t5,
)

from batchfit.errors import BatchfitError  # noqa: E402
from batchfit.integrations.transformers import (  # noqa: E402
    BatchfitMixin,
    BatchfitSeq2SeqTrainer,
    BatchfitTrainer,
    Options,
    adapt,
)
from batchfit.integrations.transformers import _check_version as check_version  # noqa: E402

Trainer = transformers.Trainer


class Steps(transformers.TrainerCallback):
    """Notes the steps as they come, and can take memory away at one of them."""

    def __init__(self, *, hog_at: int | None = None, hog_bytes: int = 0) -> None:
        self.steps: list[int] = []
        self._hog_at, self._hog_bytes = hog_at, hog_bytes
        self.hog: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self._hog_at and self.hog is None:
            self.hog = torch.zeros(self._hog_bytes // 8, dtype=torch.float64)


class Forwards:
    """The batch sizes of a model's forwards in training mode with gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.sizes: list[int] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.sizes.append(len(kwargs["input_ids"]))


def trained(folder: Path, model: Any, *, data: Any = None, **more: Any) -> torch.Tensor:
    """What a plain Trainer that never had an OOM makes of it, with each batch whole."""
    given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, **more.pop("given", {})}
    trainer = Trainer(model, arguments(folder, **given), train_dataset=data or Tokens(), **more)
    trainer.train()
    return parameters_of(model)


def needed_bytes(folder: Path, living_bytes: int) -> int:
    """What a whole batch of `gpt2()` takes in training, beside what lives already."""
    model = gpt2()
    with batchfit.virtual_memory("1GiB") as memory:
        given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "max_steps": 2}
        Trainer(model, arguments(folder, **given), train_dataset=Tokens()).train()
    return memory.peak_bytes - living_bytes


# --- a batch that does not fit


@pytest.mark.parametrize("find", [True, False])
def test_a_batch_that_does_not_fit_trains_to_the_same_weights(
    find: bool, tmp_path: Path, living_bytes: int
) -> None:
    expected = trained(tmp_path, gpt2())
    limit = int(needed_bytes(tmp_path, living_bytes) * 0.7)
    model = gpt2()
    trainer = adapt(Trainer(model, arguments(tmp_path), train_dataset=Tokens()), find=find)
    seen = Forwards(model)
    with batchfit.virtual_memory(limit + living_bytes):
        out = trainer.train()
    assert out.global_step == trainer.state.max_steps == 6
    assert torch.allclose(parameters_of(model), expected, atol=1e-12)
    if find:
        assert 1 < trainer.found.batch_size < 16
        assert trainer.state.log_history[0]["microbatch_size"] == trainer.found.batch_size
        assert not any("out_of_memory" in entry for entry in trainer.state.log_history)
    else:
        assert trainer.found is None
        assert trainer.state.log_history[0]["out_of_memory"] >= 1
    assert sum(seen.sizes[-2:]) <= 16
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 4)


class Plain(torch.nn.Module):
    """Anybody's module: no `**kwargs`, so Trainer itself divides by the number of batches accumulated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(6, 4, dtype=torch.float64)

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        logits = self.net(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Unlabelled(Plain):
    """Answers of another name, so that there are no items to count."""

    def forward(self, x: Any = None, answers: Any = None, **more: Any) -> Any:
        return super().forward(x, answers)


class Taking(Plain):
    """A mean, of a model that takes what it is given."""

    def forward(self, x: Any = None, labels: Any = None, **more: Any) -> Any:
        return super().forward(x, labels)


class NotScaled(Trainer):
    loss_is_scaled_for_ga = False


def points(length: int = 48, *, labels: str = "labels") -> list[dict[str, Any]]:
    drawn = torch.randn(length, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [{"x": row, labels: number % 4} for number, row in enumerate(drawn)]


@pytest.mark.parametrize(
    ("make", "kind", "labels"),
    [(Plain, Trainer, "labels"), (Unlabelled, Trainer, "answers"), (Taking, NotScaled, "labels")],
)
def test_a_loss_that_trainer_divides_can_be_searched_for(
    make: Any, kind: Any, labels: str, tmp_path: Path
) -> None:
    whole = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    expected = kind(make(), arguments(tmp_path, **whole), train_dataset=points(labels=labels))
    expected.train()
    trainer = kind(make(), arguments(tmp_path), train_dataset=points(labels=labels))
    adapt(trainer, search={"max_size": 5}).train()
    assert trainer.state.log_history[0]["microbatch_size"] == 5
    assert torch.allclose(parameters_of(trainer.model), parameters_of(expected.model), atol=1e-12)


def test_what_a_user_overrides_runs_and_the_search_leaves_no_trace(tmp_path: Path) -> None:
    class Mine(Trainer):
        losses = 0

        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            Mine.losses += model.training
            return super().compute_loss(model, inputs, **more)

    def masking(samples: list[Any]) -> Any:
        """A collator that draws random numbers of all kinds."""
        batch = padded(samples)
        drawn = torch.rand(batch["input_ids"].shape) < random.random() * numpy.random.rand()
        return {**batch, "input_ids": batch["input_ids"].masked_fill(drawn, 1)}

    def run(find: bool) -> tuple[torch.Tensor, list[Any]]:
        model = gpt2(dropout=0.1)
        args = arguments(tmp_path, logging_strategy="steps", logging_steps=1)
        trainer = Mine(model, args, train_dataset=Tokens(padded=False), data_collator=masking)
        adapt(trainer, find=find)
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert trainer.state.global_step == 6
        return parameters_of(model), logged

    plain, plain_logs = run(False)
    assert Mine.losses == 6
    searched, logs = run(True)
    assert Mine.losses > 6 + 6
    # Dropout masks, the optimizer's and the LR scheduler's state are where they were before the search.
    assert torch.equal(plain, searched)
    assert logs == plain_logs


class Told(transformers.TrainerCallback):
    """What trackers would be sent."""

    def __init__(self) -> None:
        self.rows: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.rows += [logs["rows"]] if "rows" in logs else []


class Telling(Trainer):
    """Logs from within its step, as many do."""

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        self.log({"rows": float(len(inputs["x"]))})
        return super().compute_loss(model, inputs, *given, **named)


@pytest.mark.parametrize("kind", [Plain, Taking])
def test_what_trials_and_looks_at_the_loss_log_reaches_nobody(kind: Any, tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 3}
    reported = Told()
    trainer = Telling(kind(), arguments(tmp_path, **given), train_dataset=points(), callbacks=[reported])
    adapt(trainer, search={"max_size": 8}).train()
    assert trainer.found.batch_size == 8
    assert reported.rows == [8.0] * 6
    assert [entry["rows"] for entry in trainer.state.log_history if "rows" in entry] == [8.0] * 6
    trainer.log({"rows": 1.0})
    assert reported.rows[-1] == 1.0


def test_state_of_the_users_own_is_restored_after_the_search(tmp_path: Path) -> None:
    seen: list[float] = []

    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            if model.training:
                seen.append(float(loss.detach()))
            return loss

    trainer = adapt(Mine(gpt2(), arguments(tmp_path), train_dataset=Tokens()), state=[seen])
    trainer.train()
    assert len(seen) == 6


def test_sizes_are_tried_beside_gradients_as_all_microbatches_but_the_first_run(tmp_path: Path) -> None:
    model = gpt2()
    trainer = adapt(Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=Tokens()))
    seen: list[tuple[int, bool]] = []

    def note(model: Any, args: Any, kwargs: Any) -> None:
        if run_of(trainer).searches:
            has_gradients = all(parameter.grad is not None for parameter in model.parameters())
            seen.append((len(kwargs["input_ids"]), has_gradients))

    model.register_forward_pre_hook(note, with_kwargs=True)
    trainer.train()
    assert {size for size, _ in seen} >= {1, 16}
    assert all(has_gradients == (size < 16) for size, has_gradients in seen)


def test_ragged_batches_are_not_held_to_the_size_of_the_longest(tmp_path: Path, living_bytes: int) -> None:
    data = Tokens(padded=False)
    expected = trained(tmp_path, gpt2(), data=data, data_collator=padded)
    model = gpt2()
    trainer = adapt(Trainer(model, arguments(tmp_path), train_dataset=data, data_collator=padded))
    seen = Forwards(model)
    with batchfit.virtual_memory(int(needed_bytes(tmp_path, living_bytes) * 0.7) + living_bytes):
        trainer.train()
    assert torch.allclose(parameters_of(model), expected, atol=1e-12)
    assert max(seen.sizes[-12:]) <= 16


class OutOfTokens(torch.nn.Module):
    """A model on a device that does not tell what it holds: so many tokens at once, and it is an OOM."""

    def __init__(self, most: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Embedding(64, 4)
        self.most, self.shapes, self.ooms = most, [], 0

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        if input_ids.numel() > self.most:
            self.ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        if torch.is_grad_enabled():
            self.shapes.append(tuple(input_ids.shape))
        logits = self.net(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 4)}


def test_what_was_found_is_used_for_every_width_and_nothing_below_it(tmp_path: Path) -> None:
    data = Tokens(1024, padded=False)
    data.ids = torch.randint(2, 64, (1024, 256), generator=torch.Generator().manual_seed(2))
    lengths = (3.9 + 0.5 * torch.randn(1024, generator=torch.Generator().manual_seed(3))).exp()
    data.lengths = lengths.clamp(16, 256).int().tolist()
    widest = max(data.lengths)
    model = OutOfTokens(12 * widest + 5)
    given = {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 1, "max_steps": 8}
    trainer = adapt(Trainer(model, arguments(tmp_path, **given), train_dataset=data, data_collator=padded))

    class Begins(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            model.shapes.clear()
            model.ooms = 0

    trainer.add_callback(Begins())
    trainer.train()
    assert trainer.found.batch_size == 12
    assert len({width for _, width in model.shapes}) > 3
    assert model.ooms == 0  # 7, where each new width began at 128 and halved
    # A batch of 128 is cut into equal pieces: 11 of 12.
    assert min(size for size, _ in model.shapes) >= 11
    assert max(size for size, _ in model.shapes) > 12


def test_a_second_kind_of_loss_uses_what_was_found_too(tmp_path: Path) -> None:
    run = run_of(adapt(Trainer(gpt2(), arguments(tmp_path), train_dataset=Tokens())))
    trainer, model, batch = Trainer(gpt2(), arguments(tmp_path)), gpt2(), padded(list(Tokens(8)))
    first = run.microbatcher_of(trainer, model, sums=True)
    first.backward(lambda micro: model(**micro).loss, batch)
    assert run.microbatcher_of(trainer, model, sums=False).state_dict() == first.state_dict()


def test_microbatches_by_length(tmp_path: Path) -> None:
    data = Tokens(padded=False)
    expected = trained(tmp_path, gpt2(), data=data, data_collator=padded)
    model = gpt2()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=data, data_collator=padded)
    adapt(trainer, lengths="attention_mask", find=False).train()
    assert torch.allclose(parameters_of(model), expected, atol=1e-10)


class FaultInStep(BatchfitTrainer):
    """An OOM in the second step, at operation `fault`."""

    fault, fired = 60, False

    def training_step(self, *given: Any, **named: Any) -> Any:
        with batchfit.testing.fail_at(self.fault if self.state.global_step == 1 else 10**9) as seen:
            loss = super().training_step(*given, **named)
        self.fired |= seen.fired
        return loss


@pytest.mark.parametrize("fault", [0, 7, 40, 90, 140])
def test_a_fault_at_any_point_of_a_step_changes_nothing(fault: int, tmp_path: Path) -> None:
    expected = trained(tmp_path, gpt2(), given={"max_steps": 3})
    model, how = gpt2(), Options(find=False)
    trainer = FaultInStep(model, arguments(tmp_path, max_steps=3), train_dataset=Tokens(), batchfit=how)
    trainer.fault = fault
    trainer.train()
    assert trainer.fired
    assert torch.allclose(parameters_of(model), expected, atol=1e-12)


@pytest.mark.slow
def test_a_fault_at_every_operation_of_a_step_changes_nothing(tmp_path: Path) -> None:
    given = {"max_steps": 2, "per_device_train_batch_size": 2}
    whole = {**given, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    expected = trained(tmp_path, gpt2(), given=whole)
    fault, fired = 0, True
    while fired:
        model = gpt2()
        trainer = FaultInStep(
            model, arguments(tmp_path, **given), train_dataset=Tokens(), batchfit=Options(find=False)
        )
        trainer.fault = fault
        trainer.train()
        fired = trainer.fired
        assert torch.allclose(parameters_of(model), expected, atol=1e-12), fault
        fault += 1
    assert fault > 100


class FaultInOptimizer(transformers.TrainerCallback):
    """One OOM, at the first operation of the first optimizer step."""

    def __init__(self) -> None:
        self.fired = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._block: Any = batchfit.testing.fail_at(0 if state.global_step == 0 else 10**9)
        self._seen = self._block.__enter__()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._block.__exit__(None, None, None)
        self.fired |= self._seen.fired


def test_running_out_in_the_optimizer_step_leaves_no_half_step(tmp_path: Path) -> None:
    expected = trained(tmp_path, gpt2(), given={"max_steps": 3})
    model, fault = gpt2(), FaultInOptimizer()
    trainer = Trainer(model, arguments(tmp_path, max_steps=3), train_dataset=Tokens(), callbacks=[fault])
    adapt(trainer, find=False).train()
    assert fault.fired
    assert torch.allclose(parameters_of(model), expected, atol=1e-12)


# --- losses, weighted once


def sum_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """As Trainer's documentation has it."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def mean_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """As many write it: the number of items is not looked at."""
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


LOSSES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "the model's, by items": (gpt2, {}, {}),
    "the model's, a mean": (bert, {}, {}),
    "label smoothing": (gpt2, {"label_smoothing_factor": 0.1}, {}),
    "label smoothing of a mean": (bert, {"label_smoothing_factor": 0.1}, {}),
    "compute_loss_func": (gpt2, {}, {"compute_loss_func": sum_loss}),
    "compute_loss_func, a mean": (gpt2, {}, {"compute_loss_func": mean_loss}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_weigh_what_the_loss_divides_by(name: str, tmp_path: Path) -> None:
    make, given, more = LOSSES[name]
    data = Tokens(classes=4 if make is bert else 64)
    expected = trained(tmp_path, make(), data=data, given=given, **more)
    model = make()
    trainer = adapt(Trainer(model, arguments(tmp_path, **given), train_dataset=data, **more))
    run_of(trainer).microbatch_size = 5  # as if it had been found: 16 become 4 x 4
    trainer.train()
    assert torch.allclose(parameters_of(model), expected, atol=1e-11)


class Noisy(Plain):
    """A mean that draws random numbers: Trainer believes that it divides by the number of items."""

    def forward(self, x: Any = None, labels: Any = None, **more: Any) -> Any:
        noise = torch.randn((), dtype=x.dtype)
        loss = torch.nn.functional.cross_entropy(self.net(x), labels)
        return {"loss": loss + noise * 1e-1}  # one that does not change gradients


class Drifting(Plain):
    """A mean that is another one each time, whatever the random numbers are."""

    calls = 0

    def forward(self, x: Any = None, labels: Any = None, **more: Any) -> Any:
        self.calls += 1
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels) + self.calls}


class Dividing(Drifting):
    """As `Drifting`, but it does divide, where it is given by what."""

    def forward(self, x: Any = None, labels: Any = None, num_items_in_batch: Any = None, **more: Any) -> Any:
        self.calls += 1
        total = torch.nn.functional.cross_entropy(self.net(x), labels, reduction="sum")
        return {
            "loss": total / (len(labels) if num_items_in_batch is None else num_items_in_batch) + self.calls
        }


@pytest.mark.parametrize(("make", "warns"), [(Noisy, False), (Drifting, True), (Dividing, True)])
@pytest.mark.parametrize("size", [5, 16])
def test_a_loss_that_is_not_the_same_twice_is_not_taken_for_a_sum(
    make: Any, warns: bool, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}  # whose steps show gradients' sizes
    whole = {**given, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    expected = Trainer(make(), arguments(tmp_path, **whole), train_dataset=points())
    expected.train()
    trainer = adapt(Trainer(make(), arguments(tmp_path, **given), train_dataset=points()))
    run_of(trainer).microbatch_size = size
    with caplog.at_level("WARNING", "batchfit"):
        trainer.train()
    assert torch.allclose(parameters_of(trainer.model), parameters_of(expected.model), atol=1e-12)
    reported = [line for line in caplog.messages if "Set trainer.loss_is_scaled_for_ga" in line]
    assert len(reported) == (warns and size < 16)


@pytest.mark.parametrize("find", [True, False])
def test_trying_a_loss_leaves_no_trace(find: bool, tmp_path: Path) -> None:
    class Mine(Trainer):
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            self.seen.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
            return loss

    seen: list[list[Any]] = []
    for ours in (False, True):
        whole = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
        trainer = Mine(Taking(), arguments(tmp_path, **whole), train_dataset=points())
        trainer.seen = []
        if ours:
            adapt(trainer, find=find, state=[trainer.seen])
        trainer.train()
        seen.append(trainer.seen)
    assert len(seen[0]) == 6
    assert seen[1] == seen[0]


def test_a_weight_of_the_users_own(tmp_path: Path) -> None:
    class Halves(Trainer):
        """A mean over samples of what the model says of its first token."""

        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            logits = model(inputs["input_ids"]).logits[:, 0]
            return torch.nn.functional.cross_entropy(logits, inputs["input_ids"][:, 1])

    whole = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    expected = Halves(gpt2(), arguments(tmp_path, **whole), train_dataset=Tokens())
    expected.train()
    trainer = adapt(
        Halves(gpt2(), arguments(tmp_path), train_dataset=Tokens()), weight=lambda m: len(m["labels"])
    )
    run_of(trainer).microbatch_size = 5
    trainer.train()
    assert torch.allclose(parameters_of(trainer.model), parameters_of(expected.model), atol=1e-11)


def test_batches_of_both_kinds_in_one_run(tmp_path: Path) -> None:
    """Some with labels, whose losses add up, and some without, whose losses are means of samples."""

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
            if "labels" in inputs:
                return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch, **more)
            assert num_items_in_batch is None
            return model(inputs["input_ids"], labels=inputs["input_ids"]).loss

    def some(samples: list[Any]) -> Any:
        batch = padded(samples)
        if int(batch["input_ids"].sum()) % 2:
            del batch["labels"]
        return batch

    weights = []
    for ours, given in (
        (False, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}),
        (True, {}),
    ):
        trainer = Own(gpt2(), arguments(tmp_path, **given), train_dataset=Tokens(), data_collator=some)
        if ours:
            run_of(adapt(trainer)).microbatch_size = 5
        trainer.train()
        weights.append(parameters_of(trainer.model))
    assert torch.allclose(*weights, atol=1e-11)


def test_a_batch_without_labels_counts_by_samples(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
            assert num_items_in_batch is None
            ids = inputs["input_ids"]
            return model(ids, labels=ids).loss

    class Unlabelled(Tokens):
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": super().__getitem__(index)["input_ids"]}

    weights = []
    for ours, given in (
        (False, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}),
        (True, {}),
    ):
        trainer = Own(gpt2(), arguments(tmp_path, **given), train_dataset=Unlabelled())
        if ours:
            run_of(adapt(trainer)).microbatch_size = 5
        trainer.train()
        weights.append(parameters_of(trainer.model))
    assert torch.allclose(*weights, atol=1e-11)


def test_low_precision_goes_through_the_same_step(tmp_path: Path) -> None:
    model = gpt2().float()
    expected = trained(tmp_path, gpt2().float(), given={"bf16": True})
    adapt(Trainer(model, arguments(tmp_path, bf16=True), train_dataset=Tokens())).train()
    assert torch.equal(parameters_of(model), expected)


def test_a_scaler_is_used_as_the_trainer_uses_it(tmp_path: Path) -> None:
    """fp16 on a GPU: an overflow skips the step, on the way of a guarded optimizer too."""

    class Scaled(Trainer):
        """A scaler that needs no GPU."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def run(ours: bool) -> tuple[torch.Tensor, float]:
        # SGD: Adam makes steps of one size from gradients that are nothing but rounding.
        args = arguments(tmp_path, max_grad_norm=0.0, optim="sgd")
        trainer = Scaled(gpt2().float(), args, train_dataset=Tokens())
        if ours:
            adapt(trainer)
        trainer.train()
        return parameters_of(trainer.model), trainer.accelerator.scaler.get_scale()

    with dividing_once():
        plain, plain_scale = run(False)
    weights, scale = run(True)
    assert scale == plain_scale < 2.0**127  # it overflowed, as often
    assert torch.allclose(weights, plain, atol=1e-5)


def test_the_search_can_be_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a search begins with what a trace says: the Trainer's step must be one that can be traced."""
    reported: list[int] = []
    find = batchfit.find_batch_size

    def spy(work: Any, **keywords: Any) -> Any:
        reported.append(batchfit.predict_batch_size(work, budget="100MiB").batch_size)
        return find(work, **keywords)

    monkeypatch.setattr(batchfit, "find_batch_size", spy)
    adapt(Trainer(gpt2().float(), arguments(tmp_path, bf16=True), train_dataset=Tokens())).train()
    assert reported[0] > 16


class Stream(torch.utils.data.IterableDataset[Any]):
    """The samples in order; with `reads_once` it goes on where it was."""

    def __init__(self, *, reads_once: bool = False) -> None:
        data = Tokens()
        self.samples = [data[index] for index in range(len(data))]
        self.once = iter(self.samples) if reads_once else None

    def __iter__(self) -> Any:
        return iter(self.samples) if self.once is None else self.once


@pytest.mark.parametrize("reads_once", [False, True])
def test_an_iterable_dataset_is_searched_by_its_first_samples_and_none_is_lost(
    tmp_path: Path, reads_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # One epoch: all that a stream that is read once can give.
    given = {"max_steps": 3, "num_train_epochs": 1}
    expected = trained(tmp_path, gpt2(), data=Stream(), given=given)
    how = Options(stream_samples=20)
    data = Stream(reads_once=reads_once)
    trainer = FaultInStep(gpt2(), arguments(tmp_path, **given), train_dataset=data, batchfit=how)
    with caplog.at_level("INFO", logger="batchfit"):
        trainer.train()
    assert trainer.fired
    assert torch.allclose(parameters_of(trainer.model), expected, atol=1e-12)
    logged = " ".join(record.getMessage() for record in caplog.records)
    if reads_once:
        assert trainer.found is None
        assert "no search before training, sizes are learned: make_batch must be a dataset" in logged
    else:
        assert trainer.found.made_of == "the longest of the first 20 samples of Stream"
        assert "with the longest of the first 20 samples of Stream" in logged


def test_a_stream_that_raises_or_is_empty_ends_before_training(tmp_path: Path) -> None:
    class Broken(Stream):
        def __iter__(self) -> Any:
            yield self.samples[0]
            raise OSError("connection reset")

    trainer = BatchfitTrainer(gpt2(), arguments(tmp_path, max_steps=3), train_dataset=Broken())
    with pytest.raises(OSError, match="connection reset") as caught:
        trainer.train()
    assert caught.value.__notes__[0] == "batchfit: raised by sample 1 of Broken, read ahead for trials"
    empty = Stream()
    empty.samples = []
    trainer = BatchfitTrainer(gpt2(), arguments(tmp_path, max_steps=3), train_dataset=empty)
    with pytest.raises(ValueError, match=r"must give at least one sample, and this Stream gave none"):
        trainer.train()
    with pytest.raises(ValueError, match="stream_samples must be a positive integer, not 0"):
        Options(stream_samples=0)


# --- loaders of the users' own


class Loading(Trainer):
    """Loads as `how` says, and notes what a step has in it."""

    how: Any = None

    def get_train_dataloader(self) -> Any:
        return self.how(self)

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        self.seen.append(inputs["x"])
        return super().compute_loss(model, inputs, **more)


def loading(folder: Path, how: Any, **given: Any) -> Any:
    trainer = Loading(Plain(), arguments(folder, **given), train_dataset=points())
    trainer.how, trainer.seen = how, []
    return trainer


def loader_of(trainer: Any, **how: Any) -> Any:
    return torch.utils.data.DataLoader(trainer.train_dataset, collate_fn=trainer.data_collator, **how)


def prepared_by_accelerate(trainer: Any) -> Any:
    return trainer.accelerator.prepare(loader_of(trainer, batch_size=trainer.args.train_batch_size))


class Twos(torch.utils.data.Sampler[Any]):
    """Batches of two, which it does not say."""

    def __iter__(self) -> Any:
        return iter([[number, number + 1] for number in range(0, 48, 2)])

    def __len__(self) -> int:
        return 24


def test_a_loader_of_another_size_does_not_change_the_batch_of_a_step(tmp_path: Path) -> None:
    own = r"makes batches of 8, not of per_device.* = 4 \* 4 = 16: .*batch_size=self\.args\.train_batch_size"
    with pytest.raises(BatchfitError, match=own):
        adapt(loading(tmp_path, lambda trainer: loader_of(trainer, batch_size=8)), find=False).train()
    trainer = adapt(loading(tmp_path, lambda trainer: loader_of(trainer, batch_sampler=Twos())), find=False)
    with pytest.raises(
        BatchfitError, match=r"get_train_dataloader's DataLoader cannot be read.* 4 \* 4 = 16"
    ):
        trainer.train()
    args = trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 4)
    assert trainer.seen == []


@pytest.mark.parametrize(
    ("how", "given", "size"),
    [
        (lambda trainer: loader_of(trainer, batch_size=trainer.args.train_batch_size), {}, 16),
        (lambda trainer: loader_of(trainer, batch_size=trainer._train_batch_size), {}, 16),
        (prepared_by_accelerate, {}, 16),
        (lambda trainer: loader_of(trainer, batch_size=8), {"gradient_accumulation_steps": 1}, 8),
        (lambda trainer: loader_of(trainer, batch_sampler=Twos()), {"gradient_accumulation_steps": 1}, 2),
    ],
)
def test_a_loader_of_the_users_own_is_trained_with(
    how: Any, given: dict[str, Any], size: int, tmp_path: Path
) -> None:
    trainer = adapt(loading(tmp_path, how, num_train_epochs=1, **given))
    trainer.train()
    steps = 48 // size
    assert trainer.state.global_step == steps
    assert [len(one) for one in trainer.seen[-steps:]] == [size] * steps
    assert trainer.found.batch_size == max(size, 4 if size == 2 else 0)  # which does not say that it is 2


def test_a_schedule_loads_what_the_users_loader_would(tmp_path: Path) -> None:
    """A sampler that draws one sample of four, a collator and a last batch of its own."""
    drawn = [number for number in range(48) if number % 4 == 3]

    class Drawing(torch.utils.data.Sampler[Any]):
        def __iter__(self) -> Any:
            return iter([*drawn, *drawn[:6]])

        def __len__(self) -> int:
            return 18

    def collated(samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "x": batch["x"] * 2}

    for prepare in (False, True):

        def how(trainer: Any, prepare: bool = prepare) -> Any:
            loader = torch.utils.data.DataLoader(
                trainer.train_dataset, 4, sampler=Drawing(), collate_fn=collated, drop_last=True
            )
            return trainer.accelerator.prepare(loader) if prepare else loader

        trainer = adapt(loading(tmp_path, how, num_train_epochs=1), schedule="0:4 2:8 step", find=False)
        trainer.train()
        assert [len(one) for one in trainer.seen] == [4, 4, 8]
        assert trainer.state.global_step == trainer.state.max_steps == 3
        expected = [points()[number]["x"] * 2 for number in [*drawn, *drawn[:4]]]
        assert torch.equal(torch.cat(trainer.seen), torch.stack(expected))


def test_a_loader_that_a_schedule_cannot_follow_is_refused(tmp_path: Path) -> None:
    class Doubling(torch.utils.data.DataLoader[Any]):
        def __iter__(self) -> Any:
            return ({**batch, "x": batch["x"] * 2} for batch in super().__iter__())

    def doubling(trainer: Any) -> Any:
        return Doubling(trainer.train_dataset, 4, collate_fn=trainer.data_collator)

    def refused(how: Any, text: str) -> None:
        trainer = adapt(loading(tmp_path, how), schedule="0:4 2:8 step", find=False)
        with pytest.raises(BatchfitError, match=text):
            trainer.train()
        assert trainer.seen == []

    refused(doubling, "not Doubling, which has an __iter__ of its own")
    refused(lambda trainer: loader_of(trainer, batch_sampler=Twos()), "not with Twos: it makes batches")
    refused(
        lambda trainer: trainer.accelerator.prepare(loader_of(trainer, batch_sampler=Twos())), "not with Twos"
    )


STRATEGIES = ["random", "sequential", "group_by_length", "batch_rebalance"]
HAS_NO_STRATEGY = not hasattr(transformers.TrainingArguments, "train_sampling_strategy")  # before 5.2


@pytest.mark.parametrize("strategy", STRATEGIES[::2] if HAS_NO_STRATEGY else STRATEGIES)
def test_trainers_own_loaders_are_read(strategy: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"train_sampling_strategy": strategy}
    if HAS_NO_STRATEGY:
        given = {"group_by_length": strategy == "group_by_length"}
    args = arguments(tmp_path, num_train_epochs=1, **given)
    trainer = adapt(Trainer(gpt2(), args, train_dataset=Tokens()), find=False)
    seen = Forwards(trainer.model)
    trainer.train()
    assert seen.sizes == [16, 16, 16]


# --- schedules and checkpoints


def sizes_of(trainer: Any) -> list[tuple[int, int]]:
    return [
        (entry["step"], entry["batch_size"]) for entry in trainer.state.log_history if "batch_size" in entry
    ]


SCHEDULES: dict[str, tuple[Any, list[tuple[int, int]], int]] = {
    "steps": ("0:8 3:16 step", [(0, 8), (3, 16)], 3 + 2 + 3),
    "steps of the second epoch": ("0:8 8:16 step", [(0, 8), (8, 16)], 6 + 2 + 2),
    "epochs": (batchfit.StepBatchSizeConfig(step_size=1, gamma=2), [(0, 16), (3, 32)], 3 + 2),
    "samples": ("0:8 24:16 48:32 samples", [(0, 8), (3, 16), (5, 32)], 3 + 2 + 2),
    "a second epoch of more batches": ("0:16 1:8", [(0, 16), (3, 8)], 3 + 6),
    "more batches by steps": ("0:16 3:8 step", [(0, 16), (3, 8)], 3 + 6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_batch_follows_a_schedule_and_every_sample_is_seen_once_an_epoch(
    name: str, tmp_path: Path
) -> None:
    schedule, expected, steps = SCHEDULES[name]
    seen: list[int] = []

    class Noting(Tokens):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    trainer = adapt(
        Trainer(gpt2(), arguments(tmp_path), train_dataset=Noting()), schedule=schedule, find=False
    )
    trainer.train()
    assert sizes_of(trainer) == expected
    assert trainer.state.global_step == trainer.state.max_steps == steps
    assert trainer.state.epoch == 2.0
    assert sorted(seen) == sorted([*range(48), *range(48)])
    assert seen[:48] != seen[48:]  # and in another order


@pytest.mark.parametrize(
    ("given", "steps", "epochs"),
    [({"max_steps": 11}, 11, 3), ({"max_steps": 5}, 5, 1), ({"num_train_epochs": 1.5}, 7, 2)],
)
def test_a_schedule_gives_the_number_of_steps_or_of_epochs(
    given: dict[str, Any], steps: int, epochs: int, tmp_path: Path
) -> None:
    trainer = Trainer(gpt2(), arguments(tmp_path, **given), train_dataset=Tokens())
    adapt(trainer, schedule="0:8 3:16 step", find=False).train()
    assert trainer.state.global_step == trainer.state.max_steps == steps
    assert trainer.state.num_train_epochs == epochs


def test_the_learning_rate_follows_and_is_logged(tmp_path: Path) -> None:
    given = {"logging_strategy": "steps", "logging_steps": 1, "lr_scheduler_type": "constant"}
    trainer = Trainer(gpt2(), arguments(tmp_path, **given), train_dataset=Tokens())
    adapt(trainer, schedule="0:8 3:32 step", lr="sqrt", find=False).train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.01] * 3 + [0.02] * (len(rates) - 3))
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.01, 0.01]  # taken out again


@pytest.mark.parametrize("schedule", [None, "0:8 3:16 step", "0:16 1:8"])
@pytest.mark.parametrize("stop", some_slow([2, 3, 4, 5, 6, 8], is_slow=lambda stop: stop in (2, 5, 6)))
def test_a_run_that_goes_on_from_a_checkpoint_is_one_that_was_never_stopped(
    schedule: str | None, stop: int, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"schedule": schedule, "lr": None if schedule is None else "linear", "find": False}
    given = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}

    def plain(folder: str) -> Any:
        return Trainer(gpt2(dropout=0.1), arguments(tmp_path / folder, **given), train_dataset=Tokens())

    def resumed(trainer: Any, folder: str) -> Any:
        trainer.train(resume_from_checkpoint=str(tmp_path / folder / f"checkpoint-{stop}"))
        return trainer

    def equal(one: Any, other: Any) -> bool:
        return torch.equal(parameters_of(one.model), parameters_of(other.model))

    whole = adapt(plain("whole"), **how)
    whole.train()
    again = resumed(adapt(plain("resumed"), **how), "whole")
    assert again.state.global_step == whole.state.global_step
    assert again.state.epoch == whole.state.epoch
    if schedule is None and not equal(again, whole):
        never = plain("never stopped")
        never.train()
        if not equal(resumed(plain("plain"), "never stopped"), never):
            pytest.skip(
                "a plain Trainer beside this Accelerate differs after a checkpoint, too (seen with 1.10)"
            )
    assert equal(again, whole)


@pytest.mark.skipif(
    not hasattr(Trainer, "_prepare_for_training"), reason="transformers before 5.3 starts its clock before"
)
def test_the_time_of_the_search_is_not_in_train_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = importlib.import_module("batchfit.integrations.transformers.trainer")
    monkeypatch.setattr(overrides, "find_microbatch", lambda *given: time.sleep(5))
    trainer = adapt(Trainer(Plain(), arguments(tmp_path, max_steps=1), train_dataset=points()))
    assert trainer.train().metrics["train_runtime"] < 4


@pytest.mark.parametrize("length", [44, 45, 48])
def test_epochs_are_counted_as_the_trainer_counts_them(length: int, tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_train_epochs": 2}
    given |= {"max_steps": -1, "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}

    def epochs_of(trainer: Any) -> list[float]:
        return [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]

    plain = Trainer(Plain(), arguments(tmp_path / "plain", **given), train_dataset=points(length))
    plain.train()
    ours = adapt(Trainer(Plain(), arguments(tmp_path / "ours", **given), train_dataset=points(length)))
    ours.train()
    assert epochs_of(ours) == pytest.approx(epochs_of(plain), abs=1e-9)
    resumed = adapt(Trainer(Plain(), arguments(tmp_path / "ours", **given), train_dataset=points(length)))
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert epochs_of(resumed) == pytest.approx(epochs_of(plain), abs=1e-9)


def test_a_plain_trainer_goes_on_from_our_checkpoint_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    for module in (transformers.trainer, transformers.trainer_utils):  # one of them compares sizes
        if hasattr(module, "logger"):
            monkeypatch.setattr(
                module.logger, "warning_once", lambda text, *more, **named: warned.append(str(text))
            )
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 4}
    given |= {"save_strategy": "steps", "save_steps": 2, "logging_steps": 2}

    def make() -> Any:
        return Trainer(Plain(), arguments(tmp_path, **given), train_dataset=points())

    trainer = adapt(make())
    trainer.train()
    expected = parameters_of(trainer.model)
    for wrap in (lambda plain: plain, adapt):
        with dividing_once() if wrap is not adapt else nullcontext():
            again = wrap(make())
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert again.state.train_batch_size == 4
        assert (parameters_of(again.model) - expected).abs().max() < 1e-12
    assert [text for text in warned if "train_batch_size" in text] == []


def test_what_was_found_is_not_searched_for_again(tmp_path: Path, living_bytes: int) -> None:
    limit = int(needed_bytes(tmp_path, living_bytes) * 0.7) + living_bytes
    given = {"save_strategy": "steps", "save_steps": 2}
    first = adapt(Trainer(gpt2(), arguments(tmp_path, **given), train_dataset=Tokens()))
    with batchfit.virtual_memory(limit):
        first.train()
    second = adapt(Trainer(gpt2(), arguments(tmp_path, **given), train_dataset=Tokens()))
    seen = Forwards(second.model)
    with batchfit.virtual_memory(limit * 2):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert second.found is None
    kept = torch.load(tmp_path / "checkpoint-4" / "training_args.bin", weights_only=False)
    assert (kept.per_device_train_batch_size, kept.gradient_accumulation_steps) == (4, 4)
    assert max(seen.sizes) <= first.found.batch_size
    # In the middle of an epoch Accelerate 1.10 goes on with other samples, also without adapt (0.005 apart).
    if not importlib.import_module("accelerate").__version__.startswith("1.10."):
        assert torch.allclose(parameters_of(second.model), parameters_of(first.model), atol=1e-12)


def test_a_checkpoint_of_another_batch_size_or_without_a_schedule_is_refused(tmp_path: Path) -> None:
    given = {"save_strategy": "steps", "save_steps": 2}
    data, place = Tokens(), str(tmp_path / "checkpoint-2")
    adapt(Trainer(gpt2(), arguments(tmp_path, **given), train_dataset=data), find=False).train()
    other = Trainer(gpt2(), arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=data)
    with pytest.raises(ValueError, match=r"must be 16, as in the checkpoint, not 8: .*ignore_data_skip"):
        adapt(other, find=False).train(resume_from_checkpoint=place)
    with pytest.raises(BatchfitError, match="was made without a schedule"):
        adapt(other, find=False, schedule="0:8 3:16 step").train(resume_from_checkpoint=place)
    (tmp_path / "checkpoint-2" / "batchfit.pt").unlink()
    with pytest.raises(BatchfitError, match="is missing"):
        adapt(other, find=False, schedule="0:8 3:16 step").train(resume_from_checkpoint=place)
    adapt(other, find=False).train(resume_from_checkpoint=place)  # theirs, as plain as it was


# --- evaluation


class FaultInPrediction(BatchfitTrainer):
    """An OOM in the second batch, inside of the model: the first one probes the loss, too."""

    fired, batches = False, 0

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        self.batches += 1
        with batchfit.testing.fail_at(40 if self.batches == 2 else 10**9) as seen:
            found = super().prediction_step(*given, **named)
        self.fired |= seen.fired
        return found


@pytest.mark.parametrize("make", [gpt2, bert])
def test_evaluation_that_does_not_fit_counts_nothing_twice(
    make: Any, tmp_path: Path, living_bytes: int
) -> None:
    data = Tokens(30, classes=4 if make is bert else 64)
    given = {"per_device_eval_batch_size": 12}
    plain = Trainer(make(), arguments(tmp_path, **given), eval_dataset=data)
    expected = plain.predict(data)
    del plain
    with batchfit.virtual_memory("1GiB") as memory:
        trainer = Trainer(make(), arguments(tmp_path, **given, prediction_loss_only=True), eval_dataset=data)
        trainer.evaluate()
    held = memory.peak_bytes
    adapt(trainer)
    with batchfit.virtual_memory(int(living_bytes + (held - living_bytes) * 0.8)):
        metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)
    ours = FaultInPrediction(make(), arguments(tmp_path, **given))
    found = ours.predict(data)
    assert ours.fired
    assert abs(found.predictions - expected.predictions).max() < 1e-12
    assert (found.label_ids == expected.label_ids).all()
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)


class Sided(Plain):
    """Returns single values beside its rows, as routers do, and has an OOM beyond some samples."""

    most = 10**9

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        found = super().forward(x, labels)
        logits = found["logits"]
        return {**found, "aux": logits.mean(), "more": (logits * 2, {"rows": logits[:, 0]}, x.sum() * 0)}


def test_single_values_of_an_evaluation_in_microbatches_are_those_of_the_batch(tmp_path: Path) -> None:
    data, given = points(30), {"per_device_eval_batch_size": 12}
    expected = Trainer(Sided(), arguments(tmp_path, **given)).predict(data)
    ours = BatchfitTrainer(Sided(), arguments(tmp_path, **given))
    ours.model.most = 5
    found = ours.predict(data)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-12)
    logits, aux, (twice, named, zero) = expected.predictions
    assert aux.shape == zero.shape == (3,)  # one for each of the loader's batches
    assert numpy.allclose(found.predictions[0], logits, rtol=0, atol=1e-12)
    assert numpy.allclose(found.predictions[1], aux, rtol=0, atol=1e-12)
    assert numpy.allclose(found.predictions[2][0], twice, rtol=0, atol=1e-12)
    assert numpy.allclose(found.predictions[2][1]["rows"], named["rows"], rtol=0, atol=1e-12)
    assert (found.predictions[2][2] == zero).all()


def test_the_model_of_an_earlier_training_is_let_go(tmp_path: Path) -> None:
    made: list[Any] = []
    alive: list[int] = []

    def init() -> Any:
        model = Plain()
        made.append(weakref.ref(model))
        return model

    class Counting(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            gc.collect()
            alive.append(sum(one() is not None for one in made))

    trainer = Trainer(
        args=arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1),
        model_init=init,
        train_dataset=points(),
        eval_dataset=points(8),
        callbacks=[Counting()],
    )
    adapt(trainer)
    for _ in range(3):
        trainer.train()
    assert alive == [1, 1, 1]


def test_generation_that_is_out_of_memory_is_retried_in_microbatches(tmp_path: Path) -> None:
    data = Tokens(10)
    given = {"per_device_eval_batch_size": 10, "predict_with_generate": True, "generation_max_length": 9}
    plain = transformers.Seq2SeqTrainer(t5(), arguments(tmp_path, seq2seq=True, **given))
    expected = plain.predict(data)
    ours = BatchfitSeq2SeqTrainer(t5(), arguments(tmp_path, seq2seq=True, **given))
    with batchfit.testing.fail_at(300) as seen:
        found = ours.predict(data)
    assert seen.fired
    assert (found.predictions == expected.predictions).all()
    assert (found.label_ids == expected.label_ids).all()
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


# --- complaints: shown without us on the pinned version, gone with us


def test_complaint_a_late_out_of_memory_begins_again_at_step_0(tmp_path: Path, living_bytes: int) -> None:
    """sentence-transformers #3145: auto_find_batch_size resets the step, keeps the weights, says nothing."""
    need_bytes = needed_bytes(tmp_path, living_bytes)
    given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    expected = trained(tmp_path, gpt2())

    def run(ours: bool) -> tuple[list[int], torch.Tensor, Any]:
        steps = Steps(hog_at=4, hog_bytes=int(need_bytes * 0.3))
        more = {} if ours else {"auto_find_batch_size": True}
        trainer = Trainer(
            gpt2(), arguments(tmp_path, **given, **more), train_dataset=Tokens(), callbacks=[steps]
        )
        if ours:
            adapt(trainer, find=False)
        with batchfit.virtual_memory(int(need_bytes * 1.2) + living_bytes):
            trainer.train()
        return steps.steps, parameters_of(trainer.model), trainer

    steps, weights, _ = run(ours=False)
    assert steps[:5] == [1, 2, 3, 4, 1]  # the same weights are trained from the first step on again
    assert not torch.allclose(weights, expected, atol=1e-4)
    steps, weights, trainer = run(ours=True)
    assert steps == [1, 2, 3, 4, 5, 6]
    assert torch.allclose(weights, expected, atol=1e-12)
    assert trainer.state.log_history[0]["out_of_memory"] >= 1  # and it is said


def test_complaint_the_batch_becomes_another_one(tmp_path: Path, living_bytes: int) -> None:
    """EuroEval #69, silnlp #371: the size shrinks, gradient_accumulation_steps does not follow."""
    limit = int(needed_bytes(tmp_path, living_bytes) * 0.8) + living_bytes
    given = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "max_steps": 1}

    def samples_a_step(ours: bool) -> int:
        model = gpt2()
        more = {} if ours else {"auto_find_batch_size": True}
        trainer = Trainer(model, arguments(tmp_path, **given, **more), train_dataset=Tokens())
        if ours:
            adapt(trainer)
        seen = Forwards(model)
        trainer.add_callback(_Clear(seen))
        with batchfit.virtual_memory(limit):
            trainer.train()
        return sum(seen.sizes)

    assert samples_a_step(ours=False) < 32
    assert samples_a_step(ours=True) == 32


class _Clear(transformers.TrainerCallback):
    def __init__(self, seen: Forwards) -> None:
        self._seen = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._seen.sizes.clear()


def test_complaint_it_never_grows(tmp_path: Path) -> None:
    """`auto_find_batch_size` keeps small forwards where all of the batch fits at once."""

    def forwards(ours: bool) -> list[int]:
        model = gpt2()
        more = {} if ours else {"auto_find_batch_size": True}
        trainer = Trainer(model, arguments(tmp_path, max_steps=1, **more), train_dataset=Tokens())
        if ours:
            adapt(trainer)
        seen = Forwards(model)
        trainer.add_callback(_Clear(seen))
        trainer.train()
        return seen.sizes

    assert forwards(ours=False) == [4, 4, 4, 4]
    assert forwards(ours=True) == [16]


def test_complaint_an_evaluation_that_does_not_fit_ends_the_run(tmp_path: Path, living_bytes: int) -> None:
    """transformers #32215."""
    limit = int(needed_bytes(tmp_path, living_bytes) * 1.1) + living_bytes
    given = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 48,
             "prediction_loss_only": True}  # fmt: skip

    def new(**more: Any) -> Any:
        return Trainer(
            gpt2(), arguments(tmp_path, **given, **more), train_dataset=Tokens(), eval_dataset=Tokens()
        )

    with (
        batchfit.virtual_memory(limit),
        pytest.raises(RuntimeError, match=r"reduce `per_device_eval_batch_size`|reached zero"),
    ):
        new(auto_find_batch_size=True).train()
    trainer = adapt(new())
    with batchfit.virtual_memory(limit):
        trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2
    plain = Trainer(trainer.model, arguments(tmp_path, **given), eval_dataset=Tokens())
    assert losses[1] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


def gradient_norms(folder: Path, make: Any, data: Any) -> dict[str, float]:
    """Norms of the first step: of the whole batch, of a plain Trainer's accumulation, and of ours."""
    norms = {}
    # A norm is clipped at none that occurs: without any, transformers 4.57 logs no grad_norm.
    given = {"max_steps": 1, "logging_strategy": "steps", "logging_steps": 1, "max_grad_norm": 1e9}
    for name, more, ours in (
        ("whole", {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}, False),
        ("accumulated", {}, False),
        ("ours", {}, True),
    ):
        trainer = Trainer(make(), arguments(folder, **given, **more), train_dataset=data)
        if ours:
            run_of(adapt(trainer)).microbatch_size = 4
        trainer.train()
        norms[name] = next(entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
    return norms


def test_complaint_means_are_added_up_in_accumulation(tmp_path: Path) -> None:
    """Still so in 5.23 for models whose forward has **kwargs and whose loss is a mean (TRL #2175's family).

    Upstream has fixed it for losses that divide by num_items_in_batch (#34191), label smoothing too.
    """
    norms = gradient_norms(tmp_path, bert, Tokens(16, classes=4))
    # transformers 4.57 does not give this model the number of items, and 5.2.0 to 5.5.3 divide twice: a mean
    # of means that do not count alike.
    assert norms["accumulated"] > (1.02 if VERSION < (5,) or DIVIDES_TWICE else 3) * norms["whole"]
    assert norms["ours"] == pytest.approx(norms["whole"], rel=1e-9)


@pytest.mark.parametrize(("make", "data"), [(gpt2, Tokens(16)), (Plain, points(16))], ids=["sum", "mean"])
def test_accumulation_that_divides_a_loss_twice_is_not_ours(make: Any, data: Any, tmp_path: Path) -> None:
    """A plain Trainer of transformers 5.2.0 to 5.5.3 makes gradients a quarter of the whole batch's."""
    norms = gradient_norms(tmp_path, make, data)
    expected = norms["whole"] / (4 if DIVIDES_TWICE else 1)
    assert norms["accumulated"] == pytest.approx(expected, rel=1e-9)
    assert norms["ours"] == pytest.approx(norms["whole"], rel=1e-9)


def test_complaint_a_resumed_run_with_another_size_repeats_samples(tmp_path: Path) -> None:
    """transformers #25956: Trainer counts batches, not samples. Ours refuses, or follows a schedule."""
    seen: list[int] = []

    class Noting(Tokens):
        def __getitem__(self, index: int) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    given = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 1}
    Trainer(gpt2(), arguments(tmp_path, **given), train_dataset=Noting()).train()
    trained_on = set(seen[:32])
    seen.clear()
    half = {**given, "gradient_accumulation_steps": 2}
    Trainer(gpt2(), arguments(tmp_path, **half), train_dataset=Noting()).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-2")
    )
    assert set(seen) & trained_on  # samples of the first two steps come again in the same epoch


# --- what is refused, and how


def test_the_ready_classes_are_the_mixin_over_theirs(tmp_path: Path) -> None:
    assert BatchfitTrainer.__mro__[1:3] == (BatchfitMixin, Trainer)
    trainer = adapt(Trainer(gpt2(), arguments(tmp_path), train_dataset=Tokens()), find=False)
    again = adapt(trainer, budget="1GiB")
    assert again is trainer
    assert isinstance(trainer, BatchfitMixin)
    assert type(trainer).__mro__[1:3] == (BatchfitMixin, Trainer)
    assert run_of(trainer).options == Options(budget="1GiB")


def test_settings_that_contradict_ours_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def new(**more: Any) -> Any:
        return Trainer(gpt2(), arguments(tmp_path, **more), train_dataset=Tokens())

    with pytest.raises(ValueError, match="auto_find_batch_size must be False with batchfit"):
        adapt(new(auto_find_batch_size=True))
    with pytest.raises(ValueError, match="auto_find_batch_size must be False"):
        BatchfitTrainer(gpt2(), arguments(tmp_path, auto_find_batch_size=True), train_dataset=Tokens())
    if not HAS_NO_STRATEGY:
        with pytest.raises(ValueError, match=r"batch_rebalance.*schedule="):
            adapt(new(train_sampling_strategy="batch_rebalance"), schedule="0:8 3:16 step")
    trainer = new()
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    with pytest.raises(BatchfitError, match=r"find -- deepspeed train.py --per_device_train_batch_size {}"):
        adapt(trainer)
    trainer = new()
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(BatchfitError, match=r'Use FSDP2, where it can: fsdp_config={"fsdp_version": 2}'):
        adapt(trainer)  # FSDP1
    plugin = SimpleNamespace(fsdp_version=2, cpu_offload=type("CPUOffloadPolicy", (), {})())
    monkeypatch.setattr(trainer.accelerator, "state", SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(BatchfitError, match="Set cpu_offload to False in fsdp_config"):
        adapt(trainer)
    trainer.__class__ = type("KTOTrainer", (Trainer,), {"__module__": "trl"})
    with pytest.raises(BatchfitError, match="how many forwards a microbatch of KTOTrainer has"):
        adapt(trainer)
    trainer = adapt(new(), find=False)
    trainer.args.auto_find_batch_size = True  # set later
    with pytest.raises(ValueError, match="auto_find_batch_size must be False"):
        trainer.train()
    trainer = new()
    trainer.args._n_gpu = 2
    with pytest.raises(BatchfitError, match="DataParallel over 2 GPUs"):
        adapt(trainer)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"find": "yes"}, TypeError, "find must be True or False, not 'yes'"),
        ({"weight": 3}, TypeError, "weight must be a callable"),
        ({"sync": "fast"}, ValueError, "sync must be one of 'safe', 'overlap', not 'fast'"),
        ({"search": 3}, TypeError, "search must be keywords of find_batch_size, not 3"),
        ({"lr": "sqrt"}, ValueError, "lr must be None without a schedule"),
        ({"schedule": batchfit.NoiseBatchSizeConfig()}, ValueError, "schedule must be known ahead"),
        ({"schedule": "0:x"}, ValueError, "not"),
        ({"budget": "lots"}, ValueError, "budget must be bytes or text .* not 'lots'"),
        ({"budget": -1}, ValueError, "budget must be positive, not -1"),
        ({"search": {"sok_steps": 1}}, ValueError, "search must hold keywords .* not 'sok_steps'"),
        ({"schedule": "0:8 3:16 step", "lr": "cubic"}, ValueError, "lr must be 'none', .* not 'cubic'"),
        ({"schedule": "0:8 3:16 step", "lr": ["sqrt", 3]}, ValueError, "lr must be 'none', .* not 3"),
        ({"lengths": 5}, TypeError, "lengths must be the name .* not 5"),
        ({"state": 5}, TypeError, "state must be a list of what a step changes, not 5"),
        ({"state": [5]}, TypeError, "state must hold modules, .* not 5"),
        ({"tokens_per_sample": -3}, ValueError, "tokens_per_sample must be a positive integer, not -3"),
    ],
)
def test_wrong_options_are_reported_when_they_are_given(wrong: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Options(**wrong)


def test_right_options_are_taken() -> None:
    Options(budget="900TiB", search={"soak_steps": 2}, lengths="attention_mask", state=[[], gpt2()])
    Options(schedule="0:8 3:16 step", lr=["sqrt", "power(0.6)"], tokens_per_sample=4)


class Summing(Plain):
    def forward(self, x: Any = None, labels: Any = None) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels, reduction="sum")}


class Comparing(Plain):
    """In-batch negatives."""

    def forward(self, x: Any = None, labels: Any = None) -> Any:
        likeness = torch.nn.functional.normalize(self.net(x), dim=-1)
        likeness = likeness @ likeness.T * 10
        return {"loss": torch.nn.functional.cross_entropy(likeness, torch.arange(len(x)))}


@pytest.mark.parametrize(
    ("make", "length", "advice", "not_reachable"),
    [
        (Summing, 48, "Set trainer.loss_is_scaled_for_ga = True", "reduction='sum'"),
        (Comparing, 48, "Microbatcher.backward_cached in a loop of your own", "Use backward_cached"),
        (Plain, 4100, "is retried in smaller microbatches", "make_batch"),
    ],
)
def test_warnings_advise_what_can_be_done_in_a_trainer(
    make: Any, length: int, advice: str, not_reachable: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(make(), arguments(tmp_path, max_steps=1), train_dataset=points(length))
    with caplog.at_level("WARNING", "batchfit"):
        adapt(trainer, search={"max_size": 8}, compared="warn").train()
    (text,) = [line for line in caplog.messages if advice in line]
    assert not_reachable not in text.replace(advice, "")


def test_a_sum_that_is_declared_is_one(tmp_path: Path) -> None:
    given = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 2}
    whole = {**given, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    expected = Trainer(Summing(), arguments(tmp_path, **whole), train_dataset=points())
    expected.train()
    trainer = Trainer(Summing(), arguments(tmp_path, **given), train_dataset=points())
    trainer.loss_is_scaled_for_ga = True
    adapt(trainer, search={"max_size": 5}).train()
    assert torch.allclose(parameters_of(trainer.model), parameters_of(expected.model), atol=1e-12)


def test_a_method_of_the_users_is_not_hidden(tmp_path: Path) -> None:
    class Mine(Trainer):
        def fit(self) -> Any:
            return self.train()

    trainer = adapt(Mine(Plain(), arguments(tmp_path, max_steps=1), train_dataset=points()))
    assert trainer.fit().global_step == 1
    assert trainer.found.batch_size == 16


def test_only_trainers_and_options(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"trainer must be a transformers\.Trainer, not GPT2LMHeadModel"):
        adapt(gpt2())
    trainer = Trainer(gpt2(), arguments(tmp_path), train_dataset=Tokens())
    with pytest.raises(TypeError, match=r"^adapt\(\) has no option 'budgt': did you mean budget\?$"):
        adapt(trainer, budgt="20GiB")
    with pytest.raises(TypeError, match=r"^adapt\(\) has no option 'colour': it has find, budget, "):
        adapt(trainer, colour="red")
    assert type(trainer) is Trainer  # left as it was
    with pytest.raises(TypeError, match=r"batchfit must be Options\(...\) or None, not 3"):
        BatchfitTrainer(gpt2(), arguments(tmp_path), batchfit=3)


def test_a_step_with_two_backwards_is_refused(tmp_path: Path) -> None:
    class Twice(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            super().training_step(*given, **named)
            return super().training_step(*given, **named)

    trainer = adapt(Twice(gpt2(), arguments(tmp_path), train_dataset=Tokens()), find=False)
    with pytest.raises(BatchfitError, match=r"accelerator\.backward once, not 2 times"):
        trainer.train()
    assert trainer.args.gradient_accumulation_steps == 4
    assert "backward" not in vars(trainer.accelerator)


def test_a_version_below_the_tested_ones_is_warned_of_and_no_newer_one() -> None:
    for version in ("4.57.6", "5.0.0", "5.22.2", "5.24.0.dev0", "6.0.0"):
        check_version(version)
    for version in ("4.56.2", "3.5.1"):
        with pytest.warns(UserWarning, match=rf"tested with transformers 4.57 and later, not with {version}"):
            check_version(version)


def test_a_trainer_that_would_not_call_our_methods_is_refused() -> None:
    gone = ("get_batch_samples", "log")
    older = type("Trainer", (), {name: None for name in dir(Trainer) if name not in gone})
    with pytest.raises(
        ImportError, match=r"the Trainer of 4\.45\.2 has no get_batch_samples, log: pip install .*>=4\.57"
    ):
        check_version("4.45.2", older)


@pytest.mark.parametrize("missing", ["transformers", "accelerate"])
def test_a_missing_framework_is_a_line_for_pip(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("batchfit.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r'pip install "batchfit\[transformers\]"'):
        importlib.import_module("batchfit.integrations.transformers")


# --- the benchmark


@pytest.mark.slow
def test_the_benchmark_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch, living_bytes: int) -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "integrations_hf.py"
    if not script.exists():
        pytest.skip("needs benchmarks")
    monkeypatch.syspath_prepend(str(script.parent))
    bench = importlib.import_module("integrations_hf")
    rows = {name: bench.run_case(name, smoke=True, steps=5) for name in ("trainer", "batchfit")}
    assert {row["outcome"] for row in rows.values()} == {"trained"}
    assert {row["batch_size"] for row in rows.values()} == {16}
    assert rows["trainer"]["microbatch_size"] == 4 < rows["batchfit"]["microbatch_size"] <= 16
    assert rows["batchfit"]["find_s"] > 0
    with pytest.raises(ValueError, match="name must be one of trainer, "):
        bench.run_case("mine")


# --- losses that compare samples


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("compared", [True, False])
def test_in_batch_negatives_are_refused_at_any_microbatch_size(
    compared: bool, size: int, tmp_path: Path
) -> None:
    """As MultipleNegativesRankingLoss, with dropout: the step itself puts the model into training mode."""

    class Contrastive(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            hidden = model(input_ids=inputs["input_ids"], output_hidden_states=True).hidden_states[-1]
            reps = torch.nn.functional.normalize(hidden.mean(1), dim=1)
            scores = reps @ reps.T * 20 if compared else reps * 20
            return torch.nn.functional.cross_entropy(
                scores, torch.arange(len(reps)) if compared else inputs["labels"][:, 0] % 8
            )

    model = gpt2(dropout=0.1)
    before = parameters_of(model).clone()
    trainer = adapt(
        Contrastive(model, arguments(tmp_path), train_dataset=Tokens()), search={"max_size": size}
    )
    if not compared:
        assert trainer.train().global_step == 6
        return
    with pytest.raises(batchfit.errors.BatchfitError, match=r"neither a mean nor a sum.*cached loss"):
        trainer.train()
    assert torch.equal(parameters_of(model), before)
    assert "train" not in vars(model)


# --- an OOM that ends the training


def test_an_oom_that_ends_the_training_leaves_a_snapshot(tmp_path: Path, living_bytes: int) -> None:
    path = tmp_path / "oom.pickle"
    trainer = Trainer(gpt2(), arguments(tmp_path), train_dataset=Tokens())
    trainer = adapt(trainer, find=False, record_oom=path)
    with batchfit.virtual_memory(living_bytes + 2**16), pytest.raises((RuntimeError, BatchfitError)) as ended:
        trainer.train()
    found = batchfit.explain_oom(path)
    assert found.step == 0
    assert found.batch["input_ids"].startswith("int64 (16, ")
    assert any("batchfit why" in one for one in ended.value.__notes__)
    with pytest.raises(TypeError, match="record_oom must be a file or None"):
        adapt(Trainer(gpt2(), arguments(tmp_path), train_dataset=Tokens()), record_oom=1)
