"""The search before training: the largest microbatch that the trainer's own step can run.

Rules
- The step is the real one: the user's `training_step` and `compute_loss`, autocast and checkpointing as the
  Trainer set them, its collator on the longest samples of its dataset, clipping, the optimizer's step.
- All of it is restored: model, optimizer, scaler, LR scheduler, `TrainerState`, random numbers.
- No size beyond one rank's batch is tried: more than that is never needed.
"""

from __future__ import annotations

import logging
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import batchfit
from batchfit.errors import ReadOnceError
from batchfit.integrations.transformers.comparing import compared_loss, run_compared
from batchfit.integrations.transformers.losses import count_labels, opened, rows_of, shifts_labels
from batchfit.integrations.transformers.probing import same_random_numbers
from batchfit.integrations.transformers.reduction import adds_up
from batchfit.integrations.trl.metrics import no_metrics
from batchfit.integrations.trl.search import search_batches

log = logging.getLogger("batchfit")

_MOST_SAMPLES = 64  # of which the widths are compared


def find_microbatch(trainer: Any, model: nn.Module, loader: Any, optimizer: Any) -> None:
    """Search, and keep the result in the trainer's `TrainerRun`."""
    run, args = trainer._batchfit, trainer.args
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        log.info("no search before training: the loader has no dataset; sizes are learned")
        return
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        try:
            dataset = batchfit.FirstSamples(dataset, run.options.stream_samples)
        except ReadOnceError as error:
            if error.samples_read:
                raise
            log.info("no search before training, sizes are learned: %s", error)
            return
    samples = _Samples(dataset)
    collate = run.collate_fn or loader.collate_fn  # which removes columns that the model does not take, too
    found = search_batches(trainer, samples, collate, _largest(trainer))
    source, restored, largest = found.source, found.restored, found.largest

    def loss_fn(model: Any, batch: Any) -> Any:
        rows = rows_of(batch)
        batch = restored(batch)
        if rows < largest:
            # All microbatches of a batch but the first run while gradients are allocated.
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        compared = run.comparing_step(trainer, model, batch)
        if compared is not None:
            return compared_loss(trainer, compared, model, compared.encode_to_train(batch))
        with no_metrics(trainer, model):
            return trainer._batchfit_loss(trainer._batchfit_own_step, model, batch, _items(trainer, batch))

    work = batchfit.training(
        model,
        optimizer,
        loss_fn,
        source,
        scaler=trainer.accelerator.scaler,
        clip_norm=args.max_grad_norm if args.max_grad_norm else None,
        # The Trainer's `compute_loss` frees the outputs, its `training_step` the batch.
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
    if found.is_packed:
        # Units may be more than the search had, of fewer tokens: no limit where all that it had fits.
        run.is_ragged = run.microbatch_size >= largest
        _log_found(trainer)
        return
    # On several ranks the size found holds for all batches: each rank would learn other sizes.
    with same_random_numbers():
        run.is_ragged = args.world_size == 1 and _is_ragged(samples, collate)
        widest = source(run.microbatch_size) if run.is_ragged else None
    if widest is not None:
        _learn_widest(trainer, model, restored(widest), is_most=run.microbatch_size < largest)
    _log_found(trainer)


def _log_found(trainer: Any) -> None:
    run = trainer._batchfit
    run.logs.append({"microbatch_size": run.microbatch_size, "find_s": round(run.fit.elapsed_s, 3)})
    if trainer.is_world_process_zero():
        made_of = f", with {run.fit.made_of}" if run.fit.made_of else ""
        log.info(
            "microbatches of up to %d samples fit, found in %.1f s%s",
            *(run.microbatch_size, run.fit.elapsed_s, made_of),
        )


def _largest(trainer: Any) -> int:
    """The largest batch of one rank."""
    args, run = trainer.args, trainer._batchfit
    if run.options.schedule is None:
        return int(run.local)
    return int(-(-run.largest // args.world_size))


def _items(trainer: Any, batch: Any) -> Any:
    """The number of items that the Trainer would count on this rank: only memory matters here."""
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if not counts or "labels" not in batch:
        return None
    found = count_labels(batch, shifted=shifts_labels(trainer))
    return torch.as_tensor(found, device=batch["labels"].device)


def _is_ragged(samples: _Samples, collate: Any) -> bool:
    """Whether batches have different widths, by the widths of a few samples."""
    count = min(len(samples), _MOST_SAMPLES)
    shapes = set()
    for number in range(count):
        batch = collate([samples[number * len(samples) // count]])
        values = batch.values() if hasattr(batch, "values") else batch
        shapes.add(tuple(tuple(one.shape[1:]) for one in values if isinstance(one, torch.Tensor)))
    return len(shapes) > 1


def _learn_widest(trainer: Any, model: nn.Module, inputs: Any, *, is_most: bool) -> None:
    """Run the largest microbatch of the widest shape, so that the Microbatcher knows it as the largest.

    Narrower batches then start with larger microbatches, by the memory of that one or by their width, and
    never get smaller ones. A search of one size runs it, since that restores everything.
    """
    run = trainer._batchfit
    compared = run.comparing_step(trainer, model, inputs)
    items = None if compared else _items(trainer, inputs)
    with same_random_numbers(trainer.args.device):
        batch = opened(trainer, model, inputs)
    size = rows_of(batch.cut)
    sums = not compared and adds_up(trainer, batch, items)
    microbatcher = run.microbatcher_of(trainer, model, sums=sums)
    step = trainer._batchfit_own_step

    def loss_of(micro: Any) -> Any:
        counted = items if sums else None
        return batch.loss(micro, lambda given: trainer._batchfit_loss(step, model, given, counted))

    def once(batch_size: int) -> None:
        model.zero_grad()
        if compared is not None:
            run_compared(trainer, compared, microbatcher, model, inputs)
        else:
            microbatcher.backward(loss_of, batch.cut, scaler=trainer.accelerator.scaler)
        model.zero_grad()

    state = [model, trainer.state, trainer.control, *run.options.state]
    work = batchfit.Workload(once, state=[*state, *filter(None, [trainer.accelerator.scaler])])
    limits: dict[str, Any] = {"min_size": size, "max_size": size, "steps": 2, "soak_steps": 0}
    batchfit.find_batch_size(work, budget=run.options.budget, **limits)
    if is_most:
        microbatcher._nothing_larger()


@final
class _Samples(Dataset[Any]):
    """The dataset, with advice for warnings about samples that are longer than those searched with."""

    advice_on_longer = "a step with one that does not fit is retried in smaller microbatches"

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def read_of(self) -> str:
        """What was read of a stream; empty for a dataset that has all its samples."""
        return getattr(self._dataset, "read_of", "")

    @property
    def has_more(self) -> bool:
        """Whether it is a stream that goes on after these samples."""
        return getattr(self._dataset, "has_more", False)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        fetch = getattr(self._dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self._dataset[index] for index in indices]
