"""What batchfit keeps while a Trainer trains: what it cuts batches with, what it found, where the data is.

Rules
- Whatever is decided here is the same on all ranks, or one rank's own and harmless (microbatch sizes).
- A checkpoint holds all of it in one small file beside the Trainer's own; a run that goes on from there has
  the sizes, the learning rates and the very next samples of one that was never stopped.
- Nothing of it outlives training except what is asked for: `fit`, and what evaluation has learned.
"""

from __future__ import annotations

import functools
import os
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.transformers.counters import kept
from batchfit.integrations.transformers.epochs import is_at_end
from batchfit.integrations.transformers.loaders import order_of
from batchfit.integrations.transformers.losses import count_labels, shifts_labels
from batchfit.integrations.transformers.options import Options

FILE = "batchfit.pt"
_VERSION = 1
_LOOKS = 256
_ADVICE = {  # what users of a Trainer can set, where a loss is not what it was taken for
    "sum": "Set trainer.loss_is_scaled_for_ga = True, which says that losses of parts of a batch add up",
    "mean": "Set trainer.loss_is_scaled_for_ga = False, which says that it is a mean",
    "compared": "Use a per_device_train_batch_size that fits whole, a cached loss (of sentence-transformers: "
    "CachedMultipleNegativesRankingLoss), or Microbatcher.backward_cached in a loop of your own, which is "
    "exact. compared='warn' cuts it all the same",
}


@final
class TrainerRun:
    """One trainer's batchfit: its options, and what lives from `train()` to its end."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.fit: Any = None  # the FitResult of the last search
        self.microbatch_size: int | None = None
        self.is_ragged = False
        self.sums: bool | None = None  # parts of a batch's loss add up; None: not known yet
        self.looks = 0  # how often that was tried
        self.warned = False  # of a loss of which it could not be told
        self.evaluates = False  # inside an evaluation's microbatch, which asks for the number of items
        self.asked = False
        self.items: Any = None
        self.searches = False
        self.is_quiet = False  # steps run that are not the training's: nobody is told what they log
        self.logs: list[dict[str, float]] = []  # for the next step's entry in `log_history`
        self.given: tuple[int, int] | None = None  # the user's sizes: of a device, and batches accumulated
        self.checkpoint: str | None = None  # the folder that training goes on from
        self.has_begun = False  # what is done once per training, when the model is prepared
        self.steps = 0  # of a training with a schedule
        self.local = 0  # one rank's batch, without a schedule
        self.largest = 0  # the largest batch of the schedule, over all ranks
        self.saved: dict[str, Any] = {}
        self.loader: Any = None
        self.collate_fn: Any = None  # of a loader that is ours
        self.drop_last = False
        self.scheduler: Any = None
        self.cutter: Any = None
        self._cutters: dict[bool, Any] = {}  # whether parts add up: `cutter`
        self._evaluators: dict[int, Any] = {}
        self._held: list[Any] | None = None  # what a step has logged so far
        self._steps = False
        self._guarded: tuple[Any, Any, Any] | None = None  # the optimizer, its step, and what that replaced
        self._left_in_epoch: int | None = None  # batches; of a training with a schedule
        self._per_epoch: tuple[int, int] | None = None  # optimizer steps, and batches of the user's size

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the trainer needs: what lives in one training stays with it."""
        return {"options": self.options, "fit": self.fit, "sums": self.sums, "looks": self.looks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"])
        vars(self).update(state)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, `trainer.log` of the user's own step does nothing: it is a trial, or a look at the loss."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    # --- cutting

    def cutter_of(self, trainer: Any, model: nn.Module, *, sums: bool) -> Any:
        """What cuts such training batches, made at the first one."""
        self.cutter = self._cutters.get(sums)
        if self.cutter is None:
            options = self.options
            weight = options.weight or functools.partial(count_labels, shifted=shifts_labels(trainer))
            self.cutter = self._cutters[sums] = batchfit.Microbatcher(
                model,
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
            self._watch(trainer, self.cutter)
            others = [one for one in self._cutters.values() if one is not self.cutter]
            known = others[0].state_dict() if others else self.saved.get("sizes")
            if known is not None:
                self.cutter.load_state_dict(known)
        return self.cutter

    def _watch(self, trainer: Any, cutter: Any) -> None:
        """Let what a try counts and logs be undone with it."""
        cutter._also_restores(lambda: kept(trainer))
        cutter._also_restores(lambda: functools.partial(self._forget_logs, len(self._held or ())))

    def _forget_logs(self, count: int) -> None:
        if self._held is not None:
            del self._held[count:]

    @contextmanager
    def holding_logs(self, log: Callable[..., None]) -> Iterator[None]:
        """Inside, what a step logs waits until the step is done: tries that fail are heard by nobody."""
        held, self._held = self._held, []
        try:
            yield
        except BaseException:
            self._held = held
            raise
        logs, self._held = self._held, held
        for given, named in logs:
            log(*given, **named)

    def holds(self, *given: Any, **named: Any) -> bool:
        """Whether this entry of the log is not for now."""
        if not self.is_quiet and self._held is not None:
            self._held.append((given, named))
        return self.is_quiet or self._held is not None

    def evaluator_of(self, trainer: Any, model: nn.Module) -> Any:
        """What cuts evaluation batches; kept, since training and evaluation take turns."""
        found = self._evaluators.get(id(model))
        if found is None:
            self._evaluators.clear()
            found = self._evaluators[id(model)] = batchfit.Microbatcher(model, budget=self.options.budget)
            self._watch(trainer, found)
        return found

    def drop_evaluators(self, *models: nn.Module) -> None:
        """Let go of all models but these: one from before would take memory from the search."""
        kept = {id(model) for model in models}
        self._evaluators = {key: one for key, one in self._evaluators.items() if key in kept}

    def guard(self, optimizer: Any) -> None:
        """Let the optimizer's step be one that an OOM cannot leave half done, until training ends.

        As a bound method, which is what LR schedulers, made before or after, take `step` for.
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
            if self._steps or self.searches or self.cutter is None or closures:
                return step(*args, **kwargs)
            self._steps = True
            try:
                return self.cutter.step(optimizer)
            finally:
                self._steps = False

        step._batchfit_run = self  # type: ignore[attr-defined]
        optimizer.step = guarded = types.MethodType(step, optimizer)
        self._guarded = weakref.ref(optimizer), guarded.__func__, own

    def _unguard(self) -> None:
        """The optimizer's own step again, unless somebody has wrapped ours: that calls the plain one now."""
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
        """A loader whose size can change, of what the Trainer's own would load."""
        streams = isinstance(given.dataset, IterableDataset)
        if streams and trainer.args.world_size > 1:
            raise BatchfitError(
                "a schedule needs a dataset with a length on several ranks: an iterable one is read by "
                "Accelerate in batches of one size. Use a map-style dataset, or one process"
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
            # Its own: one that is opened again after a checkpoint must not draw from the model's numbers.
            generator=torch.Generator().manual_seed(seed),
            tokens_per_sample=self.options.tokens_per_sample,
        )
        return self.loader

    def new_scheduler(self, trainer: Any, **more: Any) -> Any:
        """The schedule from this trainer's batch on."""
        config = self.options.schedule
        starts_by_itself = getattr(config, "starts_by_itself", False)
        initial = None if starts_by_itself else trainer.get_total_train_batch_size(trainer.args)
        return batchfit.BatchSizeScheduler(
            config, initial, tokens_per_sample=self.options.tokens_per_sample, **more
        )

    def find_largest_batch(self, plan: Any, *, epochs: int, steps: int, length: int) -> None:
        """Note the largest batch that the schedule asks for in this run."""
        sizes = []
        for part in range(_LOOKS + 1):
            done = part / _LOOKS
            at = {"epoch": int(done * max(epochs - 1, 0)), "step": int(done * steps)}
            sizes.append(plan.get_batch_size(**at, samples=int(done * epochs * length)))
        self.largest = max(sizes)

    def follow_schedule(self, trainer: Any, optimizer: Any) -> None:
        """Let loader and learning rate follow from here on, or from the checkpoint's place on."""
        rule = self.options.lr
        rates = {} if rule is None else {
            "lr": rule, "optimizer": optimizer, "lr_scheduler": trainer.lr_scheduler, "updates_known": True
        }  # fmt: skip
        self.scheduler = self.new_scheduler(trainer, loader=self.loader, on_event=self._note, **rates)
        if "schedule" in self.saved:
            self.scheduler.load_state_dict(self.saved["schedule"])
        self.logs.append({"batch_size": self.scheduler.batch_size})

    def first_epoch(self) -> int:
        """The epoch that a resumed training begins with."""
        return int(self.loader.state_dict()["epoch"]) + is_at_end(self.loader)

    def enter_epoch(self, epoch: int) -> None:
        """Go to an epoch, and count the batches that it still has: a stream does not know."""
        if self.loader.progress.epoch != epoch:
            # The Trainer asks for no batch after the last one, so the loader has not seen the epoch end.
            place = {**self.loader.state_dict(), "epoch": epoch, "position": 0, "batches": 0}
            self.loader.load_state_dict({**place, "sampler": None} if "sampler" in place else place)
        if self.scheduler.config.unit == "epoch":
            self.scheduler.step(epoch)
        try:
            self._left_in_epoch = len(self.loader) - int(self.loader.state_dict()["batches"])
        except TypeError:
            self._left_in_epoch = None

    def ends_epoch(self, batches: int) -> bool:
        """Count batches that the Trainer has taken; whether they are the last of a schedule's epoch."""
        if self._left_in_epoch is None:
            return False
        self._left_in_epoch -= batches
        return self._left_in_epoch <= 0

    def count_batches(self, loader: Any, *, ranks: int) -> None:
        """Note how many batches of the user's size an epoch has: the Trainer counts epochs in them."""
        self._per_epoch = None
        samples = _length_of(getattr(loader, "dataset", None))
        whole = _length_of(loader)
        if self.given is None or samples is None or whole is None:
            return
        size, accumulated = self.given
        batches = -(-samples // (size * ranks))
        if -(-batches // accumulated) == whole:  # otherwise some are left out, or it is another loader
            self._per_epoch = whole, batches

    def epochs_at(self, told: float) -> float:
        """How far the data has come, in epochs, where the Trainer counts optimizer steps as batches."""
        if self.loader is not None and not isinstance(self.loader.dataset, IterableDataset):
            place = self.loader.state_dict()
            length = len(self.loader.dataset if self.loader.sampler is None else self.loader.sampler)
            return int(place["epoch"]) + int(place["position"]) / length
        if self.loader is not None or self.given is None or self._per_epoch is None:
            return told
        whole, batches = self._per_epoch
        epoch, steps = divmod(round(told * whole), whole)
        return epoch + min(1.0, steps * self.given[1] / batches)

    def _note(self, event: Any) -> None:
        entry: dict[str, float] = {"batch_size": event.size_after}
        entry.update({f"lr_factor_{n}": one for n, one in enumerate(event.lr_factors) if one != 1.0})
        self.logs.append(entry)

    # --- checkpoints

    def save(self, folder: str, trainer: Any) -> None:
        """Write what a later run needs to go on exactly here."""
        state: dict[str, Any] = {
            "version": _VERSION,
            "batch_size": trainer.get_total_train_batch_size(trainer.args),
            "microbatch_size": self.microbatch_size,
            "is_ragged": self.is_ragged,
            "device": _name_of(trainer.args.device),
        }
        if self.cutter is not None:
            state["sizes"] = self.cutter.state_dict()
        if self.loader is not None:
            state["loader"], state["schedule"] = self.loader.state_dict(), self.scheduler.state_dict()
        torch.save(state, os.path.join(folder, FILE))

    def load(self, folder: str, trainer: Any) -> None:
        """Read it, and refuse a checkpoint after which samples would be lost or repeated."""
        path = os.path.join(folder, FILE)
        if not os.path.isfile(path):
            if self.options.schedule is not None:
                raise BatchfitError(
                    f"{path} is missing: the checkpoint was made without a schedule, so nobody knows which "
                    "samples it has seen. Go on without schedule=, or start anew"
                )
            return
        self.saved = torch.load(path, map_location="cpu", weights_only=True)
        if self.saved.get("version") != _VERSION:
            raise BatchfitError(f"{path} has version {self.saved.get('version')!r}, not {_VERSION}")
        if self.saved["device"] == _name_of(trainer.args.device):
            self.microbatch_size, self.is_ragged = self.saved["microbatch_size"], self.saved["is_ragged"]
        was, now = self.saved["batch_size"], trainer.get_total_train_batch_size(trainer.args)
        scheduled = "loader" in self.saved
        if scheduled != (self.options.schedule is not None):
            with_or_without = "with" if scheduled else "without"
            raise BatchfitError(
                f"the checkpoint was made {with_or_without} a schedule, and samples are counted another way "
                f"there: go on {with_or_without} schedule="
            )
        if scheduled:
            self.loader.load_state_dict(self.saved["loader"])
        elif was != now and not trainer.args.ignore_data_skip:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps * ranks must be {was}, as in the "
                f"checkpoint, not {now}: Trainer counts batches, so samples would be lost or repeated. Pass "
                "ignore_data_skip=True to begin the epoch anew, or change sizes with schedule="
            )

    def end(self) -> None:
        """Training is over, or has failed."""
        self._unguard()
        if self.scheduler is not None:
            self.scheduler.close()
        self.cutter = self.scheduler = self.loader = self.collate_fn = None
        self.saved, self.given, self.checkpoint = {}, None, None
        self.has_begun, self.steps, self._left_in_epoch = False, 0, None
        self._cutters.clear()
        self.logs.clear()
        self.microbatch_size, self.is_ragged = None, False


def _length_of(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
