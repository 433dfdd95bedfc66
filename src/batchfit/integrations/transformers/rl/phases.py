"""The phases of a trainer that generates, each with a Microbatcher: completions, log-probabilities, the loss.

Rules: their peaks differ, so each phase learns sizes of its own. What is learned lives for one training; the
size that a search found for generation is in a checkpoint, beside that of the loss phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch

import batchfit
from batchfit.integrations.transformers.rl.loss_phase import HeldBatch, LossStep, is_known_loss
from batchfit.integrations.transformers.rl.metrics import MicrobatchMetrics

_ADVICE = {  # for users of a trainer whose own loss is not one of TRL's
    "compared": "Use a per_device_train_batch_size that fits whole. compared='warn' cuts it all the same",
    "mean": "Override compute_loss so that it is divided as TRL's loss_type is",
    "sum": "Override compute_loss so that it is divided as TRL's loss_type is",
}


@final
class Phases:
    """The Microbatchers of one trainer that generates."""

    def __init__(self, trainer: Any) -> None:
        self.metrics = MicrobatchMetrics(trainer)
        self.step: LossStep | None = None  # the training step that is running
        self.held: list[HeldBatch] = []  # batches that wait for the last one of their optimizer step
        self.replayed: Mapping[str, torch.Tensor] | None = None  # log-probabilities that are there already
        self._options = trainer._batchfit.options
        self._loss: Any = None
        self._without_gradients: dict[tuple[str, int, int | None], Any] = {}

    def loss_microbatcher(self, trainer: Any, model: Any) -> Any:
        """The Microbatcher of the loss phase."""
        run, options = trainer._batchfit, self._options
        if self._loss is None:
            most = trainer.args.per_device_train_batch_size  # as many at once as without batchfit
            if run.microbatch_size is not None and not run.is_ragged:
                most = min(most, run.microbatch_size)
            self._loss = batchfit.Microbatcher(
                model,
                reduction="sum",
                microbatch_size=most,
                budget=options.budget,
                sync=options.sync,
                # The loss of a group of completions is near zero, so that a check of few says little.
                compared="ignore" if is_known_loss(trainer) else options.compared,
                advice=_ADVICE,
            )
            run.undo_counts(trainer, self._loss)
            self._loss._also_restores(lambda: self.metrics.clear)
            if run.saved.get("sizes") is not None:
                self._loss.load_state_dict(run.saved["sizes"])
        run.microbatcher = self._loss
        return self._loss

    def without_gradients(
        self, phase: str, trainer: Any, model: Any, *, most: int | None = None, logs: str = ""
    ) -> Any:
        """The Microbatcher of a phase that trains nothing."""
        key = phase, id(model), most
        if key not in self._without_gradients:
            run = trainer._batchfit

            def logged(event: Any) -> None:
                if event.kind == "shrunk" and logs:
                    run.logs.append({"generation_out_of_memory": 1, logs: event.size_after})

            self._without_gradients[key] = batchfit.Microbatcher(
                model, budget=self._options.budget, microbatch_size=most, on_event=logged
            )
        return self._without_gradients[key]

    @contextmanager
    def replaying(self, found: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the loss gets these log-probabilities, and runs no model."""
        self.replayed = found
        try:
            yield
        finally:
            self.replayed = None


def phases_of(trainer: Any) -> Phases:
    """Those of a trainer, made when they are first needed."""
    run = trainer._batchfit
    if run.phases is None:
        run.phases = Phases(trainer)
    found: Phases = run.phases
    return found
