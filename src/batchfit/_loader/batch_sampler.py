"""The batch sampler that DataLoader gets: each batch is made when a worker is to begin with it.

Rules
- The size is asked for when a batch is made: a schedule is always followed, and a worker never collates a
  size that was not wanted when it began.
- An order is a function of seed and epoch, or the user's sampler, of which prefetched samples are kept.
- What goes wrong while dealing (a schedule, a sampler) is kept until all batches before it are handed out.
- No dealer refers to the loader, and a dealer lives for one epoch.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, final

import torch

from batchfit._loader.fetch import (
    IndexTask,
    Number,
    SampleLocation,
    StreamBatch,
    StreamTask,
    keeps_state,
    open_stream,
)
from batchfit._loader.pure.deal import Deal, DealtSamples, count_batches, cut, share
from batchfit._loader.pure.progress import EpochPlan, Progress

if TYPE_CHECKING:
    from batchfit._loader.token_sampler import TokenBatchSampler

_log = logging.getLogger("batchfit")


def checked_size(name: str, value: SupportsIndex, world_size: int) -> int:
    """`value` as a batch size that gives every rank a sample."""
    try:
        size = operator.index(value)
    except TypeError:
        size = 0
    if isinstance(value, bool) or size < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")
    if size < world_size:
        raise ValueError(
            f"{name} must be at least {world_size}, a sample for each of {world_size} ranks, not {value!r}"
        )
    return size


@dataclass(slots=True)
class LoaderSettings:
    """What may change while a loader runs, and what its dealers must know."""

    samples: int  # of a batch over all ranks
    schedule: EpochPlan | None
    rank: int
    world_size: int
    drop_last: bool
    tokens_per_sample: int | None
    ended: bool = False  # a size was set while there was a schedule: it counts, and the schedule does not
    said_too_large: bool = False  # that an epoch has fewer samples than a batch
    token_sampler: TokenBatchSampler | None = None  # whose `max_tokens` is the size, of one rank

    @property
    def batch_size(self) -> int:
        """The size where there is no schedule."""
        return self.samples if self.token_sampler is None else self.token_sampler.max_tokens

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        if self.token_sampler is None:
            self.samples = size
        else:
            self.token_sampler.max_tokens = size

    def checked(self, name: str, value: SupportsIndex) -> int:
        """`value` as a size that no rank or sample is left out with."""
        if self.token_sampler is not None:
            return self.token_sampler._checked(value, name.replace("batch_size", "max_tokens"))
        return checked_size(name, value, self.world_size)

    def chosen(self, **sizes: int | None) -> tuple[str, int]:
        """The name of the size that is set, and its value, checked."""
        name, other = ("batch_size", "max_tokens")[:: 1 if self.token_sampler is None else -1]
        if sizes[other] is not None:
            raise ValueError(f"{other} must not be set where batches have a {name}, to {sizes[other]!r}")
        return name, self.checked(name, sizes[name])  # type: ignore[arg-type]

    def wanted(self, progress: Progress) -> int:
        """The size of the batch that comes at `progress`."""
        if self.schedule is None:
            return self.batch_size
        return self.checked(f"the batch size of the schedule at {progress}", self.schedule.size_at(progress))


class EpochOrder(Protocol):
    """The samples of an epoch, in order, the same on all ranks."""

    def left(self, position: int, most: int) -> int:
        """How many samples there are from `position` on, `most` at most."""

    def indices(self, start: int, stop: int, part: tuple[int, int]) -> Sequence[int]:
        """A part of the samples from `start` to `stop`, which are the next."""

    def rewind(self, position: int) -> None:
        """The next ones will be those from `position` on."""

    def forget(self, position: int) -> None:
        """Nobody will ask for what is before `position`."""

    def state(self, position: int) -> dict[str, Any] | None:
        """What it takes to go on from `position` in another process, beyond seed and epoch."""


@final
class FixedOrder:
    """One after the other, or shuffled as DistributedSampler would with the same seed and epoch."""

    def __init__(self, length: int, seed: int | None) -> None:
        self._length = length
        self._shuffled: torch.Tensor | None = None
        if seed is not None:
            self._shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(seed))

    def left(self, position: int, most: int) -> int:
        return min(self._length - position, most)

    def indices(self, start: int, stop: int, part: tuple[int, int]) -> Sequence[int]:
        first, last = start + part[0], start + part[1]
        if self._shuffled is None:
            return range(first, last)
        indices: list[int] = self._shuffled[first:last].tolist()
        return indices

    def rewind(self, position: int) -> None:
        pass

    def forget(self, position: int) -> None:
        pass

    def state(self, position: int) -> dict[str, Any] | None:
        return None


@final
class SampledOrder:
    """The order of a user's sampler.

    To go on later: by the sampler's own `state_dict`, or by reading it again up to the position, with torch's
    random numbers (and those of its `generator`) where they were when it began.
    """

    def __init__(self, sampler: Any, epoch: int, saved: Mapping[str, Any] | None) -> None:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        generator = getattr(sampler, "generator", None)
        own = generator if isinstance(generator, torch.Generator) else None
        now = torch.get_rng_state()
        self._begun: dict[str, Any] = {}
        if saved is not None and "rng" in saved:
            torch.set_rng_state(saved["rng"])
            if own is not None and saved["generator"] is not None:
                own.set_state(saved["generator"])
        try:
            if not keeps_state(sampler):
                self._begun["rng"] = torch.get_rng_state()
                self._begun["generator"] = None if own is None else own.get_state()
            self._tape = open_stream(
                sampler, SampleLocation(**saved["place"]) if saved is not None else SampleLocation()
            )
            self._tape.ready(1)  # so that what it draws to begin with is drawn now
        finally:
            if saved is not None and "rng" in saved:
                torch.set_rng_state(now)

    def left(self, position: int, most: int) -> int:
        return self._tape.ready(most)

    def indices(self, start: int, stop: int, part: tuple[int, int]) -> Sequence[int]:
        return self._tape.take(stop - start)[slice(*part)]

    def rewind(self, position: int) -> None:
        self._tape.rewind(position)

    def forget(self, position: int) -> None:
        self._tape.forget(position)

    def state(self, position: int) -> dict[str, Any] | None:
        return {**self._begun, "place": SampleLocation(position, *self._tape.mark(position))._asdict()}


class Dealer(Iterator[Any]):
    """Deals the batches of one epoch of a map-style dataset, and keeps the books of them."""

    def __init__(
        self,
        settings: LoaderSettings,
        begun: Progress,
        ledger: DealtSamples,
        discarded_below: Number,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.begun = begun  # when the epoch did
        self.ledger = ledger
        self.current: Deal | None = None  # what was handed out last
        self.current_progress: Progress | None = None  # when that began
        self.failure: Exception | None = None
        self.order: EpochOrder = FixedOrder(0, None)  # until the epoch begins
        self.saved = saved  # what the state of the order was, until then
        self._discarded_below = discarded_below
        discarded_below.value = ledger.discarded_below

    @property
    def weight(self) -> float:
        """The factor of this rank's mean loss with which DDP's mean over ranks is the batch's."""
        if self.current is None:
            return 1.0
        rank, world_size = self.settings.rank, self.settings.world_size
        start, stop = share(self.current.size, rank, world_size)
        return (stop - start) * world_size / self.current.size

    def progress_at(self, number: int, position: int) -> Progress:
        """How far the run has come when that batch of this epoch begins at that position."""
        samples = self.begun.samples + position
        each = self.settings.tokens_per_sample
        tokens = None if each is None else samples * each
        return Progress(self.begun.epoch, self.begun.step + number, samples, tokens)

    @property
    def progress(self) -> Progress:
        """How far the run has come by what was handed out."""
        return self.progress_at(self.ledger.batches, self.ledger.handed)

    def count(self, length: Callable[[], int]) -> int:
        """Batches of this epoch: those handed out, and those to come by the size or schedule of now."""
        return self._counted(length() - self.ledger.handed, self.settings.world_size, lambda size: size)

    def _counted(self, left: int, world_size: int, part: Callable[[int], int]) -> int:
        ledger, settings = self.ledger, self.settings

        def wanted(number: int, position: int) -> int:
            return part(settings.wanted(self.progress_at(ledger.batches + number, ledger.handed + position)))

        # With one size the first batches are all alike, and not worth counting.
        size = wanted(0, 0)
        alike = max(0, left // size - 2) if settings.schedule is None else 0
        left -= alike * size
        rest = count_batches(left, wanted, world_size=world_size, drop_last=settings.drop_last)
        return ledger.batches + alike + rest

    def __next__(self) -> Any:
        if self.failure is None:
            try:
                task = self._deal()
            except Exception as error:  # noqa: BLE001 - it is raised when the batches before it are handed out
                self.failure = error
                task = None
            if task is not None:
                return task
        raise StopIteration  # for now: after a `cancel` there may be more

    def _deal(self) -> IndexTask | StreamTask | None:
        """The next task, or None where there is none."""
        settings, ledger = self.settings, self.ledger
        wanted = settings.batch_size
        if settings.schedule is not None:
            wanted = settings.wanted(self.progress_at(ledger.number, ledger.cursor))
        world_size = settings.world_size
        left = self.order.left(ledger.cursor, wanted + world_size)
        size = cut(wanted, left, world_size=world_size, drop_last=settings.drop_last)
        if left < wanted and ledger.number == 0 and settings.rank == 0 and not settings.said_too_large:
            self._say_too_large(left, wanted)
        if size == 0:
            if left and not settings.drop_last:  # it went on with more ranks than it began with
                _log.warning("the last %d samples of the epoch are fewer than the ranks: left out", left)
            return None
        start, part = ledger.cursor, share(size, settings.rank, world_size)
        indices = self.order.indices(start, start + size, part)
        self.ledger = ledger.deal(size)
        return ledger.serial, indices

    def _say_too_large(self, left: int, wanted: int) -> None:
        """Once: no batch of an epoch is as large as it should be. DataLoader says nothing to a fixed size."""
        settings = self.settings
        if settings.drop_last:
            settings.said_too_large = True
            _log.warning(
                "%s",
                f"epoch {self.begun.epoch} has no batch: its {left} samples are fewer than the {wanted} of "
                "one, and drop_last leaves them out. Nothing is trained with that size",
            )
        elif settings.schedule is not None:
            settings.said_too_large = True
            _log.warning(
                "%s",
                f"the schedule wants a batch of {wanted} in epoch {self.begun.epoch}, and an epoch has "
                f"{left} samples: they are one batch, and a learning rate that follows the size is that of "
                f"{wanted}. Set max_batch_size to {left} or less",
            )

    def arrive(self, serial: int, data: Any) -> tuple[Any, ...]:
        """What goes to the user: one batch, or nothing where it is discarded."""
        ledger = self.ledger.arrived(serial)
        if ledger.is_discarded(serial):
            self.ledger = ledger.throw_away()
            return ()
        self._note(ledger.prefetched[0])
        self.ledger = ledger.hand()
        self.order.forget(self.ledger.handed)
        return (data,)

    def _note(self, deal: Deal) -> None:
        self.current, self.current_progress = deal, self.progress_at(deal.number, deal.start)

    def cancel(self) -> None:
        """Discard the prefetched batches, if the sizes of now are not those that they were made with."""
        self.failure = None
        if all(self._still_wanted(deal) for deal in self.ledger.fresh):
            return
        self.ledger = self.ledger.cancel()
        self._discarded_below.value = self.ledger.discarded_below
        self._rewind()

    def _still_wanted(self, deal: Deal) -> bool:
        try:
            return self.settings.wanted(self.progress_at(deal.number, deal.start)) == deal.size
        except Exception:  # noqa: BLE001 - it will be raised when that batch is made again
            return False

    def abandon(self) -> None:
        """Discard the prefetched batches of a loop that was left: workers need not finish them."""
        self._discarded_below.value = max(self._discarded_below.value, self.ledger.serial)

    def _rewind(self) -> None:
        self.order.rewind(self.ledger.handed)

    def state(self) -> dict[str, Any]:
        """What it takes to go on in another process, beyond position, seed and epoch."""
        return {"sampler": self.order.state(self.ledger.handed) or self.saved}


@final
class StreamDealer(Dealer):
    """Deals sizes to the workers of an iterable dataset, until all of them say that theirs has ended."""

    def __init__(
        self,
        settings: LoaderSettings,
        begun: Progress,
        ledger: DealtSamples,
        discarded_below: Number,
        places: Sequence[SampleLocation],
    ) -> None:
        super().__init__(settings, begun, ledger, discarded_below)
        self.places = list(places)
        self.run = ledger.serial
        self._ended: set[int] = set()

    def count(self, length: Callable[[], int]) -> int:
        # Each rank's dataset has a length of its own.
        def part(size: int) -> int:
            start, stop = share(size, self.settings.rank, self.settings.world_size)
            return stop - start

        return self._counted(length() - sum(place.handed for place in self.places), 1, part)

    def _deal(self) -> StreamTask | None:
        if len(self._ended) == len(self.places):
            return None
        settings, ledger = self.settings, self.ledger
        size = settings.wanted(self.progress_at(ledger.number, ledger.cursor))
        start, stop = share(size, settings.rank, settings.world_size)
        handed = tuple(place.handed for place in self.places)
        self.ledger = ledger.deal(size)
        return StreamTask(
            ledger.serial, self.begun.epoch, self.run, ledger.discarded_below, stop - start, handed
        )

    def arrive(self, serial: int, data: Any) -> tuple[Any, ...]:
        batch = StreamBatch(*data)
        ledger = self.ledger.arrived(serial)
        if ledger.is_discarded(serial):
            self.ledger = ledger.throw_away()
            return ()
        if batch.ended:
            self._ended.add(batch.worker)
        if batch.place is None:
            self.ledger = ledger.hand_part(0)
            return ()
        self._note(deal := ledger.prefetched[0])
        self.places[batch.worker] = batch.place
        start, stop = share(deal.size, self.settings.rank, self.settings.world_size)
        # Other ranks are taken to be as far as this one: nobody can know.
        self.ledger = ledger.hand_part(deal.size * batch.got // (stop - start))
        return (batch.data,)

    def _rewind(self) -> None:
        pass  # each worker does so itself, when it gets the next task

    def state(self) -> dict[str, Any]:
        return {"workers": [place._asdict() for place in self.places]}
