"""The methods of the Trainer that batchfit overrides, and what it leaves to them.

Rules
- One optimizer step is one batch: `gradient_accumulation_steps` batches are loaded as one, and cut into as
  many microbatches as memory requires. Steps, epochs, logs and LR schedules count as before.
- The user's own `training_step`, `compute_loss` and `prediction_step` run, once per microbatch; only
  `accelerator.backward` is replaced, since the Microbatcher retries a batch from outside.
- `args` is restored when training ends, however it ends.
- Overridden are methods that transformers 4.57 and later all call; `_prepare_for_training` came with 5.3.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset

from batchfit.errors import BatchfitError
from batchfit.integrations.sentence_transformers import check_cut
from batchfit.integrations.transformers.callback import TrainingCallback
from batchfit.integrations.transformers.comparing import run_compared
from batchfit.integrations.transformers.epochs import ResumedSteps, ScheduledLoader, plan_epochs
from batchfit.integrations.transformers.evaluation import predict_in_microbatches
from batchfit.integrations.transformers.loaders import local_batch
from batchfit.integrations.transformers.losses import opened
from batchfit.integrations.transformers.options import Options, check_names, check_trainer
from batchfit.integrations.transformers.probing import keeping_mode, uncounted
from batchfit.integrations.transformers.reduction import adds_up, items_of, warn_of_unknown
from batchfit.integrations.transformers.rl.checks import generates
from batchfit.integrations.transformers.run import TrainerRun
from batchfit.integrations.transformers.search import find_microbatch


class BatchfitMixin:
    """Adds batchfit to a Trainer class of yours; it goes before the Trainer in the bases.

        class MyTrainer(BatchfitMixin, Trainer): ...
        trainer = MyTrainer(model, args, train_dataset=dataset, batchfit=Options(budget="20GiB"))

    Args:
        *args: go to the Trainer.
        batchfit: the options; default: `Options()`.
        **kwargs: go to the Trainer.
    """

    _batchfit: TrainerRun
    _batchfit_merges = True  # batches that the Trainer would accumulate are loaded as one

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
        # First: other callbacks see the corrected epoch, and what changed with this step.
        self.callback_handler.callbacks.insert(0, callback)
        run.given = args.per_device_train_batch_size, args.gradient_accumulation_steps
        run.checkpoint = named.get("resume_from_checkpoint", given[2] if len(given) > 2 else None)
        args.per_device_train_batch_size, args.gradient_accumulation_steps = self._batchfit_loaded
        self._train_batch_size = args.per_device_train_batch_size
        if "batch_size" in named:  # which transformers before 5.3 writes into `_train_batch_size`
            named["batch_size"] = self._train_batch_size
        # The Trainer sets it in its first epoch, which is after the search.
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        try:
            with run.recording():
                return super()._inner_training_loop(*given, **named)  # type: ignore[misc]
        finally:
            args.per_device_train_batch_size, args.gradient_accumulation_steps, self._train_batch_size = sizes
            self.callback_handler.callbacks.remove(callback)
            run.end()

    @property
    def _batchfit_loaded(self) -> tuple[int, int]:
        """The per-device size and the accumulation that the Trainer trains with."""
        assert self._batchfit.given is not None
        size, accumulated = self._batchfit.given
        return (size * accumulated, 1) if self._batchfit_merges else (size, accumulated)

    def _prepare_for_training(self: Any, *given: Any, **named: Any) -> Any:
        """Begin before the clock of `train_runtime` starts; transformers before 5.3 has no such hook."""
        prepared = super()._prepare_for_training(*given, **named)  # type: ignore[misc]
        self._batchfit_begin()
        return prepared

    def _batchfit_begin(self: Any) -> None:
        """Search and follow the schedule, once model, optimizer and LR scheduler are prepared."""
        run = self._batchfit
        if run.has_begun:
            return
        run.has_begun = True
        self.args.per_device_train_batch_size = self._batchfit_loaded[0]
        self.state.train_batch_size = run.given[0]  # a plain Trainer may go on from the checkpoint
        if run.loader is not None:
            run.follow_schedule(self, _inner(self.optimizer))
        if run.options.find and run.microbatch_size is None:
            loader = self.callback_handler.train_dataloader
            with uncounted(self):
                self._batchfit_find(loader, _inner(self.optimizer))

    def _batchfit_find(self: Any, loader: Any, optimizer: Any) -> None:
        find_microbatch(self, self.model_wrapped, loader, optimizer)

    def create_optimizer(self: Any, *given: Any, **named: Any) -> Any:
        optimizer = super().create_optimizer(*given, **named)  # type: ignore[misc]
        self._batchfit_guard()
        return optimizer

    def create_optimizer_and_scheduler(self: Any, *given: Any, **named: Any) -> None:
        super().create_optimizer_and_scheduler(*given, **named)  # type: ignore[misc]
        self._batchfit_guard()  # one of the user's own need not call `create_optimizer`

    def _batchfit_guard(self: Any) -> None:
        if self.optimizer is not None and self._batchfit.given is not None:  # for this training
            self._batchfit.guard_step(_inner(self.optimizer))

    def log(self: Any, *given: Any, **named: Any) -> None:
        if not self._batchfit.defers(*given, **named):
            super().log(*given, **named)  # type: ignore[misc]

    # --- a step

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        run, step = self._batchfit, self._batchfit_own_step
        if run.recorder is not None:
            run.recorder.note(step=self.state.global_step, batch=inputs)
        compared = run.comparing_step(self, model, inputs)
        if compared is not None:
            microbatcher = run.microbatcher_of(self, model, sums=False)
            with run.deferring_logs(self.log):
                return run.logged(run_compared(self, compared, microbatcher, model, inputs)).loss
        batch = opened(self, model, inputs)
        sums = adds_up(self, batch, num_items_in_batch)
        microbatcher = run.microbatcher_of(self, model, sums=sums)
        # Trainer scales losses for DDP's mean over ranks; the Microbatcher adds sums up over ranks.
        ranks = self.args.world_size if sums else 1

        def loss_of(micro: Any) -> Any:
            if run.options.compared == "error" and not batch.is_whole(micro):
                check_cut(self, inputs)
            items = items_of(self, micro, batch, num_items_in_batch, sums=sums)
            loss = batch.loss(micro, lambda given: self._batchfit_loss(step, model, given, items))
            return loss if ranks == 1 else loss / ranks

        with run.deferring_logs(self.log):
            report = microbatcher.backward(loss_of, batch.cut, scaler=self.accelerator.scaler)
        if num_items_in_batch is not None and len(report.microbatch_sizes) > 1:
            warn_of_unknown(self)
        run.logged(report)
        # In place: an OOM at four bytes would waste the whole step.
        return report.loss if ranks == 1 else report.loss.mul_(ranks)

    @property
    def _batchfit_own_step(self: Any) -> Any:
        """The trainer's own `training_step`."""
        return super().training_step  # type: ignore[misc]

    def _batchfit_loss(self: Any, step: Any, model: nn.Module, inputs: Any, items: Any) -> Any:
        """The loss that the trainer's own step calls `accelerator.backward` with."""
        losses: list[Any] = []
        with ExitStack() as stack:
            if not torch.is_grad_enabled():  # the Microbatcher probes the loss, in eval mode
                stack.enter_context(keeping_mode(model))
                stack.enter_context(self._batchfit.quiet())
            self.accelerator.backward = lambda loss, **options: losses.append(loss)  # none of the user's own
            stack.callback(delattr, self.accelerator, "backward")
            step(model, inputs, items)
        if len(losses) != 1:
            raise BatchfitError(
                f"training_step must call accelerator.backward once, not {len(losses)} times: batchfit calls "
                "backward itself, so that it can retry a batch"
            )
        return losses.pop()

    def _prepare_inputs(self: Any, inputs: Any) -> Any:
        if self._batchfit.searches and hasattr(inputs, "items"):
            return dict(inputs)  # on the model's device, which in a trace is not `args.device`
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
        return predict_in_microbatches(
            self,
            super().prediction_step,  # type: ignore[misc]
            model,
            inputs,
            items=super()._get_num_items_in_batch([inputs], self.args.device),  # type: ignore[misc]
            loss_only=prediction_loss_only,
            ignore_keys=ignore_keys,
            **options,
        )

    def _get_num_items_in_batch(self: Any, batch_samples: Any, device: Any) -> Any:
        run = self._batchfit
        if run.evaluates:  # the number of the whole batch, gathered over ranks once
            run.was_asked = True
            return run.items
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    # --- schedules and checkpoints

    def get_train_dataloader(self: Any) -> Any:
        loader, run = super().get_train_dataloader(), self._batchfit  # type: ignore[misc]
        if run.options.schedule is not None:
            scheduled = run.open_loader(self, loader)
            return scheduled if run.given is None else ScheduledLoader(run, scheduled)
        if run.given is not None and self._batchfit_merges:
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
        if self._batchfit.given is not None:
            self.args.per_device_train_batch_size = self._batchfit_loaded[0]
        super()._load_callback_state()  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any, *given: Any) -> None:
        super()._save_checkpoint(model, trial, *given)  # type: ignore[misc]
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.args.should_save and os.path.isdir(folder):
            self._batchfit.save(folder, self)

    def _save(self: Any, *given: Any, **named: Any) -> None:
        with self._batchfit_given_sizes():
            super()._save(*given, **named)  # type: ignore[misc]

    @contextmanager
    def _batchfit_given_sizes(self: Any) -> Iterator[None]:
        """Let `args` hold the user's own sizes, as `training_args.bin` shall."""
        args, run = self.args, self._batchfit
        now = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if run.given is not None:
            args.per_device_train_batch_size, args.gradient_accumulation_steps = run.given
        try:
            yield
        finally:
            args.per_device_train_batch_size, args.gradient_accumulation_steps = now

    def _get_learning_rate(self: Any) -> float:
        if self._batchfit.scheduler is None:
            return float(super()._get_learning_rate())  # type: ignore[misc]
        return float(self.optimizer.param_groups[0]["lr"])  # LR schedulers do not know our factor


class BatchfitTrainer(BatchfitMixin, transformers.Trainer):
    """`transformers.Trainer` with batchfit; its options are `batchfit=Options(...)`."""


class BatchfitSeq2SeqTrainer(BatchfitMixin, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with batchfit; its options are `batchfit=Options(...)`."""


def adapt(trainer: Any, **options: Any) -> Any:
    """Add batchfit to an existing trainer, and return it.

        adapt(trainer, budget="20GiB").train()

    The trainer's class becomes a subclass of its own class. A second call replaces the options.

    Args:
        trainer: a `transformers.Trainer`, or one of a class made from it.
        **options: those of `Options`, as keywords.

    Returns:
        The same trainer.

    Raises:
        TypeError: `trainer` is no `transformers.Trainer`.
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
    """A subclass of `kind` with batchfit, whose instances can be pickled where those of `kind` can."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807 - the namespace of the class below
        make, (_, *given), *rest = super(adapted, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        return _revive, (kind, make, *given), *rest

    mixin: Any = BatchfitMixin
    if generates(kind):
        from batchfit.integrations.transformers.rl.mixin import GenerationMixin  # made from ours

        mixin = GenerationMixin
    adapted = type(f"Batchfit{kind.__name__}", (mixin, kind), {"__reduce_ex__": __reduce_ex__})
    return adapted


def _revive(kind: Any, make: Any, *given: Any) -> Any:
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
