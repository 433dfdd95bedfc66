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

from torch.utils.data import IterableDataset, IterDataPipe

from batchfit._arguments import check_whole
from batchfit._loader.batch_sampler import LoaderSettings
from batchfit._loader.fetch import SampleLocation
from batchfit._loader.pure.progress import Progress, SizeLimits
from batchfit._loader.token_sampler import TokenBatchSampler

_EPOCHS_LOOKED_AHEAD = 100
_MOST_WORKERS = 4096


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


def check_token_sampler(sampler: Any, dataset: Any, given: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse batch samplers that are not ours, and arguments that contradict it."""
    if not isinstance(sampler, TokenBatchSampler):
        raise TypeError(
            f"batch_sampler must be a batchfit.TokenBatchSampler, not {sampler!r:.80}: any other fixes the "
            "size of its batches. A sampler= of samples may be any"
        )
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name} must be left out with a batch_sampler, which has it, not {value!r}")
    if not callable(getattr(dataset, "__getitem__", None)) or isinstance(dataset, IterableDataset):
        raise TypeError(f"dataset must have __getitem__ with a batch_sampler, not {dataset!r:.80}")
    if callable(getattr(dataset, "__len__", None)) and len(dataset) != len(sampler.lengths):
        raise ValueError(
            f"dataset must have as many samples as batch_sampler has lengths, {len(sampler.lengths)}, not "
            f"{len(dataset)}"
        )


def order_name(streams: bool, shuffle: bool, sampler: Any, batch_sampler: Any) -> str:
    """What a checkpoint says of the order of the samples."""
    if streams:
        return "iterable"
    if batch_sampler is not None:
        return "by tokens"
    return "sampled" if sampler is not None else "shuffled" if shuffle else "sequential"


def check_state(
    state: Any, *, order: str, length: int | None, workers: int | None
) -> tuple[SampleLocation, ...]:
    """Refuse a checkpoint of another dataset, order or number of workers; where each worker was."""
    if not isinstance(state, Mapping):
        raise ValueError(f"state must be what state_dict() returned, not {state!r:.80}")
    if state.get("version") != 1:
        raise ValueError(f"state must be of version 1, not {state.get('version')!r}")
    if state["order"] != order:
        raise ValueError(f"state must be of a loader that is {order}, not {state['order']!r}")
    if state["length"] is not None and state["length"] != length:
        raise ValueError(f"state must be of {length} samples, not {state['length']!r}")
    places = tuple(SampleLocation(**place) for place in state.get("workers", ()))
    if workers is not None and len(places) != max(1, workers):
        raise ValueError(
            f"num_workers must be {len(places)} to go on in an iterable dataset, which each worker reads "
            f"on its own, not {workers!r}"
        )
    if any(place.handed and place.state is None for place in places):
        warnings.warn(
            "the dataset has no state_dict: what was consumed is read again and thrown away, which is "
            "exact only if it gives the same samples in the same order",
            stacklevel=3,
        )
    return places


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
    if schedule is None or settings.world_size == 1 or settings.token_sampler is not None:
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
