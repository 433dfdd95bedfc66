"""One step of a trial: the Trainer's own, with a batch of any size, without logs or callbacks.

Rules
- A step is what Lightning runs for a batch: the module's transfer hooks, its step through strategy and
  precision, backward, clipping and the optimizer's step, automatic or manual.
- The attribute that holds the batch size has the size of the trial while it runs.
- Callbacks, loggers, logged values and progress counters are put aside for the whole search and come back as
  they were. What the step changes of the module, the optimizers and the scaler is the workload's state.
"""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import batchfit
from batchfit.integrations.lightning.framework import call_step, part
from batchfit.integrations.lightning.loaders import on_device
from batchfit.integrations.lightning.strategies import is_sharded

Source = Callable[[int], Any]
Move = Callable[[int], None] | None  # sets the attribute that holds the batch size, where there is one


def training(trainer: Any, source: Source, move: Move) -> batchfit.Workload:
    """A step of `fit`."""
    loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
    hook = part(trainer, "trainer.call")._call_lightning_module_hook

    def step(size: int) -> None:
        if move is not None:
            move(size)
        # The last batch moves the optimizer, and has the gradients of the one before it beside its own.
        last = 1 if module.automatic_optimization and trainer.accumulate_grad_batches > 1 else 0
        progress = loop.batch_progress
        for index in range(last + 1):
            batch = on_device(trainer, source(size), 0)
            progress.is_last_batch, progress.current.ready = index == last, 1 - index
            with _logged(trainer, loop, batch):
                hook(trainer, "on_train_batch_start", batch, index)
                kwargs = loop._build_kwargs(OrderedDict(), batch, index)
                if module.automatic_optimization:
                    output = loop.automatic_optimization.run(trainer.optimizers[0], index, kwargs)
                else:
                    output = loop.manual_optimization.run(kwargs)
                hook(trainer, "on_train_batch_end", output, batch, index)

    return batchfit.Workload(step, state=_state(trainer))


def evaluation(
    trainer: Any, loop: Any, name: str, sources: Sequence[Source], move: Move
) -> batchfit.Workload:
    """A step of `validate`, `test` or `predict`: one batch of each loader."""
    several = len(sources) > 1
    # Parameters that FSDP2 gathers in inference mode could not be trained afterwards.
    quiet = torch.inference_mode if loop.inference_mode and not is_sharded(trainer) else torch.no_grad

    def step(size: int) -> None:
        if move is not None:
            move(size)
        with quiet():
            for index, source in enumerate(sources):
                batch = on_device(trainer, source(size), index)
                with _logged(trainer, loop, batch, index if several else None):
                    kwargs = loop._build_kwargs(batch, 0, index if several else None)
                    call_step(trainer, name, *loop._build_step_args_from_hook_kwargs(kwargs, name))

    return batchfit.Workload(step, state=_state(trainer))


def _state(trainer: Any) -> list[object]:
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    known = [trainer.strategy.model, *trainer.optimizers, *schedulers]
    return known if scaler is None else [*known, scaler]


@contextmanager
def _logged(trainer: Any, loop: Any, batch: Any, dataloader_idx: int | None = None) -> Iterator[None]:
    """`self.log` works, values are kept as in the loop, and the batch is released afterwards."""
    if loop._results is None:  # predict
        yield
        return
    trainer._logger_connector.on_batch_start(batch, dataloader_idx)
    try:
        yield
        trainer._logger_connector.on_batch_end()
    finally:
        loop._results.batch = None


@contextmanager
def undisturbed(trainer: Any, loop: Any) -> Iterator[None]:
    """Hide what runs inside from all but the module, and restore the Trainer's own counters."""
    fits = loop is trainer.fit_loop
    keeper = loop.epoch_loop if fits else loop
    connector, module = trainer._logger_connector, trainer.lightning_module
    held = [
        *((connector, name) for name in ("_first_loop_iter", "_current_fx")),
        *((connector, f"_{kind}_metrics") for kind in ("progress_bar", "callback", "logged")),
        (module, "_current_fx_name"),
        (keeper, "_results"),
        (keeper, "batch_progress"),
    ]
    if fits:
        held.append((keeper.automatic_optimization, "optim_progress"))
        held.append((keeper.manual_optimization, "optim_step_progress"))
    before = [(owner, name, getattr(owner, name)) for owner, name in held]
    callbacks, loggers = trainer.callbacks, trainer.loggers
    for owner, name, value in before:
        # Copies for the trials: the objects themselves stay as they are, for those who hold them.
        setattr(owner, name, copy.deepcopy(value) if name.endswith("progress") else copy.copy(value))
    if keeper._results is not None:
        keeper._results = type(keeper._results)(training=fits)
    trainer.callbacks = []
    trainer.loggers = [part(trainer, "loggers.logger").DummyLogger()] if loggers else []
    try:
        # Evaluation is in inference mode already, where nothing could be restored.
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        trainer.callbacks, trainer.loggers = callbacks, loggers
        for owner, name, value in before:
            setattr(owner, name, value)
        gc.collect()  # values logged in trials are in cycles, and would count beside the run's own
