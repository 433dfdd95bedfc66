"""A loader whose batch size can change while it runs: `ResizableLoader`.

Rules
- torch's DataLoader does the loading, with its own workers and through its public parts: our batch sampler
  decides what goes into a batch at the moment when a worker is to begin with it (`_loader/batch_sampler.py`).
- `batch_size` is the size over all ranks; each rank loads its part of every batch (`_loader/pure/deal.py`).
- A size that a schedule gives is known when a batch is made, so it costs nothing. A size that is set counts
  from the next batch on: prefetched batches are discarded, and their samples re-batched.
- The order of a map-style dataset is a function of seed and epoch alone. The position in it is what was
  handed to the user, in samples: it says everything, whatever the sizes, workers and ranks were or will be.
- Nothing refers back to the iterator that a `for` loop holds: when the loop lets go, the workers go.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, final

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from batchfit._arguments import check_flag
from batchfit._engine.snapshot.rng import undo_generator
from batchfit._loader.batch_sampler import (
    Dealer,
    FixedOrder,
    LoaderSettings,
    SampledOrder,
    StreamDealer,
    checked_size,
)
from batchfit._loader.checks import (
    check_data,
    check_schedule,
    check_state,
    check_token_sampler,
    check_workers,
    look_ahead,
    order_name,
)
from batchfit._loader.epoch_iterator import CurrentDealer, EpochIterator
from batchfit._loader.fetch import (
    IndexFetch,
    Number,
    SampleLocation,
    StartWorker,
    StreamFetch,
    as_it_is,
)
from batchfit._loader.pure.deal import Deal, DealtSamples
from batchfit._loader.pure.progress import EpochPlan, Progress, Schedule
from batchfit._loader.this_rank import place_among_ranks
from batchfit._loader.token_dealer import TokenDealer
from batchfit._loader.token_sampler import TokenBatchSampler
from batchfit._units import whole

_log = logging.getLogger("batchfit")


@final
class ResizableLoader:
    """A DataLoader that shares batches out over ranks and can change their size at any time.

        loader = batchfit.ResizableLoader(dataset, 256, shuffle=True, num_workers=4)
        for batch in loader:
            ...
            loader.batch_size = 512  # from the next batch on

    Given `schedule=`, workers know the sizes to come, and changes cost nothing.

    Args:
        dataset: a map-style or an iterable dataset.
        batch_size: samples of a batch over all ranks (global); not used while there is a schedule.
        schedule: a `BatchSizeConfig` that starts from `batch_size`, the `plan` of a `BatchSizeScheduler`, or
            any object with `size_at(progress) -> int`.
        shuffle: draw samples in a new order in each epoch.
        sampler: gives the indices, in place of `shuffle`.
        num_workers: worker processes; 0: samples are loaded in this process.
        batch_sampler: a `TokenBatchSampler`: batches of about equally many tokens, in place of `batch_size`,
            `shuffle`, `sampler`, `drop_last`, `seed`, `rank` and `world_size`. Sizes, a schedule's too, are
            its `max_tokens` then, those of one rank.
        collate_fn: makes a batch of a list of samples; default: DataLoader's.
        pin_memory: copy batches to pinned memory.
        drop_last: leave out the short last batch of an epoch.
        timeout: seconds to wait for a worker's batch; 0: no limit.
        worker_init_fn: called in each worker with its number.
        multiprocessing_context: how workers are started ("fork", "spawn").
        generator: draws the seeds of the workers.
        prefetch_factor: batches that each worker loads ahead.
        persistent_workers: keep workers from one epoch to the next.
        pin_memory_device: the device for pinned memory.
        rank: number of this rank; default: that of `torch.distributed`, or 0.
        world_size: number of ranks; default: that of `torch.distributed`, or 1.
        seed: seed of the shuffled order, which depends on seed and epoch alone; the same on all ranks.
        defer: a size that is set waits until the prefetched batches were handed out.
        tokens_per_sample: tokens of a sample, for schedules in tokens.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 256,
        *,
        schedule: EpochPlan | Schedule | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: TokenBatchSampler | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        defer: bool = False,
        tokens_per_sample: int | None = None,
    ) -> None:
        self._streams = isinstance(dataset, IterableDataset)
        check_flag("shuffle", shuffle)
        if batch_sampler is None:
            rank, world_size = place_among_ranks(rank, world_size)
            check_data(dataset, self._streams, shuffle, sampler, world_size)
        else:
            ranks = ((rank, world_size), (None, None))
            given: dict[str, Any] = {"batch_size": (batch_size, 256), "shuffle": (shuffle, False)}
            given |= {"drop_last": (drop_last, False), "seed": (seed, 0), "rank and world_size": ranks}
            given |= {"sampler": (sampler, None), "tokens_per_sample": (tokens_per_sample, None)}
            check_token_sampler(batch_sampler, dataset, given)
            rank, world_size = batch_sampler.rank, batch_sampler.world_size
            batch_size, drop_last, seed = world_size, batch_sampler.drop_last, batch_sampler.seed
        if tokens_per_sample is not None:
            tokens_per_sample = whole(tokens_per_sample, name="tokens_per_sample", at_least=1)
        size = checked_size("batch_size", batch_size, world_size)
        check_workers(num_workers, timeout)
        check_flag("drop_last", drop_last)
        check_flag("pin_memory", pin_memory)
        check_flag("persistent_workers", persistent_workers)
        check_flag("defer", defer)
        self._settings = LoaderSettings(
            size, None, rank, world_size, drop_last, tokens_per_sample, token_sampler=batch_sampler
        )
        self.dataset = dataset
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.defer = defer
        self.num_workers = num_workers
        self._seed = whole(seed, name="seed")
        self._collate_fn = default_collate if collate_fn is None else collate_fn
        self._keywords: dict[str, Any] = {
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": StartWorker(worker_init_fn),
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        if pin_memory_device:
            self._keywords["pin_memory_device"] = pin_memory_device
        self._order = order_name(self._streams, shuffle, sampler, batch_sampler)
        self._lock = threading.RLock()
        # A number that workers see; without workers nothing is prefetched.
        self._discarded_below = cast(
            Number, multiprocessing.RawValue("q", 0) if num_workers else SimpleNamespace(value=0)
        )
        self._deals = CurrentDealer()
        self._dealer = self._new_dealer(Progress(), DealtSamples())
        self._begun = False
        self._next_epoch: int | None = None
        self.schedule = schedule
        self._loader = self._new_loader()

    # What users read and set

    @property
    def batch_size(self) -> int:
        """The size of the next batch, over all ranks. Setting it ends the schedule, if there is one."""
        if self._settings.token_sampler is not None:
            raise AttributeError("batches by tokens have no batch_size: see max_tokens")
        return self._settings.wanted(self.progress)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.resize(size)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the next batch of a `TokenBatchSampler`, on one rank; may be set."""
        return None if self._settings.token_sampler is None else self._settings.wanted(self.progress)

    @max_tokens.setter
    def max_tokens(self, max_tokens: int) -> None:
        self.resize(max_tokens=max_tokens)

    def resize(
        self, batch_size: int | None = None, *, max_tokens: int | None = None, defer: bool | None = None
    ) -> None:
        """Set the size from the next batch on; with `defer`, after the prefetched batches.

        On several ranks, all of them must do so between the same two batches.

        Args:
            batch_size: samples of a batch over all ranks.
            max_tokens: with a `TokenBatchSampler`, in its place: most tokens of a batch on one rank.
            defer: hand out the prefetched batches first; default: as the loader's `defer` says.
        """
        name, size = self._settings.chosen(batch_size=batch_size, max_tokens=max_tokens)
        with self._lock:
            if self._settings.schedule is not None:
                _log.info("%s set to %d: the loader's schedule ends here", name, size)
                self._settings.ended = True
            self._settings.schedule, self._settings.batch_size = None, size
            self._changed(defer)

    @property
    def schedule(self) -> EpochPlan | None:
        """What gives the sizes; None where `batch_size` does. Setting it counts from the next batch on."""
        return self._settings.schedule

    @schedule.setter
    def schedule(self, schedule: EpochPlan | Schedule | None) -> None:
        if isinstance(schedule, Schedule):
            # A config that begins with a size of its own needs none.
            initial = None if schedule.starts_by_itself else self._settings.batch_size
            ranks = self.world_size if self._settings.token_sampler is None else 1  # `max_tokens` is of one
            each = self._settings.tokens_per_sample
            schedule = schedule.bind(initial, world_size=ranks, tokens_per_sample=each)
        check_schedule(schedule)
        with self._lock:
            before = self._settings.schedule
            size = self._settings.batch_size if before is None else self.batch_size
            self._settings.schedule = schedule
            try:
                self._settings.wanted(self.progress)
            except Exception:
                self._settings.schedule = before
                raise
            self._settings.batch_size = size  # where a schedule ends, its last size stays
            self._settings.ended = False
            if schedule is not None:
                look_ahead(self._settings, self.progress, self._length, stacklevel=4)
            self._changed(None)

    @property
    def progress(self) -> Progress:
        """How far the run has come, by what was handed out."""
        return self._dealer.progress

    @property
    def current(self) -> Deal | None:
        """The batch that was handed out last: its `size` over all ranks, and where in the epoch it was."""
        return self._dealer.current

    @property
    def current_progress(self) -> Progress | None:
        """How far the run had come when that batch began: what a schedule was asked with for it."""
        return self._dealer.current_progress

    @property
    def weight(self) -> float:
        """The factor of this rank's mean loss with which DDP's mean over ranks is the batch's.

        1.0 where all ranks have equally many samples.
        """
        return self._dealer.weight

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """What makes a batch of samples."""
        return self._collate_fn

    @property
    def drop_last(self) -> bool:
        """Whether the short last batch of an epoch is left out."""
        return self._settings.drop_last

    @property
    def rank(self) -> int:
        """Which of the ranks this one is."""
        return self._settings.rank

    @property
    def world_size(self) -> int:
        """Over how many ranks a batch is shared out."""
        return self._settings.world_size

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next; without this, they count up by themselves.

        After `load_state_dict` the epoch that was loaded goes on where it was, unless another one is set.

        Args:
            epoch: number of the epoch, from 0.
        """
        epoch = whole(epoch, name="epoch", at_least=0)
        with self._lock:
            if self._begun:
                self._next_epoch = epoch
            elif epoch != self._dealer.begun.epoch:
                self._renew(epoch)

    def __len__(self) -> int:
        """Batches of this epoch: those handed out, and those to come by the size or schedule of now."""
        with self._lock:
            return self._dealer.count(self._length)

    # Going through an epoch

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch that was loaded, or over a new epoch."""
        with self._lock:
            if self._begun:  # and not ended: somebody has left the loop
                self._renew()
            dealer = self._dealer
            self._deals.dealer = dealer
            # What the beginning of an epoch draws (DataLoader's seed for workers, with none too) was drawn
            # before the checkpoint: drawn again, it would move every random number after it.
            drawn_from = self._keywords["generator"] or torch.default_generator
            with contextlib.ExitStack() as stack:
                if dealer.ledger.batches > 0 and (undo := undo_generator(drawn_from)) is not None:
                    stack.callback(undo)
                if not self._streams and self._settings.token_sampler is None:
                    dealer.order = self._new_order(dealer)
                batches = iter(self._loader)
                iteration = EpochIterator(dealer, batches, self._lock, lambda: self._dealer, self._renew)
            self._begun = True
            return iteration

    def _renew(self, epoch: int | None = None) -> None:
        """Begin another epoch with the next `for` loop."""
        done = self._dealer.progress
        if epoch is None:
            epoch = done.epoch + 1 if self._next_epoch is None else self._next_epoch
        begun = Progress(epoch, done.step, done.samples, done.tokens)
        last = self._dealer
        self._dealer = self._new_dealer(begun, last.ledger.next_epoch())
        self._dealer.current, self._dealer.current_progress = last.current, last.current_progress
        self._begun, self._next_epoch = False, None

    def _changed(self, defer: bool | None) -> None:
        if not (self.defer if defer is None else defer):
            self._dealer.cancel()

    def _new_dealer(
        self, begun: Progress, ledger: DealtSamples, state: Mapping[str, Any] | None = None
    ) -> Dealer:
        state = {} if state is None else state
        if (tokens := self._settings.token_sampler) is not None:
            saved = state.get("tokens")
            return TokenDealer(self._settings, begun, ledger, self._discarded_below, tokens, saved)
        if not self._streams:
            return Dealer(self._settings, begun, ledger, self._discarded_below, state.get("sampler"))
        places = [SampleLocation(**place) for place in state.get("workers", ())] or [SampleLocation()] * max(
            1, self.num_workers
        )
        return StreamDealer(self._settings, begun, ledger, self._discarded_below, places)

    def _new_order(self, dealer: Dealer) -> FixedOrder | SampledOrder:
        epoch = dealer.begun.epoch
        if self.sampler is not None:
            saved, dealer.saved = dealer.saved, None
            return SampledOrder(self.sampler, epoch, saved)
        return FixedOrder(self._length(), self._seed + epoch if self._order == "shuffled" else None)

    def _new_loader(self) -> DataLoader[Any]:
        fetch: Any
        if isinstance(self._dealer, StreamDealer):
            fetch = StreamFetch(
                self.dataset,
                self._collate_fn,
                self._discarded_below,
                drop_last=self._settings.drop_last,
                places=tuple(self._dealer.places),
                run=self._dealer.run,
            )
        else:
            fetch = IndexFetch(self.dataset, self._collate_fn, self._discarded_below)
        return DataLoader(fetch, batch_sampler=self._deals, collate_fn=as_it_is, **self._keywords)

    def _length(self) -> int:
        return len(self.dataset if self.sampler is None else self.sampler)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, by what was handed out; of all ranks, so that any of them may save it."""
        with self._lock:
            ledger, progress = self._dealer.ledger, self.progress
            return {
                "version": 1,
                "epoch": progress.epoch,
                "position": ledger.handed,
                "batches": ledger.batches,
                "step": progress.step,
                "samples": progress.samples,
                "token_count": progress.tokens,
                "batch_size": self._settings.batch_size,
                "schedule_ended": self._settings.ended,
                "seed": self._seed,
                "order": self._order,
                "length": None if self._streams or self.sampler is not None else self._length(),
                **self._dealer.state(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the next `for` loop begins in the middle of that epoch.

        The numbers of workers and of ranks may differ; for an iterable dataset that of workers may not.

        Args:
            state: what `state_dict()` returned.

        Raises:
            ValueError: `state` is of another dataset, order or number of workers.
        """
        length = None if self._streams or self.sampler is not None else self._length()
        workers = self.num_workers if self._streams else None
        check_state(state, order=self._order, length=length, workers=workers)
        size = self._settings.checked("batch_size", state["batch_size"])
        if (tokens := self._settings.token_sampler) is not None:
            tokens._check_goes_on(state["tokens"], state["made_with"])
            tokens.seed = state["seed"]
            # The user may ask for another one.
            size = size if tokens._given == state["given_max_tokens"] else tokens.max_tokens
        with self._lock:
            self._seed, self._settings.batch_size = state["seed"], size
            if state.get("schedule_ended", False):  # by a size that was set, which still counts
                self._settings.schedule, self._settings.ended = None, True
            handed, batches = state["position"], state["batches"]
            ledger = self._dealer.ledger.resumed(handed, batches)
            begun = Progress(state["epoch"], state["step"] - batches, state["samples"] - handed)
            if tokens is not None:
                begun = replace(begun, tokens=state["token_count"] - state["tokens"]["tokens"])
            self._dealer = self._new_dealer(begun, ledger, state)
            self._begun, self._next_epoch = False, None
            if self._streams:  # workers that live must start again
                self._loader = self._new_loader()
