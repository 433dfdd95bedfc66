"""What is read from the loader that a Trainer trains with, and which loaders are refused.

Rules
- The batch of an optimizer step is the one that was asked for: a loader that has a size of its own, where
  batches would be accumulated, is refused, not read as if it had another.
"""

from __future__ import annotations

from typing import Any

from batchfit.errors import BatchfitError


def batch_size_of(loader: Any) -> int | None:
    """The samples of one of a loader's batches on this rank; None: it does not say."""
    sampler = getattr(loader, "batch_sampler", None)
    for holder in (
        loader,
        sampler,
        getattr(sampler, "batch_sampler", None),
    ):  # the last: in Accelerate's shard
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

    `given` and `accumulated` are the user's: the trainer was told to load `given * accumulated` at once.
    """
    asked, size = given * accumulated, batch_size_of(loader)
    if getattr(trainer.accelerator, "split_batches", False):  # sizes are of all ranks there, and shared out
        return asked
    if accumulated == 1:
        return asked if size is None else size
    if size == asked:
        return asked
    instead = (
        "Make it with batch_size=self.args.train_batch_size, which is that size while batchfit trains, or "
        "set per_device_train_batch_size to a whole batch and gradient_accumulation_steps=1: batchfit cuts "
        "it as memory asks for"
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
