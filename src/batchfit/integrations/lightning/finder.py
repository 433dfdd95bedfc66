"""BatchSizeFinder: Lightning's callback of that name, with batchfit's search.

Rules
- Every size that is set was run with the longest samples of the loaders, for all steps of the stability
  check (soak).
- A search leaves the run as it was: weights, optimizers, schedulers, scaler, random numbers, progress,
  logged values; no checkpoint is written for it. It may begin at any time.
- On several ranks all of them search together and get one size, that of a rank's own batch.
- A run that goes on from a checkpoint keeps the size that it had, where that still runs. A checkpoint counts
  for the `fit` that loads it, and for no other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

import batchfit
from batchfit.integrations.lightning.finder_checks import LEAST_STEPS, check_names, check_sizes, check_steps
from batchfit.integrations.lightning.framework import (
    Callback,
    check_budget,
    check_trainer,
    generators_now,
    log,
    overrides,
    part,
    put_before,
    refuse_beside,
    same_random_numbers,
    set_up_for,
    write,
)
from batchfit.integrations.lightning.loaders import (
    attribute_moving,
    check_resizable,
    generators_of,
    largest_batch,
    leaves,
    mapped,
    requested,
    set_size,
    size_of,
    source_of,
)
from batchfit.integrations.lightning.microbatches import OomProofTraining
from batchfit.integrations.lightning.trials import Move, Source, evaluation, training, undisturbed
from batchfit.messages import say

_MODES: Final = {"power": "powers", "binsearch": "bisect"}
_OURS: Final = ("guided", "bisect", "halve", "grow", "powers")
_REASONS: Final = {  # why the search ended, in this callback's words
    "max_size": "no larger one is allowed, by max_val or by the samples that the loaders have",
    "near_max_size": "hardly a larger one is allowed, by max_val or by the samples that the loaders have",
    "max_trials": "max_trials was reached, larger ones were not tried",
    "time_limit": "time_limit_s was reached, larger ones were not tried",
    "stored": "as stored, and it still runs",
}
_TOO_FEW: Final = "Expected more than 1 value per channel"  # torch's own words


class BatchSizeFinder(Callback):
    """Finds the largest batch size that runs, and sets it, before `fit`, `validate`, `test` or `predict`.

        finder = BatchSizeFinder()
        Trainer(callbacks=[finder]).fit(module, DataLoader(dataset, batch_size=32))
        print(finder.result)

    The size goes into `batch_arg_name` (of the module, its hparams or the datamodule) and into the loaders,
    wherever these come from. Under DDP it is the batch of each rank, as Lightning's loaders have it.

    Args:
        mode: "guided" (measured memory leads), "power" or "binsearch" as in Lightning, or another strategy of
            `batchfit.find_batch_size`.
        steps_per_trial: steps of each trial; 1 is run as 2, since optimizers allocate state in the first.
        init_val: the first size to try; default: 2 with "power" and "binsearch", otherwise the search's own.
        max_trials: how many trials there may be, not counting the stability check (soak). With 0 nothing
            runs: the size is `init_val`, or the present one.
        batch_arg_name: the attribute that holds the size; it need not exist. In a trial it has its size.
        margin: this share of the size is given up, and the smaller size is run too; not with "power".
        max_val: the largest size to try. A size never exceeds the samples that a rank has, nor those of its
            smallest loader with drop_last, of which nothing would be left.
        min_val: the smallest size to try.
        multiple_of: only multiples of this are tried.
        power_of_two: only powers of two are tried.
        budget: bytes that the program may use ("24GiB"); default: all that is free (of RAM a quarter, at most
            4 GiB).
        soak_steps: steps of the stability check (soak); 0 for none. Default: as in `find_batch_size`.
        tolerance: "guided" stops when about this share could still be gained.
        time_limit_s: end the search after that many seconds, with what it has.
        on_trial: called with each trial and the budget in bytes.
        key: a name under which the size is stored; one trial confirms it the next time.
        fresh: search even where a size is stored, or in a checkpoint that the run resumes from.
        make_batch: `make_batch(n)`, for loaders that have no dataset and collate function.

    Attributes:
        optimal_batch_size: the size found, of one process; None before the search.
        result: the `FitResult` of the search; None before it.
    """

    def __init__(
        self,
        mode: str = "guided",
        steps_per_trial: int = 3,
        init_val: int | None = None,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.0,
        max_val: int = 8192,
        *,
        min_val: int = 1,
        multiple_of: int = 1,
        power_of_two: bool = False,
        budget: int | str | None = None,
        soak_steps: int | None = None,
        tolerance: float = 0.02,
        time_limit_s: float | None = None,
        on_trial: Callable[[batchfit.Trial, int], object] | None = None,
        key: str | None = None,
        fresh: bool = False,
        make_batch: Callable[[int], Any] | None = None,
    ) -> None:
        if str(mode).lower() not in (*_MODES, *_OURS):
            raise ValueError(f"mode must be one of {', '.join((*_MODES, *_OURS))}, not {mode!r}")
        if type(margin) not in (int, float) or not 0 <= margin < 1:
            raise ValueError(f"margin must be a number from 0 to below 1, not {margin!r}")
        check_sizes(min_val, max_val, init_val, max_trials, multiple_of, power_of_two)
        check_steps(steps_per_trial, soak_steps, tolerance, time_limit_s)
        check_names(batch_arg_name, key, fresh)
        check_budget(budget)
        if make_batch is not None and not callable(make_batch):
            raise TypeError(f"make_batch must be a callable make_batch(n) or None, not {make_batch!r}")
        if on_trial is not None and not callable(on_trial):
            raise TypeError(f"on_trial must be a callable on_trial(trial, budget_bytes), not {on_trial!r}")
        self.optimal_batch_size: int | None = None
        self.result: batchfit.FitResult | None = None
        self._early_exit = False  # Lightning's Tuner sets it: the run ends with the search
        self._attribute = batch_arg_name
        self._margin = 0.0 if mode.lower() == "power" else margin
        self._max_size = max_val
        self._make_batch = make_batch
        self._fresh = fresh
        self._kept: dict[str, Any] | None = None  # of a checkpoint, for the `fit` that comes
        self._device: str | None = None
        self._max_trials, self._init_val = max_trials, init_val
        self._options: dict[str, Any] = {
            "strategy": _MODES.get(mode.lower(), mode.lower()),
            "steps": max(LEAST_STEPS, steps_per_trial),
            "start": 2 if init_val is None and mode.lower() in _MODES else init_val,
            "max_trials": max_trials + (soak_steps != 0),  # a search counts the soak
            "min_size": min_val,
            "multiple_of": multiple_of,
            "power_of_two": power_of_two,
            "budget": budget,
            "soak_steps": soak_steps,
            "tolerance": tolerance,
            "time_limit_s": time_limit_s,
            "on_trial": on_trial,
            "key": key,
            "fresh": fresh and key is not None,
            # A trace would go through Lightning's loops with tensors that have no values.
            "predict": False,
        }

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Refuse what contradicts the search, and come before Lightning's LearningRateFinder."""
        check_trainer(trainer, self)
        refuse_beside(trainer, self, "BatchSizeFinder", why="both would set the batch size. Keep one of them")
        put_before(trainer, self, "LearningRateFinder")

    def scale_batch_size(
        self,
        trainer: Any,
        pl_module: Any,
        *,
        method: str = "fit",
        train_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
    ) -> int | None:
        """Search now, set what was found, and return it.

        In a hook, the loaders of the run are searched with, and the run goes on. Outside of a run nothing is
        trained or evaluated: the Trainer is set up for `method`, and left after the search.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            method: "fit", "validate", "test" or "predict".
            train_dataloaders: loaders, as `fit` takes them.
            dataloaders: loaders, as the other methods take them.
            datamodule: in place of loaders.

        Returns:
            The batch size of one process.
        """
        if trainer._active_loop is None:
            given = {"train_dataloaders": train_dataloaders, "dataloaders": dataloaders}
            set_up_for(self, trainer, pl_module, method, {**given, "datamodule": datamodule})
        else:
            self._scale(trainer, pl_module)
            self._leave(trainer)
        return self.optimal_batch_size

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Before `fit`, and before its sanity check."""
        kept, self._kept = self._kept, None
        if trainer.fast_dev_run:
            log.warning("no batch size is searched for with fast_dev_run")
        else:
            self._scale(trainer, pl_module, None if self._fresh else kept)
        self._leave(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Before `validate`; not within `fit`."""
        if trainer.state.fn == "validate":
            self._before_evaluation(trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Before `test`."""
        self._before_evaluation(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Before `predict`."""
        self._before_evaluation(trainer, pl_module)

    def _before_evaluation(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fast_dev_run:
            self._leave(trainer)
        else:
            self.scale_batch_size(trainer, pl_module)

    def _leave(self, trainer: Any) -> None:
        """The search was all that was asked for: Lightning ends the run as after its own."""
        if self._early_exit:
            raise part(trainer, "utilities.exceptions")._TunerExitException

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Forget the checkpoint."""
        self._kept = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Forget the checkpoint, which a `test` has loaded too."""
        self._kept = None

    def state_dict(self) -> dict[str, Any]:
        """The size, and what it was found for, for a checkpoint."""
        return {
            "batch_size": self.optimal_batch_size,
            "device": self._device,
            "budget": self._options["budget"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The size of the run that goes on."""
        self.optimal_batch_size, self._device = state_dict["batch_size"], state_dict.get("device")
        self._kept = state_dict if self.optimal_batch_size is not None else None

    def _scale(self, trainer: Any, module: Any, checkpoint: dict[str, Any] | None = None) -> None:
        loop, restore = trainer._active_loop, generators_now()
        given, mode = requested(trainer, loop)
        with same_random_numbers(*generators_of(given)):
            check_resizable(trainer, loop, module, self._attribute, given)
            size = self._searched(trainer, loop, module, given, mode, checkpoint)
        restore()  # the user's function that made the loaders drew some, and will again
        self._set(trainer, loop, module, size)
        if self._early_exit and loop._combined_loader is None:
            with same_random_numbers(*generators_of(given)):
                loop.setup_data()  # the Trainer shows the loaders that have the size

    def _searched(
        self, trainer: Any, loop: Any, module: Any, given: Any, mode: str | None, checkpoint: Any
    ) -> int:
        if self._max_trials == 0:
            return self._unsearched(trainer, module, given)
        most = max(1, int(min(self._max_size, largest_batch(given, world_size=trainer.world_size))))
        device = _device_name(trainer)
        kept = None if checkpoint is None else self._still_asked_for(checkpoint, device, most)
        fit = self._found(trainer, loop, module, given, mode, most=most, kept=kept)
        self.result, self._device = fit, device
        write(trainer, {"batchfit/batch_size": fit.batch_size, "batchfit/find_s": fit.elapsed_s})
        why = "as in the checkpoint" if fit.batch_size == kept else _REASONS.get(fit.stopped_because, "")
        ranks = f" per process ({trainer.world_size} of them)" if trainer.world_size > 1 else ""
        say(f"batch size {fit.batch_size}{ranks} for {loop._data_source.name}{why and ': ' + why}")
        return fit.batch_size

    def _unsearched(self, trainer: Any, module: Any, given: Any) -> int:
        """Without a trial: the size that was asked for, or the present one."""
        sizes = [self._init_val]
        parsing = part(trainer, "utilities.parsing")
        if parsing.lightning_hasattr(module, self._attribute):
            sizes.append(parsing.lightning_getattr(module, self._attribute))
        sizes += [size_of(loader, world_size=trainer.world_size) for loader in leaves(given)]
        size = next((one for one in sizes if isinstance(one, int)), None)
        if size is None:
            raise ValueError("max_trials must be at least 1 where no size is known, not 0: or give init_val")
        say(f"batch size {size}: not tried, with max_trials=0")
        return size

    def _still_asked_for(self, checkpoint: dict[str, Any], device: str, most: int) -> int | None:
        """The size of a checkpoint, unless it was found for something else."""
        size, options = int(checkpoint["batch_size"]), self._options
        whys = {
            f"it was found on {checkpoint.get('device')}, and this is {device}": (
                checkpoint.get("device") != device
            ),
            f"its budget was {checkpoint.get('budget')}, and is {options['budget']}": (
                checkpoint.get("budget") != options["budget"]
            ),
            f"sizes are from {options['min_size']} to {most} now": not options["min_size"] <= size <= most,
        }
        for why, holds in whys.items():
            if holds:
                log.warning("the batch size %d of the checkpoint is searched for again: %s", size, why)
                return None
        return size

    def _set(self, trainer: Any, loop: Any, module: Any, size: int) -> None:
        asked = None if loop._combined_loader is None else loop.max_batches
        set_size(trainer, loop, module, self._attribute, size)
        self.optimal_batch_size = size
        if (
            loop is trainer.fit_loop
            and trainer.lr_scheduler_configs
            and asked not in (None, loop.max_batches)
        ):
            log.warning(
                "%s",
                f"an epoch had {asked} batches when the LR schedulers were made, and has {loop.max_batches} "
                "now: one that was given estimated_stepping_batches has the old number of steps",
            )

    def _found(
        self,
        trainer: Any,
        loop: Any,
        module: Any,
        given: Any,
        mode: str | None,
        *,
        most: int,
        kept: int | None,
    ) -> batchfit.FitResult:
        own = next((one for one in trainer.callbacks if isinstance(one, OomProofTraining)), None)
        with (
            undisturbed(trainer, loop),
            attribute_moving(trainer, module, self._attribute) as move,
            nullcontext() if own is None else own.paused(),
        ):
            work = self._workload(trainer, loop, module, given, mode, move)
            fit = self._largest(work, most) if kept is None else self._confirmed(work, kept)
            reduced = max(self._options["min_size"], int(fit.batch_size * (1 - self._margin)))
            if reduced < fit.batch_size != kept:
                fit = self._confirmed(work, reduced)
        return fit

    def _largest(self, work: batchfit.Workload, most: int) -> batchfit.FitResult:
        """The search; from 2 on where BatchNorm cannot train on one sample."""
        try:
            return batchfit.find_batch_size(work, max_size=most, **self._options)
        except ValueError as error:
            if _TOO_FEW not in str(error) or self._options["min_size"] > 1:
                raise
            if most < 2:
                _in_our_words(error)
                raise
        # Outside of `except`: the traceback would hold the tensors of the step.
        log.info("BatchNorm cannot train on one sample: sizes are tried from 2 on")
        options = {**self._options, "min_size": 2}
        return batchfit.find_batch_size(work, max_size=most, **options)

    def _confirmed(self, work: batchfit.Workload, size: int) -> batchfit.FitResult:
        """This size, run; a smaller one where it does not fit."""
        options = {**self._options, "strategy": "guided", "start": size, "key": None, "fresh": False}
        return batchfit.find_batch_size(work, max_size=size, **options)

    def _workload(
        self, trainer: Any, loop: Any, module: Any, given: Any, mode: str | None, move: Move
    ) -> batchfit.Workload:
        if loop is trainer.fit_loop:
            if self._make_batch is not None:
                return training(trainer, self._make_batch, move)
            sources = mapped(given, source_of)
            return training(trainer, lambda size: mapped(sources, lambda source: source(size)), move)
        name = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}[
            trainer.state.fn
        ]
        if not overrides(module, name, trainer) and name != "predict_step":
            raise ValueError(f"the module must have a {name} to find a batch size for it")
        each: list[Source]
        if self._make_batch is not None:
            each = [self._make_batch]
        elif mode in (None, "sequential"):
            each = [source_of(loader) for loader in leaves(given)]
        else:
            sources = mapped(given, source_of)
            each = [lambda size: mapped(sources, lambda source: source(size))]
        return evaluation(trainer, loop, name, each, move)


# The search would refuse these too, but in `fit`, and by its own names for them.


def _in_our_words(error: BaseException) -> None:
    """The hint of the search names an argument of its own."""
    notes = [note for note in getattr(error, "__notes__", ()) if "min_size" not in note]
    why = "batchfit: BatchNorm needs two samples, and max_val or the samples of the loaders allow one"
    error.__notes__ = [*notes, why]


def _device_name(trainer: Any) -> str:
    """The kind of device, the same on all ranks: that of the first."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return str(trainer.strategy.broadcast(name))
