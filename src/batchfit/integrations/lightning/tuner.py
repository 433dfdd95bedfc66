"""A search without a run: Lightning's `Tuner`, with batchfit's search."""

from __future__ import annotations

from typing import Any

from batchfit.integrations.lightning.finder import BatchSizeFinder
from batchfit.integrations.lightning.framework import part, set_up_for


class Tuner:
    """Finds a batch size, or a learning rate, without training: Lightning's `Tuner` with batchfit's search.

        size = Tuner(trainer).scale_batch_size(module)

    Args:
        trainer: the Trainer that will train.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def scale_batch_size(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: Any = None,
        method: str = "fit",
        mode: str = "guided",
        steps_per_trial: int = 3,
        init_val: int | None = None,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.0,
        max_val: int = 8192,
        **options: Any,
    ) -> int | None:
        """The largest batch size of one process that runs, set in the module or datamodule, too.

        Args:
            model: the module.
            train_dataloaders: with `method="fit"`, as `fit` takes them.
            val_dataloaders: with `method="fit"`, as `fit` takes them.
            dataloaders: with the other methods.
            datamodule: in place of loaders.
            method: "fit", "validate", "test" or "predict".
            mode: how sizes are chosen, as in `BatchSizeFinder`.
            steps_per_trial: steps of each trial.
            init_val: the first size to try.
            max_trials: how many trials there may be.
            batch_arg_name: the attribute that holds the size.
            margin: this share of the size is given up.
            max_val: the largest size to try.
            **options: the other keywords of `BatchSizeFinder`.

        Returns:
            The batch size of one process.
        """
        finder = BatchSizeFinder(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, **options
        )
        _refuse_second(self._trainer)
        given = {"train_dataloaders": train_dataloaders, "dataloaders": dataloaders, "datamodule": datamodule}
        set_up_for(finder, self._trainer, model, method, given, val_dataloaders)
        return finder.optimal_batch_size

    def lr_find(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's own search for a learning rate.

        Args:
            *args: as Lightning's `Tuner.lr_find` takes them.
            **kwargs: as Lightning's `Tuner.lr_find` takes them.
        """
        return part(self._trainer, "tuner.tuning").Tuner(self._trainer).lr_find(*args, **kwargs)


def _refuse_second(trainer: Any) -> None:
    theirs = part(trainer, "callbacks").BatchSizeFinder
    if any(isinstance(one, (BatchSizeFinder, theirs)) for one in trainer.callbacks):
        raise ValueError(
            "callbacks must not hold a BatchSizeFinder with Tuner.scale_batch_size: keep one of them"
        )
