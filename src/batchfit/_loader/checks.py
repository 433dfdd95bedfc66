"""Checks of a loader's arguments: what would hang or be silently wrong is refused, with what to do instead.

Rules
- A rank without a sample would hang DDP: that is an error now, or a warning now and an error when it comes.
- What would be silently wrong is refused: samplers that are sharded already, pipes that DataLoader treats
  in ways of their own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import IterDataPipe

from batchfit._arguments import check_whole
from batchfit._loader.batch_sampler import LoaderSettings
from batchfit._loader.pure.progress import Progress, SizeLimits
from batchfit._units import whole

_EPOCHS_LOOKED_AHEAD = 100
_MOST_WORKERS = 4096


def place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Which rank this is, of how many: as given, or by `torch.distributed`, or one process."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size must be given together, not {rank!r} and {world_size!r}")
    if rank is None or world_size is None:
        group = torch.distributed
        if not (group.is_available() and group.is_initialized()):
            return 0, 1
        return group.get_rank(), group.get_world_size()
    whole(world_size, name="world_size", at_least=1)
    if not 0 <= whole(rank, name="rank") < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank!r}")
    return rank, world_size


def check_workers(num_workers: Any, timeout: Any) -> None:
    """Refuse what DataLoader would stumble over: it compares the two with numbers."""
    check_whole("num_workers", num_workers, at_least=0, at_most=_MOST_WORKERS)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise ValueError(f"timeout must be a number of seconds of at least 0, not {timeout!r}")


def check_data(dataset: Any, streams: bool, shuffle: bool, sampler: Any, world_size: int) -> None:
    """Refuse what cannot be batched, before anything runs."""
    if isinstance(dataset, IterDataPipe):
        raise TypeError("dataset must be a map-style or iterable dataset, not an IterDataPipe")
    if streams:
        if shuffle or sampler is not None:
            raise ValueError(
                "shuffle and sampler must not be given for an iterable dataset: it has its own order"
            )
        return
    if not callable(getattr(dataset, "__getitem__", None)):
        raise TypeError(f"dataset must have __getitem__ or be an IterableDataset, not {dataset!r}")
    if sampler is None:
        if not callable(getattr(dataset, "__len__", None)):
            raise TypeError(f"dataset must have a length where no sampler is given, not {dataset!r}")
        if len(dataset) < world_size:
            raise ValueError(
                f"dataset must have at least {world_size} samples, one for each rank, not {len(dataset)!r}"
            )
        return
    if shuffle:
        raise ValueError(f"shuffle must be False where a sampler is given, not {shuffle!r}")
    if world_size > 1 and getattr(sampler, "num_replicas", 1) != 1:
        raise ValueError(
            "sampler must give the order of all ranks, the same on each, for the loader shares batches out "
            f"itself: shuffle=True is what DistributedSampler does, not {sampler!r}"
        )


def check_schedule(schedule: Any) -> None:
    """Refuse what no size can be asked of, with the way to one that it can."""
    if schedule is None or callable(getattr(schedule, "size_at", None)):
        return
    if isinstance(schedule, SizeLimits):
        way = f"not {type(schedule).__name__}: use BatchSizeScheduler(config, batch_size, loader=loader)"
    elif isinstance(schedule, str | Mapping):
        way = f"not {schedule!r}: batchfit.load_schedule(...) makes a schedule of it"
    elif callable(getattr(getattr(schedule, "plan", None), "size_at", None)):
        way = f"not {schedule!r}: use its plan, or give the loader to it"
    else:
        way = f"not {schedule!r}"
    raise TypeError(f"schedule must be one whose sizes are known beforehand, with size_at(progress), {way}")


def look_ahead(
    settings: LoaderSettings, progress: Progress, length: Callable[[], int], *, stacklevel: int
) -> None:
    """Warn if a schedule will leave a rank without a sample, as far as the beginnings of epochs show it."""
    schedule, each = settings.schedule, settings.tokens_per_sample
    if schedule is None or settings.world_size == 1:
        return
    try:
        samples_an_epoch = length()
    except TypeError:
        return
    step = progress.step
    for ahead in range(_EPOCHS_LOOKED_AHEAD):
        samples = progress.samples + ahead * samples_an_epoch
        at = Progress(progress.epoch + ahead, step, samples, None if each is None else samples * each)
        try:
            size = schedule.size_at(at)
        except Exception:  # noqa: BLE001 - it may well be that the run ends before
            return
        if size < settings.world_size:
            warnings.warn(
                f"the schedule gives a batch of {size!r} at {at}, and there are {settings.world_size} ranks: "
                "training will stop there with an error. Give it a minimum, or use fewer ranks.",
                stacklevel=stacklevel,
            )
            return
        step += -(-samples_an_epoch // size)
