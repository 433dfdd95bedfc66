"""State of batchfit while a Trainer trains: its Microbatchers, the size found, the schedule, the loader.

Rules
- Every decision is the same on all ranks, except for microbatch sizes, which may differ.
- A checkpoint holds the state in one small file beside the Trainer's own; a resumed run has the sizes, the
  learning rates and the next samples of a run that was never stopped.
- Only `fit`, and the sizes that evaluation has learned, outlive training.
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.sentence_transformers import comparing_step, extra_modules
from batchfit.integrations.transformers.counters import save_counts
from batchfit.integrations.transformers.epochs import is_at_end
from batchfit.integrations.transformers.loaders import order_of
from batchfit.integrations.transformers.losses import count_labels, shifts_labels
from batchfit.integrations.transformers.options import Options
from batchfit.integrations.transformers.sharding import is_sharded

FILE = "batchfit.pt"
_VERSION = 1
_SCHEDULE_POINTS = 256  # of a run, at which the schedule is evaluated for its largest batch
_ADVICE = {  # for users of a Trainer whose loss is not of the kind that batchfit assumed
    "sum": "Set trainer.loss_is_scaled_for_ga = True, which says that losses of microbatches add up",
    "mean": "Set trainer.loss_is_scaled_for_ga = False, which says that it is a mean",
    "compared": "Use a per_device_train_batch_size that fits whole, a cached loss (of sentence-transformers: "
    "CachedMultipleNegativesRankingLoss), or Microbatcher.backward_cached in a loop of your own, which is "
    "exact. compared='warn' cuts it all the same",
}


@final
class TrainerRun:
    """The options of one trainer, and the state of its training."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.fit: Any = None  # the FitResult of the last search
        self.recorder: batchfit.OomRecorder | None = None  # of a training that shall leave a snapshot
        self.microbatch_size: int | None = None
        self.generation_fit: Any = None  # the FitResult of how many prompts generate at once
        self.generation_size: int | None = None  # prompts that generate at once, of a trainer that generates
        self.phases: Any = None  # the Microbatchers of such a trainer
        self.is_ragged = False
        self.sums: bool | None = None  # losses of microbatches add up; None: not known
        self.probes = 0  # how often that was probed
        self.has_warned = False  # of a loss for which that is not known
        self.says_compared = False  # that its loss compares the samples of a batch
        self.evaluates = False  # inside a microbatch of an evaluation
        self.was_asked = False  # for the number of items, by that microbatch
        self.items: Any = None  # the answer
        self.longest_sequence = 0  # of batches in one row, so far
        self.searches = False
        self.is_quiet = False  # inside steps that are not the training's, whose logs are dropped
        self.logs: list[dict[str, float]] = []  # for the next step's entry in `log_history`
        self.given: tuple[int, int] | None = None  # the user's per-device size and accumulation, in training
        self.checkpoint: str | None = None  # the folder that training resumes from
        self.has_begun = False  # `_batchfit_begin` has run in this training
        self.steps = 0  # of a training with a schedule
        self.local = 0  # one rank's batch, without a schedule
        self.largest = 0  # the largest batch of the schedule, over all ranks
        self.saved: dict[str, Any] = {}
        self.loader: Any = None
        self.collate_fn: Any = None  # of a loader that is ours
        self.drop_last = False
        self.scheduler: Any = None
        self.microbatcher: Any = None  # of the last training batch
        self._microbatchers: dict[bool, Any] = {}  # by `sums`
        self._evaluators: dict[int, Any] = {}
        self._deferred: list[Any] | None = None  # what a step has logged so far
        self._steps = False
        self._guarded: tuple[Any, Any, Any] | None = None  # the optimizer, its step, and what that replaced
        self._left_in_epoch: int | None = None  # batches; of a training with a schedule
        self._per_epoch: tuple[int, int] | None = None  # optimizer steps; batches of the user's size

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the trainer needs: the state of a training is not copied."""
        fits = {"fit": self.fit, "generation_fit": self.generation_fit}
        return {"options": self.options, **fits, "sums": self.sums, "probes": self.probes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"])
        vars(self).update(state)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Let `trainer.log` do nothing: the step is one of a trial, or of a probe of the loss."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    # --- microbatches

    def microbatcher_of(self, trainer: Any, model: nn.Module, *, sums: bool) -> Any:
        """The Microbatcher of training batches whose losses add up, or are means."""
        self.microbatcher = self._microbatchers.get(sums)
        if self.microbatcher is None:
            options = self.options
            weight = options.weight or functools.partial(count_labels, shifted=shifts_labels(trainer))
            self.microbatcher = self._microbatchers[sums] = batchfit.Microbatcher(
                model,
                *extra_modules(trainer),
                weight=None if sums else weight,
                reduction="sum" if sums else "mean",
                on_zero_weight="skip",
                lengths=options.lengths,
                microbatch_size=None if self.is_ragged else self.microbatch_size,
                budget=options.budget,
                sync=options.sync,
                compared=options.compared,
                advice=_ADVICE,
            )
            self.undo_counts(trainer, self.microbatcher)
            others = [one for one in self._microbatchers.values() if one is not self.microbatcher]
            known = others[0].state_dict() if others else self.saved.get("sizes")
            if known is not None:
                self.microbatcher.load_state_dict(known)
        return self.microbatcher

    def comparing_step(self, trainer: Any, model: nn.Module, inputs: Any, *, trains: bool = True) -> Any:
        """How a batch runs whose loss compares its samples; None where it does not, or is to be cut."""
        if self.options.compared != "error":
            return None
        # Samples of one batch of the user's are compared; accumulated batches are loaded as one.
        group = self.given[0] if trains and self.given is not None and self.options.schedule is None else 0
        found = comparing_step(trainer, model, inputs, group=group)
        if found is not None and is_sharded(model):
            raise BatchfitError(
                "the loss compares the samples of a batch, which are encoded in microbatches, twice each: "
                "under FSDP2 ranks with other numbers of them would have other collectives. Use DDP, or "
                "train without adapt. compared='warn' cuts the batch all the same"
            )
        return found

    def logged(self, report: Any) -> Any:
        """The report of a batch, once its OOM retries are in the log."""
        if report.retries:
            self.logs.append(
                {"out_of_memory": report.retries, "microbatch_size": max(report.microbatch_sizes)}
            )
        return report

    def undo_counts(self, trainer: Any, microbatcher: Any) -> None:
        """Let a retry undo what the failed attempt has counted and logged."""
        microbatcher._also_restores(lambda: save_counts(trainer))
        microbatcher._also_restores(lambda: functools.partial(self._drop_logs, len(self._deferred or ())))

    def _drop_logs(self, count: int) -> None:
        if self._deferred is not None:
            del self._deferred[count:]

    @contextmanager
    def deferring_logs(self, log: Callable[..., None]) -> Iterator[None]:
        """Log what a step logs when the step is done, so that failed attempts log nothing."""
        before, self._deferred = self._deferred, []
        try:
            yield
        except BaseException:
            self._deferred = before
            raise
        logs, self._deferred = self._deferred, before
        for given, named in logs:
            log(*given, **named)

    def defers(self, *given: Any, **named: Any) -> bool:
        """Whether this entry is dropped or logged later; keep it for later."""
        if not self.is_quiet and self._deferred is not None:
            self._deferred.append((given, named))
        return self.is_quiet or self._deferred is not None

    def evaluator_of(self, trainer: Any, model: nn.Module) -> Any:
        """The Microbatcher of evaluation batches; kept between the evaluations of a training."""
        found = self._evaluators.get(id(model))
        if found is None:
            self._evaluators.clear()
            found = self._evaluators[id(model)] = batchfit.Microbatcher(model, budget=self.options.budget)
            self.undo_counts(trainer, found)
        return found

    def drop_evaluators(self, *models: nn.Module) -> None:
        """Release all models but these: an earlier one would take memory from the search."""
        used = {id(model) for model in models}
        self._evaluators = {key: one for key, one in self._evaluators.items() if key in used}

    @contextmanager
    def evaluating_with(self, items: Any) -> Iterator[None]:
        """Answer with `items` where the Trainer asks for the number of items of a microbatch."""
        self.evaluates, self.was_asked, self.items = True, False, items
        try:
            yield
        finally:
            self.evaluates, self.items = False, None

    def guard_step(self, optimizer: Any) -> None:
        """Replace `optimizer.step` by `Microbatcher.step` until training ends: an OOM leaves no half step.

        It stays a bound method, as LR schedulers that are made before or after expect.
        """
        plain: Any = optimizer.step
        if getattr(plain, "_batchfit_run", None) is self:
            return
        own = vars(optimizer).get("step")  # of an LR scheduler, say
        function = getattr(plain, "__func__", plain)

        @functools.wraps(function)  # with what LR schedulers have written on it
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # Bound at each call: a bound method in the closure would keep the optimizer alive.
            step: Any = function.__get__(optimizer) if own is None else own
            closures = [one for one in (*args, *kwargs.values()) if one is not None]
            if self._steps or self.searches or self.microbatcher is None or closures:
                return step(*args, **kwargs)
            self._steps = True
            try:
                return self.microbatcher.step(optimizer)
            finally:
                self._steps = False

        step._batchfit_run = self  # type: ignore[attr-defined]
        optimizer.step = guarded = types.MethodType(step, optimizer)
        self._guarded = weakref.ref(optimizer), guarded.__func__, own

    def _restore_step(self) -> None:
        """Restore the optimizer's own step, unless another wraps ours, which then calls the plain one."""
        if self._guarded is None:
            return
        held, function, own = self._guarded
        self._guarded, optimizer = None, held()
        if optimizer is None or getattr(vars(optimizer).get("step"), "__func__", None) is not function:
            return
        if own is None:
            del optimizer.step
        else:
            optimizer.step = own

    # --- data and schedule

    def open_loader(self, trainer: Any, given: DataLoader[Any]) -> Any:
        """A `ResizableLoader` of what the Trainer's own loader would load."""
        streams = isinstance(given.dataset, IterableDataset)
        if streams and trainer.args.world_size > 1:
            raise BatchfitError(
                "a schedule needs a dataset with a length on several ranks: Accelerate reads an iterable one "
                "in batches of one size. Use a map-style dataset, or one process"
            )
        order, seed = order_of(given), trainer.args.data_seed
        seed = trainer.args.seed if seed is None else seed
        self.drop_last = order.drop_last
        self.collate_fn = given.collate_fn
        self.loader = batchfit.ResizableLoader(
            given.dataset,
            trainer.get_total_train_batch_size(trainer.args),
            shuffle=order.shuffle,
            sampler=order.sampler,
            seed=seed,
            collate_fn=given.collate_fn,
            num_workers=given.num_workers,
            pin_memory=given.pin_memory,
            drop_last=order.drop_last,
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context,
            prefetch_factor=given.prefetch_factor,
            persistent_workers=given.persistent_workers,
            # A loader that is made again after a checkpoint must not draw from the global generator.
            generator=torch.Generator().manual_seed(seed),
            tokens_per_sample=self.options.tokens_per_sample,
        )
        return self.loader

    def new_scheduler(self, trainer: Any, **more: Any) -> Any:
        """A scheduler that starts with this trainer's batch size."""
        config = self.options.schedule
        starts_by_itself = getattr(config, "starts_by_itself", False)
        initial = None if starts_by_itself else trainer.get_total_train_batch_size(trainer.args)
        return batchfit.BatchSizeScheduler(
            config, initial, tokens_per_sample=self.options.tokens_per_sample, **more
        )

    def find_largest_batch(self, plan: Any, *, epochs: int, steps: int, length: int) -> None:
        """Keep the largest global batch of the schedule in this run."""
        sizes = []
        for part in range(_SCHEDULE_POINTS + 1):
            done = part / _SCHEDULE_POINTS
            at = {"epoch": int(done * max(epochs - 1, 0)), "step": int(done * steps)}
            sizes.append(plan.get_batch_size(**at, samples=int(done * epochs * length)))
        self.largest = max(sizes)

    def follow_schedule(self, trainer: Any, optimizer: Any) -> None:
        """Start the schedule of loader and learning rate, or resume it from the checkpoint."""
        rule = self.options.lr
        rates = {} if rule is None else {
            "lr": rule, "optimizer": optimizer, "lr_scheduler": trainer.lr_scheduler, "updates_known": True
        }  # fmt: skip
        self.scheduler = self.new_scheduler(trainer, loader=self.loader, on_event=self._add_log, **rates)
        if "schedule" in self.saved:
            self.scheduler.load_state_dict(self.saved["schedule"])
        self.logs.append({"batch_size": self.scheduler.batch_size})

    def first_epoch(self) -> int:
        """The epoch that a resumed training begins with."""
        return int(self.loader.state_dict()["epoch"]) + is_at_end(self.loader)

    def enter_epoch(self, epoch: int) -> None:
        """Set the loader to an epoch, and count the batches that are left; None for a stream."""
        if self.loader.progress.epoch != epoch:
            # The Trainer takes no batch after the last one, so the loader does not know that the epoch ended.
            state = {**self.loader.state_dict(), "epoch": epoch, "position": 0, "batches": 0}
            self.loader.load_state_dict({**state, "sampler": None} if "sampler" in state else state)
        if self.scheduler.config.unit == "epoch":
            self.scheduler.step(epoch)
        try:
            self._left_in_epoch = len(self.loader) - int(self.loader.state_dict()["batches"])
        except TypeError:
            self._left_in_epoch = None

    def ends_epoch(self, batches: int) -> bool:
        """Count batches that the Trainer has taken; True with the last one of a schedule's epoch."""
        if self._left_in_epoch is None:
            return False
        self._left_in_epoch -= batches
        return self._left_in_epoch <= 0

    def count_batches(self, loader: Any, *, ranks: int) -> None:
        """Count the batches of the user's size per epoch: the Trainer counts epochs in them."""
        self._per_epoch = None
        samples = _length_of(getattr(loader, "dataset", None))
        whole = _length_of(loader)
        if self.given is None or samples is None or whole is None:
            return
        size, accumulated = self.given
        batches = -(-samples // (size * ranks))
        if -(-batches // accumulated) == whole:  # otherwise batches are dropped, or it is another loader
            self._per_epoch = whole, batches

    def epochs_at(self, counted: float) -> float:
        """The epochs that the Trainer would count with batches of the user's size; `counted` by steps."""
        if self.loader is not None and not isinstance(self.loader.dataset, IterableDataset):
            state = self.loader.state_dict()
            length = len(self.loader.dataset if self.loader.sampler is None else self.loader.sampler)
            return int(state["epoch"]) + int(state["position"]) / length
        if self.loader is not None or self.given is None or self._per_epoch is None:
            return counted
        whole, batches = self._per_epoch
        epoch, steps = divmod(round(counted * whole), whole)
        return epoch + min(1.0, steps * self.given[1] / batches)

    def _add_log(self, event: Any) -> None:
        entry: dict[str, float] = {"batch_size": event.size_after}
        entry.update({f"lr_factor_{n}": one for n, one in enumerate(event.lr_factors) if one != 1.0})
        self.logs.append(entry)

    # --- checkpoints

    def save(self, folder: str, trainer: Any) -> None:
        """Write what a later run needs to resume exactly here."""
        state: dict[str, Any] = {
            "version": _VERSION,
            "batch_size": trainer.get_total_train_batch_size(trainer.args),
            "microbatch_size": self.microbatch_size,
            "generation_size": self.generation_size,
            "is_ragged": self.is_ragged,
            "device": _name_of(trainer.args.device),
        }
        if self.microbatcher is not None:
            state["sizes"] = self.microbatcher.state_dict()
        if self.loader is not None:
            state["loader"], state["schedule"] = self.loader.state_dict(), self.scheduler.state_dict()
        torch.save(state, os.path.join(folder, FILE))

    def load(self, folder: str, trainer: Any) -> None:
        """Read what `save` wrote; refuse a checkpoint after which samples would be lost or repeated."""
        path = os.path.join(folder, FILE)
        if not os.path.isfile(path):
            if self.options.schedule is not None:
                raise BatchfitError(
                    f"{path} is missing: the checkpoint was made without a schedule, so it is not known "
                    "which samples it has seen. Resume without schedule=, or start a new run"
                )
            return
        self.saved = torch.load(path, map_location="cpu", weights_only=True)
        if self.saved.get("version") != _VERSION:
            raise BatchfitError(f"{path} has version {self.saved.get('version')!r}, not {_VERSION}")
        if self.saved["device"] == _name_of(trainer.args.device):
            self.microbatch_size, self.is_ragged = self.saved["microbatch_size"], self.saved["is_ragged"]
            self.generation_size = self.saved.get("generation_size")
        was, now = self.saved["batch_size"], trainer.get_total_train_batch_size(trainer.args)
        scheduled = "loader" in self.saved
        if scheduled != (self.options.schedule is not None):
            with_or_without = "with" if scheduled else "without"
            raise BatchfitError(
                f"the checkpoint was made {with_or_without} a schedule, which counts samples in another way: "
                f"resume {with_or_without} schedule="
            )
        if scheduled:
            self.loader.load_state_dict(self.saved["loader"])
        elif was != now and not trainer.args.ignore_data_skip:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps * ranks must be {was}, as in the "
                f"checkpoint, not {now}: Trainer counts batches, so samples would be lost or repeated. Pass "
                "ignore_data_skip=True to begin the epoch again, or change sizes with schedule="
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, an OOM that ends the training leaves a memory snapshot, if that was asked for."""
        with ExitStack() as stack:
            if self.options.record_oom is not None:
                self.recorder = stack.enter_context(batchfit.record_oom(self.options.record_oom))
                stack.callback(setattr, self, "recorder", None)
            yield

    def end(self) -> None:
        """Drop the state of a training that has ended or failed."""
        self._restore_step()
        if self.scheduler is not None:
            self.scheduler.close()
        self.microbatcher = self.scheduler = self.loader = self.collate_fn = None
        self.saved, self.given, self.checkpoint = {}, None, None
        self.has_begun, self.steps, self._left_in_epoch = False, 0, None
        self._microbatchers.clear()
        self.logs.clear()
        self.microbatch_size, self.is_ragged = None, False
        self.generation_size = self.phases = None


def _length_of(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
