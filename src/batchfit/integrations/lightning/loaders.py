"""The loaders of a Trainer: what they load, in which size, and the same loader in another size.

Rules
- Loaders may come from a module, a datamodule or the call to `fit`, alone or in any nesting of lists, tuples
  and dicts, and in a CombinedLoader. All of them get the size.
- A size is set where the user keeps it (the attribute), and then looked for in the loaders; one that does
  not show there is set in copies of the loaders themselves.
- A loader that would not have the size is refused before the first trial.
- A copy is the user's loader but for its size: class, dataset, sampler, workers and collate function stay.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import batchfit
from batchfit.integrations.lightning.framework import (
    generators_now,
    log,
    part,
    same_random_numbers,
)
from batchfit.workload import batches


def requested(trainer: Any, loop: Any) -> tuple[Any, str | None]:
    """The loaders of a loop as the user gives them, and the mode in which they are combined."""
    given = loop._data_source.dataloader()
    if isinstance(given, part(trainer, "utilities.combined_loader").CombinedLoader):
        return given.iterables, given._mode
    return given, None


def leaves(node: Any) -> list[Any]:
    """The loaders in a nesting of lists, tuples and dicts, in Lightning's order."""
    if isinstance(node, Mapping):
        return [leaf for value in node.values() for leaf in leaves(value)]
    if isinstance(node, list | tuple):
        return [leaf for value in node for leaf in leaves(value)]
    return [node]


def mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting, with each loader changed."""
    if isinstance(node, Mapping):
        return {key: mapped(value, change) for key, value in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(mapped(value, change) for value in node))
    if isinstance(node, list | tuple):
        return type(node)(mapped(value, change) for value in node)
    return change(node)


def size_of(loader: Any, *, world_size: int) -> int | None:
    """Samples of one rank's batch, where the loader says so."""
    if isinstance(loader, batchfit.ResizableLoader):
        return max(1, loader.batch_size // world_size)
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def resized(loader: Any, size: int, *, world_size: int) -> Any:
    """The same loader with batches of `size` samples on each rank."""
    if isinstance(loader, batchfit.ResizableLoader):
        loader.batch_size = size * world_size
        return loader
    if not isinstance(loader, DataLoader):
        if getattr(loader, "batch_size", None) is not None:  # a new attribute would change nothing
            with contextlib.suppress(AttributeError):
                loader.batch_size = size
                return loader
        raise TypeError(
            f"a loader must be a DataLoader or have a batch_size that can be set, not {loader!r:.80}"
        )
    sampler: Any = loader.batch_sampler
    if sampler is None:
        raise TypeError(
            "a loader must make batches itself to get another batch size, not have batch_size=None, which "
            "leaves them to the dataset"
        )
    if type(sampler) is BatchSampler:
        sampler = BatchSampler(sampler.sampler, size, sampler.drop_last)
    elif isinstance(getattr(sampler, "batch_size", None), int):
        sampler = copy.copy(sampler)
        _set_sampler(sampler, size)
    else:
        raise TypeError(
            "a batch sampler must have an integer batch_size to get another one, not be a "
            f"{type(sampler).__name__}"
        )
    # Not a new loader: subclasses have arguments that are not known here. `__setattr__` refuses these names.
    twin = copy.copy(loader)
    for name in [name for name in vars(twin) if name.startswith("__pl_")]:
        del vars(twin)[name]  # the arguments that Lightning has seen have the old size
    vars(twin).update(batch_sampler=sampler, _iterator=None)
    if loader.batch_size is not None:
        vars(twin)["batch_size"] = size
    return twin


def _set_sampler(sampler: Any, size: int) -> None:
    try:
        sampler.batch_size = size
    except AttributeError:
        raise TypeError(
            f"a batch sampler must have a batch_size that can be set, and that of {type(sampler).__name__} "
            "cannot"
        ) from None


def check_resizable(trainer: Any, loop: Any, module: Any, attribute: str, given: Any) -> None:
    """Refuse, before anything runs, loaders that would not have the size that is found."""
    refusal: Exception | None = None
    if trainer.reload_dataloaders_every_n_epochs:
        refusal = _reloading(trainer, attribute)
    with same_random_numbers():
        for loader in leaves(given):
            refusal = refusal or _refusal(loader)
        if refusal is not None and not _follows(trainer, loop, module, attribute):
            raise refusal


def _reloading(trainer: Any, attribute: str) -> ValueError:
    return ValueError(
        f"reload_dataloaders_every_n_epochs must be 0 with BatchSizeFinder where no attribute {attribute!r} "
        f"sets their batch size, not {trainer.reload_dataloaders_every_n_epochs}: reloaded ones would "
        "have the old size"
    )


def _refusal(loader: Any) -> TypeError | None:
    """Why this loader cannot get another size."""
    if isinstance(loader, batchfit.ResizableLoader):
        return None
    own = size_of(loader, world_size=1)
    probe = 2 if own == 1 else 1
    try:
        if not isinstance(loader, DataLoader):
            resized(loader, getattr(loader, "batch_size", probe), world_size=1)  # as it is
            return None
        twin = resized(loader, probe, world_size=1)
    except TypeError as error:
        return TypeError(str(error))
    sampler = loader.batch_sampler
    if type(sampler) is BatchSampler or _length(sampler) != _length(twin.batch_sampler):
        return None
    first = next(iter(twin.batch_sampler), None)
    if first is None or len(first) == probe:
        return None
    return TypeError(
        f"a batch sampler must make its batches by its batch_size, and {type(sampler).__name__} makes one of "
        f"{len(first)} samples after batch_size = {probe}: let an attribute of the module or datamodule "
        "(batch_arg_name) make it"
    )


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None


def _follows(trainer: Any, loop: Any, module: Any, attribute: str) -> bool:
    """Whether reloaded loaders have the size of the attribute."""
    with attribute_moving(trainer, module, attribute) as move:
        if move is None:
            return False
        now = part(trainer, "utilities.parsing").lightning_getattr(module, attribute)
        probe = 2 if now == 1 else 1
        move(probe)
        made = leaves(requested(trainer, loop)[0])
        return all(size_of(loader, world_size=trainer.world_size) == probe for loader in made)


@contextlib.contextmanager
def attribute_moving(trainer: Any, module: Any, name: str) -> Iterator[Callable[[int], None] | None]:
    """What sets the attribute of this name to a size, wherever it is kept; None where there is none.

    Afterwards each holder (module, hparams, datamodule) has its own value again.
    """
    parsing = part(trainer, "utilities.parsing")
    holders = parsing._lightning_get_all_attr_holders(module, name)
    if not holders:
        yield None
        return
    before = [holder[name] if isinstance(holder, dict) else getattr(holder, name) for holder in holders]
    try:
        yield lambda size: parsing.lightning_setattr(module, name, size)
    finally:
        for holder, value in zip(holders, before, strict=True):
            if isinstance(holder, dict):
                holder[name] = value
            else:
                setattr(holder, name, value)


def source_of(loader: Any) -> Callable[[int], Any]:
    """What makes batches of any size out of a loader's samples: the longest ones, as a trial wants them."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    unbatched = isinstance(loader, DataLoader) and loader.batch_sampler is None
    if dataset is None or not callable(collate) or unbatched:
        raise TypeError(
            "make_batch must be given where a loader has no dataset and collate_fn to make batches of, as "
            f"{type(loader).__name__}: BatchSizeFinder(make_batch=...), a callable make_batch(n)"
        )
    if isinstance(dataset, IterableDataset):
        return batches(batchfit.FirstSamples(dataset), collate_fn=collate)
    return batches(dataset, collate_fn=collate)


def largest_batch(given: Any, *, world_size: int) -> float:
    """The largest batch of one rank that these loaders can make; infinite where none of them says.

    A loader that drops its last batch makes none at all of more samples than it has.
    """
    counts = [(_samples_of_a_rank(loader, world_size), _drops_last(loader)) for loader in leaves(given)]
    most = max((count for count, _ in counts), default=math.inf)
    whole = min((count for count, drops in counts if drops), default=math.inf)
    if whole <= most:
        return whole if whole == math.inf else math.floor(whole)
    return most if most == math.inf else math.ceil(most)


def _samples_of_a_rank(loader: Any, world_size: int) -> float:
    """How many samples an epoch of the loader has on one rank; infinite where it does not say."""
    for sampler in _samplers_of(loader):
        try:
            count = len(sampler)
        except (TypeError, AttributeError, NotImplementedError):
            continue
        return count if isinstance(sampler, DistributedSampler) else count / world_size
    try:
        return len(loader.dataset) / world_size
    except (TypeError, AttributeError, NotImplementedError):
        return math.inf


def _samplers_of(loader: Any) -> tuple[Any, Any]:
    """That of its batch sampler, and its own, which is not used beside a batch sampler of the user's."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(batch_sampler, "sampler", None), getattr(loader, "sampler", None)


def _drops_last(loader: Any) -> bool:
    if isinstance(loader, batchfit.ResizableLoader):
        return True  # it does not say; a whole batch is right either way
    sampler = getattr(loader, "batch_sampler", None)
    return any(getattr(one, "drop_last", False) is True for one in (loader, sampler))


def set_size(trainer: Any, loop: Any, module: Any, attribute: str, size: int) -> None:
    """Loaders of this loop have batches of `size` samples from now on.

    Generators end where they would in a run that began with this size: the user's function that makes the
    loaders draws its numbers once, here or when Lightning calls it.
    """
    parsing, world_size = part(trainer, "utilities.parsing"), trainer.world_size
    named = parsing.lightning_hasattr(module, attribute)
    if named:
        parsing.lightning_setattr(module, attribute, size)
    before = generators_now()
    given, mode = requested(trainer, loop)
    follows = all(size_of(loader, world_size=world_size) == size for loader in leaves(given))
    if follows or loop._combined_loader is not None:  # it is called again, or was called before
        before()
    if not follows:
        if trainer.reload_dataloaders_every_n_epochs:
            raise _reloading(trainer, attribute)
        if named:
            log.warning(
                "%s was set to %d, and %s does not use it: its loader gets the size itself",
                *(attribute, size, loop._data_source.name),
            )
        given = mapped(given, lambda loader: resized(loader, size, world_size=world_size))
        if mode is not None:
            given = part(trainer, "utilities.combined_loader").CombinedLoader(given, mode)
        loop._data_source.instance = given
    if loop._combined_loader is not None:
        with same_random_numbers(*generators_of(given)):
            _reload(loop)
        if named and loop is trainer.fit_loop:  # validation loads its data when it comes
            loop.epoch_loop.val_loop._combined_loader = None


def generators_of(given: Any) -> list[torch.Generator]:
    """The generators of the user's own that these loaders and their samplers draw from."""
    found: dict[int, torch.Generator] = {}
    for loader in leaves(given):
        for one in (loader, getattr(loader, "batch_sampler", None), *_samplers_of(loader)):
            generator = getattr(one, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())


def _reload(loop: Any) -> None:
    """The loop has set up its data before: once more, with the loaders of now."""
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = None
    loop.setup_data()
    if not hasattr(loop, "epoch_progress"):  # evaluation: its data fetcher is made by `reset`
        loop.reset()
        return
    for loader in loop._combined_loader.flattened:
        for sampler in _samplers_of(loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(loop.epoch_progress.current.processed)


def resizable(loader: Any, *, batch_size: int) -> batchfit.ResizableLoader:
    """A loader whose size can change, which loads what this DataLoader would."""
    if isinstance(loader, batchfit.ResizableLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise TypeError(f"the train loader must be a DataLoader or a ResizableLoader, not {loader!r:.80}")
    for name in ("__iter__", "_get_iterator"):
        if getattr(type(loader), name, None) is not getattr(DataLoader, name, None):
            raise TypeError(
                f"the train loader must be iterated over as a DataLoader is, and {type(loader).__name__} has "
                f"its own {name}: the loader that replaces it while sizes change would not call it. Do "
                "what it does in collate_fn, in the dataset or in the module's on_after_batch_transfer"
            )
    if type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        raise TypeError(
            f"the train loader must not have a batch sampler of its own, not {kind}: it fixes the sizes"
        )
    sampler: Any = loader.sampler
    streams = isinstance(loader.dataset, IterableDataset)
    shuffle = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    plain = streams or shuffle or type(sampler) is SequentialSampler
    return batchfit.ResizableLoader(
        loader.dataset,
        batch_size,
        shuffle=shuffle,
        sampler=None if plain else sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
    )


def on_device(trainer: Any, batch: Any, dataloader_idx: int) -> Any:
    """A batch as a step gets it: converted, and moved by the module's own hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
