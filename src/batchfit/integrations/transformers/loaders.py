"""Batch size and order of the loader that a Trainer trains with; which loaders are refused.

Rules
- The batch of an optimizer step has the size that the user set: where batches would be accumulated, a loader
  with a size of its own is refused.
- A schedule's loader has the dataset, sampler, collator and last batch of the given one. A given loader for
  which this does not hold is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from batchfit.errors import BatchfitError

_KNOWN = ("torch", "torchdata", "accelerate")  # whose loaders hand out what they load, and nothing else


def batch_size_of(loader: Any) -> int | None:
    """The samples per batch of a loader on this rank; None where it has no such attribute."""
    sampler = getattr(loader, "batch_sampler", None)
    in_shard = getattr(sampler, "batch_sampler", None)  # of Accelerate
    for holder in (loader, sampler, in_shard):
        size = getattr(holder, "batch_size", None)
        if type(size) is int:
            return size
        # transformers' BatchRebalanceSampler
        whole, ranks = getattr(holder, "effective_batch_size", None), getattr(holder, "dp_size", None)
        if type(whole) is int and type(ranks) is int:
            return whole // ranks
    return None


def local_batch(trainer: Any, loader: Any, *, given: int, accumulated: int) -> int:
    """One rank's batch of an optimizer step; an error where the loader would make it another one.

    `given` and `accumulated` are the user's: the trainer loads `given * accumulated` samples per batch.
    """
    asked, size = given * accumulated, batch_size_of(loader)
    if getattr(trainer.accelerator, "split_batches", False):  # a loader's size is the global one there
        return asked
    if accumulated == 1:
        return asked if size is None else size
    if size == asked:
        return asked
    instead = (
        "Make it with batch_size=self.args.train_batch_size, which is that size while batchfit trains, or "
        "set per_device_train_batch_size to a whole batch and gradient_accumulation_steps=1: batchfit cuts "
        "it as memory requires"
    )
    if size is None:
        raise BatchfitError(
            f"the size of the batches of get_train_dataloader's {type(loader).__name__} cannot be read, and "
            f"{accumulated} of them are to be one batch: batchfit loads that as one, of {given} * "
            f"{accumulated} = {asked} samples. {instead}"
        )
    raise BatchfitError(
        f"get_train_dataloader makes batches of {size}, not of per_device_train_batch_size * "
        f"gradient_accumulation_steps = {given} * {accumulated} = {asked}: batchfit loads a batch as one, so "
        f"an optimizer step would have {size} samples. {instead}"
    )


@final
@dataclass(frozen=True)
class LoaderOrder:
    """How a loader takes its samples: shuffled in each epoch, in the order of `sampler`, or in their own."""

    shuffle: bool
    sampler: Any
    drop_last: bool


def order_of(loader: Any) -> LoaderOrder:
    """How a loader whose size is to follow a schedule takes its samples."""
    kind = type(loader)
    iterates = getattr(kind, "__iter__", None)
    if getattr(iterates, "__module__", "").partition(".")[0] not in _KNOWN:
        raise BatchfitError(
            f"get_train_dataloader must return a torch DataLoader with a schedule, not {kind.__name__}, "
            "which has an __iter__ of its own: batchfit's loader makes the batches of other sizes, and "
            "would not run it. Put what it does into collate_fn or the dataset, or train without schedule="
        )
    if isinstance(loader.dataset, IterableDataset):
        return LoaderOrder(shuffle=False, sampler=None, drop_last=bool(loader.drop_last))
    batches = loader.batch_sampler
    if type(batches).__module__.partition(".")[0] == "accelerate":
        batches = getattr(batches, "batch_sampler", batches)  # our loader divides batches over ranks itself
    if type(batches) is not BatchSampler:
        raise BatchfitError(
            "get_train_dataloader must return a loader whose batches are cut from a sampler with a schedule, "
            f"not with {type(batches).__name__}: it makes batches of its own, and the schedule changes "
            "their size. Pass sampler=, or train without schedule="
        )
    sampler: Any = batches.sampler
    is_known = type(sampler).__module__.partition(".")[0] in _KNOWN
    takes_all = is_known and hasattr(sampler, "__len__") and len(sampler) == len(loader.dataset)
    shuffles = takes_all and isinstance(sampler, RandomSampler) and not sampler.replacement
    if shuffles or (takes_all and isinstance(sampler, SequentialSampler)):
        sampler = None
    return LoaderOrder(shuffle=shuffles, sampler=sampler, drop_last=bool(batches.drop_last))
