"""The search before training: the largest microbatch that the trainer's own step can run.

Rules
- The step is the real one: the user's `training_step` and `compute_loss`, autocast and checkpointing as the
  Trainer set them, its collator on the longest samples of its dataset, clipping, the optimizer's step.
- All of it is put back: model, optimizer, scaler, LR scheduler, `TrainerState`, random numbers.
- No size beyond one rank's batch is tried: more than that is never needed.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import batchfit
from batchfit.integrations.transformers.losses import count_labels, rows_of, shifts_labels
from batchfit.workload import batches

log = logging.getLogger("batchfit")

_LOOKED_AT = 64


def find_microbatch(trainer: Any, model: nn.Module, loader: Any, optimizer: Any) -> None:
    """Search, and leave the answer in the trainer's run."""
    run, args = trainer._batchfit, trainer.args
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        log.info("no search before training: an iterable dataset has no longest samples; sizes are learned")
        return
    samples = _Samples(dataset)
    collate = run.collate_fn or loader.collate_fn  # takes out columns that the model does not know, too
    largest = _largest(trainer)

    def loss_fn(model: Any, batch: Any) -> Any:
        if rows_of(batch) < largest:
            # All microbatches of a batch but the first run beside gradients.
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return trainer._batchfit_loss(trainer._batchfit_own_step, model, batch, _items(trainer, batch))

    source = batches(samples, collate_fn=collate)
    work = batchfit.training(
        model,
        optimizer,
        loss_fn,
        source,
        scaler=trainer.accelerator.scaler,
        clip_norm=args.max_grad_norm if args.max_grad_norm else None,
        # The Trainer's outputs die in its `compute_loss`, its batch in `training_step`.
        keep_outputs=False,
        state=[trainer.lr_scheduler, trainer.state, trainer.control, *run.options.state],
    )
    keywords = {"max_size": largest, "soak_steps": 0, "budget": run.options.budget, **run.options.search}
    run.searches = True
    try:
        run.fit = batchfit.find_batch_size(work, **keywords)
    finally:
        run.searches = False
    run.microbatch_size = run.fit.batch_size
    # On several ranks the size found holds for all batches: what one rank has learned is not the others'.
    with same_random_numbers():
        run.is_ragged = args.world_size == 1 and _is_ragged(samples, collate)
        widest = source(run.microbatch_size) if run.is_ragged else None
    if widest is not None:
        _teach(trainer, model, widest, is_most=run.microbatch_size < largest)
    run.logs.append({"microbatch_size": run.microbatch_size, "find_s": round(run.fit.elapsed_s, 3)})
    if trainer.is_world_process_zero():
        log.info(
            "microbatches of up to %d samples fit, found in %.1f s", run.microbatch_size, run.fit.elapsed_s
        )


def _largest(trainer: Any) -> int:
    """The most samples that one rank can get in a batch."""
    args, run = trainer.args, trainer._batchfit
    if run.options.schedule is None:
        return int(run.local)
    return int(-(-run.largest // args.world_size))


def _items(trainer: Any, batch: Any) -> Any:
    """What the Trainer would count as items; of this rank, since memory is all that matters."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not counts or "labels" not in batch:
        return None
    found = count_labels(batch, shifted=shifts_labels(trainer))
    return torch.as_tensor(found, device=batch["labels"].device)


def _is_ragged(samples: _Samples, collate: Any) -> bool:
    """Whether batches come in other widths than the longest samples': seen from a few samples."""
    count = min(len(samples), _LOOKED_AT)
    shapes = set()
    for number in range(count):
        batch = collate([samples[number * len(samples) // count]])
        values = batch.values() if hasattr(batch, "values") else batch
        shapes.add(tuple(tuple(one.shape[1:]) for one in values if isinstance(one, torch.Tensor)))
    return len(shapes) > 1


def _teach(trainer: Any, model: nn.Module, batch: Any, *, is_most: bool) -> None:
    """Let the cutter see the largest microbatch of the widest shape run, and know that it is the largest.

    Narrower ones then begin with more, by what that one took or by their width, and never get less. A search
    of one size, since that restores everything.
    """
    run, size = trainer._batchfit, rows_of(batch)
    items = _items(trainer, batch)
    sums = trainer._batchfit_sums(batch, items)
    cutter = run.cutter_of(trainer, model, sums=sums)
    step = trainer._batchfit_own_step

    def loss_of(micro: Any) -> Any:
        return trainer._batchfit_loss(step, model, micro, items if sums else None)

    def once(batch_size: int) -> None:
        model.zero_grad()
        cutter.backward(loss_of, batch, scaler=trainer.accelerator.scaler)
        model.zero_grad()

    state = [model, trainer.state, trainer.control, *run.options.state]
    work = batchfit.Workload(once, state=[*state, *filter(None, [trainer.accelerator.scaler])])
    limits: dict[str, Any] = {"min_size": size, "max_size": size, "steps": 2, "soak_steps": 0}
    batchfit.find_batch_size(work, budget=run.options.budget, **limits)
    if is_most:
        cutter._nothing_larger()


@contextmanager
def same_random_numbers(device: torch.device | None = None) -> Iterator[None]:
    """Datasets, collators and losses may draw some (masks, noise): as if they had not."""
    devices = [device] if device is not None and device.type == "cuda" else []
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])


@final
class _Samples(Dataset[Any]):
    """The dataset, with what its user can do about longer samples."""

    advice_on_longer = "a step with one that does not fit is done again in smaller pieces"

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self._dataset[index] for index in indices]
