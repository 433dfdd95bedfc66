"""The Trainer's methods that batchfit takes over, and what it leaves to them.

Rules
- One optimizer step is one batch: `gradient_accumulation_steps` batches are loaded as one, and cut into as
  many microbatches as memory asks for. Steps, epochs, logs and LR schedules count as before.
- The user's own `training_step`, `compute_loss` and `prediction_step` run, once for each microbatch; only
  `accelerator.backward` is taken from them, since a batch is tried again from the outside.
- What the Trainer is told (`args`) is put back when training ends, however it ends.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.transformers.callback import TrainingCallback
from batchfit.integrations.transformers.counters import kept
from batchfit.integrations.transformers.epochs import ResumedSteps, ScheduledLoader, plan_epochs
from batchfit.integrations.transformers.loaders import local_batch
from batchfit.integrations.transformers.losses import (
    count_labels,
    divides_by_items,
    first_rows,
    is_whole,
    rows_of,
    shifts_labels,
)
from batchfit.integrations.transformers.options import Options, check_names, check_trainer
from batchfit.integrations.transformers.predictions import (
    loss_of_rows,
    loss_rows,
    of_the_batch,
    one_a_sample,
    padded_rows,
)
from batchfit.integrations.transformers.run import TrainerRun
from batchfit.integrations.transformers.search import find_microbatch, same_random_numbers

log = logging.getLogger("batchfit")

_PROBED_ROWS = 2
_MOST_LOOKS = 3  # a loss that cannot be told by then is not tried again
_ANSWERS = (False, None, True)  # what the most doubtful rank says counts for all


class BatchfitMixin:
    """Puts batchfit into a Trainer class of yours.

        class MyTrainer(BatchfitMixin, Trainer): ...
        trainer = MyTrainer(model, args, train_dataset=dataset, batchfit=Options(budget="20GiB"))

    It goes before the Trainer in the bases.
    """

    _batchfit: TrainerRun

    def __init__(self, *args: Any, batchfit: Options | None = None, **kwargs: Any) -> None:
        self._batchfit = _new_run(batchfit)
        super().__init__(*args, **kwargs)
        check_trainer(self, self._batchfit.options)

    @property
    def found(self) -> Any:
        """The `FitResult` of the search before training, or None."""
        return self._batchfit.fit

    # --- around training

    def _inner_training_loop(self: Any, *given: Any, **named: Any) -> Any:
        run, args = self._batchfit, self.args
        check_trainer(self, run.options)
        run.drop_evaluators(self.model, self.model_wrapped)
        sizes = args.per_device_train_batch_size, args.gradient_accumulation_steps, self._train_batch_size
        callback = TrainingCallback(self)
        # First: others see the epoch that is right, and what changed with this step.
        self.callback_handler.callbacks.insert(0, callback)
        run.given = args.per_device_train_batch_size, args.gradient_accumulation_steps
        run.checkpoint = named.get("resume_from_checkpoint", given[2] if len(given) > 2 else None)
        args.per_device_train_batch_size, args.gradient_accumulation_steps = math.prod(run.given), 1
        self._train_batch_size = math.prod(run.given)
        if "batch_size" in named:  # which transformers before 5.3 writes into `_train_batch_size`
            named["batch_size"] = self._train_batch_size
        self.current_gradient_accumulation_steps = 1  # set by the first epoch, and the search runs before
        try:
            return super()._inner_training_loop(*given, **named)  # type: ignore[misc]
        finally:
            args.per_device_train_batch_size, args.gradient_accumulation_steps, self._train_batch_size = sizes
            self.callback_handler.callbacks.remove(callback)
            run.end()

    def _prepare_for_training(self: Any, *given: Any, **named: Any) -> Any:
        """In transformers 5.3 and later: before the clock of `train_runtime` starts, unlike `on_train_begin`."""
        prepared = super()._prepare_for_training(*given, **named)  # type: ignore[misc]
        self._batchfit_begin()
        return prepared

    def _batchfit_begin(self: Any) -> None:
        """Search and follow the schedule, once model, optimizer and LR scheduler are prepared."""
        run = self._batchfit
        if run.has_begun:
            return
        run.has_begun = True
        self.args.per_device_train_batch_size = math.prod(run.given)
        self.state.train_batch_size = run.given[0]  # a plain Trainer may go on from the checkpoint
        if run.loader is not None:
            run.follow_schedule(self, _inner(self.optimizer))
        if run.options.find and run.microbatch_size is None:
            loader = self.callback_handler.train_dataloader
            with _uncounted(self):
                find_microbatch(self, self.model_wrapped, loader, _inner(self.optimizer))

    def create_optimizer(self: Any, *given: Any, **named: Any) -> Any:
        optimizer = super().create_optimizer(*given, **named)  # type: ignore[misc]
        self._batchfit_guard()
        return optimizer

    def create_optimizer_and_scheduler(self: Any, *given: Any, **named: Any) -> None:
        super().create_optimizer_and_scheduler(*given, **named)  # type: ignore[misc]
        self._batchfit_guard()  # one of the user's own need not call `create_optimizer`

    def _batchfit_guard(self: Any) -> None:
        if self.optimizer is not None and self._batchfit.given is not None:  # for this training
            self._batchfit.guard(_inner(self.optimizer))

    def log(self: Any, *given: Any, **named: Any) -> None:
        if not self._batchfit.holds(*given, **named):
            super().log(*given, **named)  # type: ignore[misc]

    # --- a step

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        run = self._batchfit
        sums = self._batchfit_sums(inputs, num_items_in_batch)
        cutter = run.cutter_of(self, model, sums=sums)
        step = self._batchfit_own_step
        # Trainer's losses are for DDP's mean over ranks; sums are added up.
        ranks = self.args.world_size if sums else 1

        def loss_of(micro: Any) -> Any:
            items = self._batchfit_items(micro, inputs, num_items_in_batch, sums=sums)
            loss = self._batchfit_loss(step, model, micro, items)
            return loss if ranks == 1 else loss / ranks

        with run.holding_logs(self.log):
            report = cutter.backward(loss_of, inputs, scaler=self.accelerator.scaler)
        if num_items_in_batch is not None and len(report.microbatch_sizes) > 1:
            self._batchfit_warn()
        if report.retries:
            run.logs.append(
                {"out_of_memory": report.retries, "microbatch_size": max(report.microbatch_sizes)}
            )
        # In place: what ran must not be lost to four bytes.
        return report.loss if ranks == 1 else report.loss.mul_(ranks)

    @property
    def _batchfit_own_step(self: Any) -> Any:
        """The trainer's own step, as it would be without us."""
        return super().training_step  # type: ignore[misc]

    def _batchfit_loss(self: Any, step: Any, model: nn.Module, inputs: Any, items: Any) -> Any:
        """What the trainer's own step would call backward of."""
        losses: list[Any] = []
        self.accelerator.backward = lambda loss, **options: losses.append(loss)  # none of the user's own
        # Without gradients it is no step of the training: the Microbatcher looks at the loss, in eval mode.
        with nullcontext() if torch.is_grad_enabled() else self._batchfit_looking(model):
            try:
                step(model, inputs, items)
            finally:
                del self.accelerator.backward
        if len(losses) != 1:
            raise BatchfitError(
                f"training_step must call accelerator.backward once, not {len(losses)} times: batchfit does "
                "the backward itself, so that a batch can be done again"
            )
        return losses.pop()

    @contextmanager
    def _batchfit_looking(self: Any, model: nn.Module) -> Iterator[None]:
        """Inside, nothing is logged, and a step, which calls `model.train()`, keeps the model's mode."""
        vars(model)["train"] = lambda mode=True: model
        try:
            with self._batchfit.quiet():
                yield
        finally:
            del vars(model)["train"]

    def _batchfit_sums(self: Any, inputs: Any, items: Any) -> bool:
        """Whether losses of parts of this batch add up to its loss; tried, and agreed by all ranks."""
        run, told = self._batchfit, getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None or items is None:
            return bool(told)
        if not (self.model_accepts_loss_kwargs or self.compute_loss_func is not None):
            return False
        if run.sums is None and run.looks < _MOST_LOOKS:
            run.looks += 1
            answer = torch.tensor(
                _ANSWERS.index(self._batchfit_tried(inputs, items)), device=self.args.device
            )
            if self.args.world_size > 1:
                answer = self.accelerator.gather(answer).min()
            run.sums = _ANSWERS[int(answer)]
            if run.sums is False and self.is_world_process_zero():
                log.warning(
                    "the loss does not divide by num_items_in_batch, which Trainer believes of %s: it is "
                    "taken for a mean. (Trainer's own accumulation would add such means up.)",
                    type(self.model).__name__,
                )
        return bool(run.sums)

    @property
    def _batchfit_is_doubtful(self: Any) -> bool:
        """Whether nobody can tell if the loss divides by the number of items: not the user, not a try."""
        takes = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return takes and getattr(self, "loss_is_scaled_for_ga", None) is None and self._batchfit.sums is None

    def _batchfit_items(self: Any, micro: Any, inputs: Any, items: Any, *, sums: bool) -> Any:
        """The number of items that a microbatch's loss is given: none where it is to be a mean."""
        if not sums and self._batchfit_is_doubtful and self.args.world_size == 1 and is_whole(micro, inputs):
            return items  # a batch in one piece: the Trainer's own loss, whatever it is
        return items if sums else None

    def _batchfit_warn(self: Any) -> None:
        run = self._batchfit
        if self._batchfit_is_doubtful and not run.warned and self.is_world_process_zero():
            run.warned = True
            log.warning(
                "whether the loss of %s divides by num_items_in_batch could not be told (it is zero, not "
                "finite, or another one each time), and the batch is cut: microbatches count as means over "
                "labels. Set trainer.loss_is_scaled_for_ga, True where it divides and False for a mean",
                type(self.model).__name__,
            )

    def _batchfit_tried(self: Any, inputs: Any, items: Any) -> bool | None:
        if not hasattr(inputs, "items"):
            return None
        rows = self._prepare_inputs(first_rows(inputs, _PROBED_ROWS))
        answers: list[bool | None] = []

        def loss_of(count: Any) -> Any:
            with same_random_numbers(self.args.device), self.compute_loss_context_manager():
                return self.compute_loss(self.model, dict(rows), num_items_in_batch=count)

        def once(batch_size: int) -> None:
            if not answers:
                with _evaluating(self.model), _uncounted(self):
                    answers.append(divides_by_items(loss_of, items))

        state = self._batchfit.options.state
        if state:  # a search of one size, since that puts everything back
            work = batchfit.Workload(once, state=list(state))
            batchfit.find_batch_size(work, max_size=1, steps=2, soak_steps=0, predict=False)
        else:
            once(1)
        return answers[0]

    def _prepare_inputs(self: Any, inputs: Any) -> Any:
        if self._batchfit.searches and hasattr(inputs, "items"):
            return dict(inputs)  # where the model is, which in a trace is no device of the Trainer's
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    # --- evaluation

    def prediction_step(
        self: Any,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **options: Any,
    ) -> Any:
        run = self._batchfit
        step = super().prediction_step  # type: ignore[misc]
        items = super()._get_num_items_in_batch([inputs], self.args.device)  # type: ignore[misc]
        sums = self._batchfit_sums(inputs, items)
        shifted = shifts_labels(self)
        generates = getattr(self.args, "predict_with_generate", False) and not prediction_loss_only
        kinds: set[torch.dtype] = set()

        def part(micro: Any) -> dict[str, Any]:
            # Not in inference mode, unlike other uses of `map`: what a model caches is for training too.
            with torch.inference_mode(mode=False), torch.no_grad():
                run.evaluates, run.asked = True, False
                run.items = self._batchfit_items(micro, inputs, items, sums=sums)
                try:
                    found = step(model, micro, prediction_loss_only, ignore_keys=ignore_keys, **options)
                finally:
                    run.evaluates, run.items = False, None
                loss, logits, labels = found
                count = rows_of(micro)
                if loss is not None:
                    kinds.add(loss.dtype)
                    weight = 1 if run.asked and sums else count_labels(micro, shifted=shifted)
                    loss = loss_rows(loss, weight, count)
                if generates and isinstance(logits, torch.Tensor):
                    logits = list(logits.unbind(0))  # as long as each microbatch made them
                else:
                    logits = one_a_sample(logits, count)
                return {"loss": loss, "adds": run.asked and sums, "logits": logits, "labels": labels}

        with run.holding_logs(self.log):
            found = run.evaluator_of(self, model).map(part, inputs)
        loss, logits = found["loss"], found["logits"]
        if loss is not None:
            loss = loss_of_rows(loss, adds=found["adds"], dtype=kinds.pop())
        made = generates and isinstance(logits, list)
        logits = padded_rows(self, logits) if made else of_the_batch(logits)
        return loss, logits, found["labels"]

    def _get_num_items_in_batch(self: Any, batch_samples: Any, device: Any) -> Any:
        run = self._batchfit
        if run.evaluates:  # of the whole batch, and asked of the other ranks once
            run.asked = True
            return run.items
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    # --- schedules and checkpoints

    def get_train_dataloader(self: Any) -> Any:
        loader, run = super().get_train_dataloader(), self._batchfit  # type: ignore[misc]
        if run.options.schedule is not None:
            return ScheduledLoader(run, run.open_loader(self, loader))
        if run.given is not None:
            run.local = local_batch(self, loader, given=run.given[0], accumulated=run.given[1])
            run.count_batches(loader, ranks=self.args.world_size)
        return loader

    def get_batch_samples(self: Any, *given: Any, **named: Any) -> Any:
        found = super().get_batch_samples(*given, **named)  # type: ignore[misc]
        if self._batchfit.ends_epoch(len(found[0])):
            self.control.should_epoch_stop = True
        return found

    def set_initial_training_values(self: Any, args: Any, dataloader: Any, *given: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader, *given)  # type: ignore[misc]
        run = self._batchfit
        if run.loader is not None and not isinstance(run.loader.dataset, IterableDataset):
            values = plan_epochs(self, values)
        if run.checkpoint is not None:
            run.load(run.checkpoint, self)
            # The Trainer compares it with the checkpoint's before it calls `_load_callback_state`.
            args.per_device_train_batch_size = run.given[0]
            if run.loader is not None:
                values = (values[0], ResumedSteps(values[1], epoch=run.first_epoch()), *values[2:])
        return values

    def _load_callback_state(self: Any) -> None:
        self.args.per_device_train_batch_size = math.prod(self._batchfit.given)
        super()._load_callback_state()  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any, *given: Any) -> None:
        super()._save_checkpoint(model, trial, *given)  # type: ignore[misc]
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save and os.path.isdir(folder):
            self._batchfit.save(folder, self)

    def _save(self: Any, *given: Any, **named: Any) -> None:
        run, args = self._batchfit, self.args
        now = args.gradient_accumulation_steps
        if run.given is not None:  # training_args.bin tells what the user asked for
            args.gradient_accumulation_steps = run.given[1]
        try:
            with self._batchfit_given_size():
                super()._save(*given, **named)  # type: ignore[misc]
        finally:
            args.gradient_accumulation_steps = now

    @contextmanager
    def _batchfit_given_size(self: Any) -> Iterator[None]:
        """Inside, `per_device_train_batch_size` is the user's own."""
        now = self.args.per_device_train_batch_size
        if self._batchfit.given is not None:
            self.args.per_device_train_batch_size = self._batchfit.given[0]
        try:
            yield
        finally:
            self.args.per_device_train_batch_size = now

    def _get_learning_rate(self: Any) -> float:
        if self._batchfit.scheduler is None:
            return float(super()._get_learning_rate())  # type: ignore[misc]
        return float(self.optimizer.param_groups[0]["lr"])  # LR schedulers do not know our factor


class BatchfitTrainer(BatchfitMixin, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` with batchfit in it; `batchfit=Options(...)` says how."""


class BatchfitSeq2SeqTrainer(BatchfitMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer` with batchfit in it; `batchfit=Options(...)` says how."""


def adapt(trainer: Any, **options: Any) -> Any:
    """Put batchfit into a trainer that is there already; returns it.

        adapt(trainer, budget="20GiB").train()

    Keywords are those of `Options`. The trainer gets a subclass of its own class; called again, the options
    are replaced.
    """
    kind: Any = type(trainer)
    if not issubclass(kind, transformers.Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, not {kind.__name__}")
    check_names(options)
    run = TrainerRun(Options(**options))
    check_trainer(trainer, run.options)
    if not issubclass(kind, BatchfitMixin):
        trainer.__class__ = _with_mixin(kind)
    trainer._batchfit = run
    return trainer


def _with_mixin(kind: Any) -> Any:
    """A subclass of `kind` with batchfit in it, whose instances can be pickled where those of `kind` can."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807 - the namespace of the class below
        make, (_, *given), *rest = super(adapted, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        return _revived, (kind, make, *given), *rest

    adapted = type(f"Batchfit{kind.__name__}", (BatchfitMixin, kind), {"__reduce_ex__": __reduce_ex__})
    return adapted


def _revived(kind: Any, make: Any, *given: Any) -> Any:
    return make(_with_mixin(kind), *given)


def _new_run(options: Any) -> TrainerRun:
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"batchfit must be Options(...) or None, not {options!r:.80}")
    return TrainerRun(options or Options())


def _inner(optimizer: Any) -> Any:
    """The optimizer itself, without Accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


@contextmanager
def _uncounted(trainer: Any) -> Iterator[None]:
    """Inside, steps are none of the training's: what they log and count reaches nobody."""
    restore = kept(trainer)
    try:
        with trainer._batchfit.quiet():
            yield
    finally:
        restore()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, so that a loss is the same twice; each module's mode is put back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
