"""What batchfit does at events of the Trainer."""

from __future__ import annotations

from typing import Any, final

import transformers


@final
class TrainingCallback(transformers.TrainerCallback):
    """Follows the schedule after each step, and writes what happened into `log_history`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._trainer._batchfit_begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._write()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        run = self._trainer._batchfit
        state.epoch = run.epochs_at(state.epoch)
        if run.scheduler is not None and run.scheduler.config.unit != "epoch":
            run.scheduler.step()
        self._write()

    def _write(self) -> None:
        logs = self._trainer._batchfit.logs
        while logs:
            # Not the trainer's own `log`, which may average and clear what it has counted since the last one.
            transformers.Trainer.log(self._trainer, logs.pop(0))
