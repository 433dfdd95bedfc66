"""Whatever a plain Trainer allows works after `adapt`, with the same result."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs transformers")

from hf_models import Tokens, arguments, dividing_once, gpt2, parameters_of, run_of  # noqa: E402

from batchfit.errors import BatchfitError  # noqa: E402
from batchfit.integrations.transformers import adapt  # noqa: E402

Trainer = transformers.Trainer
schedulers = torch.optim.lr_scheduler
Adapt = Callable[[Any], Any]


def new(folder: Path, kind: Any = Trainer, *, model: Any = None, given: Any = None, **more: Any) -> Any:
    if "model_init" not in more and model is None:
        model = gpt2()
    args = arguments(folder, **{"max_steps": 3, **(given or {})})
    return kind(model, args, train_dataset=Tokens(), eval_dataset=Tokens(), **more)


def with_scheduler(make: Callable[[Any], Any]) -> Callable[[Adapt, Path], Any]:
    """Training with a scheduler that the user makes for the optimizer of `create_optimizer()`."""

    def use(wrap: Adapt, folder: Path) -> Any:
        trainer = wrap(new(folder))
        trainer.lr_scheduler = make(trainer.create_optimizer())
        trainer.train()
        return parameters_of(trainer.model), trainer.lr_scheduler.get_last_lr()

    return use


def created_together(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder))
    trainer.create_optimizer_and_scheduler(10)
    trainer.train()
    return parameters_of(trainer.model)


def given_as_a_pair(wrap: Adapt, folder: Path) -> Any:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = optimizer, schedulers.ExponentialLR(optimizer, 0.5)
    wrap(new(folder, model=model, optimizers=pair)).train()
    return parameters_of(model), optimizer.param_groups[0]["lr"]


def scheduler_made_after_training(wrap: Adapt, folder: Path) -> Any:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(new(folder, model=model, optimizers=(optimizer, None))).train()
    # An LR scheduler of transformers before 5.3 wraps the optimizer's own, and leaves a function.
    step = "step" in vars(optimizer), inspect.ismethod(optimizer.step)
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    return parameters_of(model), optimizer.param_groups[0]["lr"], step


def class_of_an_optimizer(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})))
    trainer.train()
    return parameters_of(trainer.model)


def scheduler_made_by_a_callback(wrap: Adapt, folder: Path) -> Any:
    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.scheduler = schedulers.StepLR(more["optimizer"].optimizer, 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.scheduler.step()

    trainer = wrap(new(folder, callbacks=[Steps()]))
    trainer.train()
    trainer.train()
    return parameters_of(trainer.model)


def methods_of_the_users_own(wrap: Adapt, folder: Path) -> Any:
    class Mine(Trainer):  # type: ignore[misc]
        def create_optimizer(self, *given: Any) -> Any:
            self.optimizer = self.optimizer or torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            inner = getattr(self.optimizer, "optimizer", self.optimizer)
            self.lr_scheduler = schedulers.StepLR(inner, 1)
            return self.lr_scheduler

    trainer = wrap(new(folder, Mine))
    trainer.train()
    return parameters_of(trainer.model)


def step_replaced_by_a_partial(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder))
    optimizer = trainer.create_optimizer()
    optimizer.step = mine = functools.partial(optimizer.step)
    trainer.train()
    assert optimizer.step is mine
    return parameters_of(trainer.model)


def copies_of_the_optimizer(wrap: Adapt, folder: Path) -> Any:
    optimizer = wrap(new(folder)).create_optimizer()
    for one in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        schedulers.StepLR(one, 1)
    return optimizer.step.__name__, "step" in vars(optimizer)


def copies_of_the_trainer(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder))
    other = copy.deepcopy(trainer)
    other.train()
    before = parameters_of(trainer.model)
    copy.copy(trainer).train()
    return before, parameters_of(other.model), parameters_of(trainer.model)


def evaluated_and_predicted_first(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder))
    loss, predicted = trainer.evaluate()["eval_loss"], trainer.predict(Tokens())
    trainer.train()
    return loss, predicted.metrics["test_loss"], parameters_of(trainer.model)


def trained_twice(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder))
    trainer.train()
    trainer.train()
    return parameters_of(trainer.model)


def resumed_with_a_scheduler(wrap: Adapt, folder: Path) -> Any:
    def make() -> Any:
        trainer = wrap(new(folder, given={"save_strategy": "steps", "save_steps": 2}))
        trainer.lr_scheduler = schedulers.StepLR(trainer.create_optimizer(), 1)
        return trainer

    make().train()
    trainer = make()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return parameters_of(trainer.model)


def searched_for_hyperparameters(wrap: Adapt, folder: Path) -> Any:
    trainer = wrap(new(folder, model_init=lambda: gpt2()))
    trainer.hp_search_backend = transformers.trainer_utils.HPSearchBackend.RAY
    rates = []
    for rate in (0.01, 0.002):
        trainer.objective = None
        trainer._hp_search_setup({"learning_rate": rate, "per_device_train_batch_size": 2})
        trainer.train()
        rates.append(parameters_of(trainer.model))
    return rates


USES = {
    "StepLR": with_scheduler(lambda optimizer: schedulers.StepLR(optimizer, 1)),
    "OneCycleLR": with_scheduler(lambda one: schedulers.OneCycleLR(one, 0.1, total_steps=10)),
    "SequentialLR": with_scheduler(
        lambda one: schedulers.SequentialLR(
            one, [schedulers.ConstantLR(one, 0.5, 1), schedulers.CosineAnnealingLR(one, 3)], [1]
        )
    ),
    "cosine": with_scheduler(lambda one: transformers.get_cosine_schedule_with_warmup(one, 1, 3)),
    **{
        use.__name__: use
        for use in (
            created_together,
            given_as_a_pair,
            scheduler_made_after_training,
            class_of_an_optimizer,
            scheduler_made_by_a_callback,
            methods_of_the_users_own,
            step_replaced_by_a_partial,
            copies_of_the_optimizer,
            copies_of_the_trainer,
            evaluated_and_predicted_first,
            trained_twice,
            resumed_with_a_scheduler,
            searched_for_hyperparameters,
        )
    },
}


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


@pytest.mark.parametrize("name", USES)
def test_what_a_plain_trainer_allows_works_with_the_same_result(name: str, tmp_path: Path) -> None:
    if name == "step_replaced_by_a_partial" and not hasattr(Trainer, "_prepare_for_training"):
        pytest.skip("a plain Trainer before transformers 5.3 makes an LR scheduler on it, which refuses it")
    with dividing_once():
        plain = USES[name](lambda trainer: trainer, tmp_path / "plain")
    assert_same(plain, USES[name](adapt, tmp_path / "adapted"))


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def forward(self, x: Any = None) -> Any:
        return {"loss": self.net(x).sum()}


class Lines(Trainer):  # type: ignore[misc]
    """A trainer that can be pickled, with what it keeps for that itself."""

    def __getstate__(self) -> Any:
        # Not Accelerate's, which a whole process shares: other tests leave there what cannot be pickled.
        return {"model": self.model, **{name: one for name, one in vars(self).items() if "batchfit" in name}}


def test_a_trainer_that_can_be_pickled_still_can(tmp_path: Path) -> None:
    data = [{"x": torch.ones(2)}] * 4
    trainer = adapt(Lines(Line(), arguments(tmp_path), train_dataset=data), find=False, budget="1GiB")
    again = pickle.loads(pickle.dumps(trainer))
    assert isinstance(again, Lines)
    assert again.found is None
    assert type(again).__name__ == type(trainer).__name__ == "BatchfitLines"
    assert (run_of(again).options.find, run_of(again).options.budget) == (False, "1GiB")
    assert not hasattr(again, "accelerator")


def test_an_optimizer_is_let_go_after_training_without_the_garbage_collector(tmp_path: Path) -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = adapt(new(tmp_path, model=model, optimizers=(optimizer, None)), find=False)
    trainer.train()
    held = weakref.ref(optimizer)
    for holder in (trainer, trainer.callback_handler):
        holder.optimizer = holder.lr_scheduler = None
    trainer.accelerator.free_memory()
    gc.disable()
    try:
        del optimizer
        assert held() is None
    finally:
        gc.enable()


def test_an_own_step_of_the_optimizer_is_back_when_training_fails(tmp_path: Path) -> None:
    class Fails(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            raise KeyboardInterrupt

    def has_own_step(wrap: Adapt) -> bool:
        model = gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = wrap(new(tmp_path, model=model, optimizers=(optimizer, None), callbacks=[Fails()]))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        return "step" in vars(optimizer)

    assert has_own_step(adapt) == has_own_step(lambda trainer: trainer)


def test_a_backward_of_the_users_own_is_refused_not_ignored(tmp_path: Path) -> None:
    trainer = adapt(new(tmp_path))
    trainer.accelerator.backward = backward = lambda loss, **options: loss.backward()
    with pytest.raises(BatchfitError, match=r"accelerator\.backward was replaced.*compute_loss"):
        trainer.train()
    assert trainer.accelerator.backward is backward


@pytest.mark.parametrize("name", ["DistillationTrainer", "GKDTrainer", "ATrainerOfTomorrow"])
def test_trainers_whose_batches_cannot_be_cut_are_refused_by_adapt(name: str, tmp_path: Path) -> None:
    theirs = type(name, (Trainer,), {"__module__": "trl.trainer"})
    for kind in (theirs, type("Mine", (theirs,), {})):
        with pytest.raises(BatchfitError, match=f"batches of {name} .*gradient_accumulation_steps"):
            adapt(new(tmp_path, kind))
    adapt(new(tmp_path, type(name, (Trainer,), {})))  # of somebody else
