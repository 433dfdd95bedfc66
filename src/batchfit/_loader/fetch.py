"""What a loader's worker does with a batch that is given to it: fetch the samples, collate them.

Rules
- torch's DataLoader runs this in its own workers through its public parts only: a dataset with `__getitems__`
  that takes what our batch sampler yields. Collating is the user's function, on samples as the dataset gave
  them, and `get_worker_info().dataset` is the user's dataset.
- Work on a batch that was discarded meanwhile is not begun, and not ended: a number that all workers see says
  which ones are. It is read about once in a millisecond, not once a sample.
- A stream keeps the samples of a batch until the loader says that the batch was handed to the user: so they
  can be batched again, in another size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, final

from torch.utils.data import get_worker_info

from batchfit._loader.pure.deal import Tape

_LOOK_AFTER_S = 0.5e-3
_AT_A_TIME = 32  # samples of a stream between two looks


class Number(Protocol):
    """A number that all workers see."""

    value: int


# What goes to the workers and comes back for every batch: plain tuples, which pickle fastest. The first of
# them is the number of the deal; torch pins what is inside of the second.
IndexTask = tuple[int, Sequence[int]]
Arrived = tuple[int, Any]


class StreamTask(NamedTuple):
    """A batch of an iterable dataset."""

    serial: int
    epoch: int
    run: int  # a new one for each pass over the dataset
    discarded_below: int
    wanted: int
    handed: tuple[int, ...]  # samples that were handed to the user, of each worker


class SampleLocation(NamedTuple):
    """How far one worker has come in its part of an iterable dataset."""

    handed: int = 0
    state: Any = None  # the dataset's own `state_dict`, where it has one
    skip: int = 0  # samples from there on


class StreamBatch(NamedTuple):
    """What a worker sends back for a `StreamTask`."""

    worker: int
    got: int = 0
    ended: bool = False
    place: SampleLocation | None = None
    data: Any = None


def as_it_is(batch: Any) -> Any:
    """The `collate_fn` that DataLoader gets: the user's has run by then."""
    return batch


@final
class StartWorker:
    """The `worker_init_fn` that DataLoader gets: shows the user's dataset, then calls the user's own."""

    def __init__(self, user_fn: Callable[[int], None] | None) -> None:
        self.user_fn = user_fn

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        # A frozen object, since it must not be changed by accident.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.user_fn is not None:
            self.user_fn(worker_id)


@final
class IndexFetch:
    """Batches of a map-style dataset, seen by DataLoader as a dataset."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], discarded_below: Number) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._discarded_below = discarded_below
        self._pace = 1  # samples between two looks

    def __getitems__(self, task: IndexTask) -> Arrived:
        serial, indices = task
        try:
            samples = self._samples(serial, indices)
            if samples is None or serial < self._discarded_below.value:
                return serial, None
            return serial, self._collate_fn(samples)
        except StopIteration as error:
            # It would end the epoch without a word (as a generator's would, before PEP 479).
            raise RuntimeError("a sample or the collate_fn raised StopIteration") from error

    def _samples(self, serial: int, indices: Sequence[int]) -> Any:
        dataset = self.dataset
        if getattr(dataset, "__getitems__", None):
            return None if serial < self._discarded_below.value else dataset.__getitems__(list(indices))
        samples: list[Any] = []
        done, pace = 0, self._pace
        while done < len(indices):
            if serial < self._discarded_below.value:
                return None
            began = time.perf_counter()
            samples += [dataset[index] for index in indices[done : done + pace]]
            done += pace
            took = time.perf_counter() - began
            if took < _LOOK_AFTER_S:
                pace *= 2
            elif took > 4 * _LOOK_AFTER_S:
                pace = max(1, pace // 2)
        self._pace = min(pace, 1 << 16)
        return samples


@final
class StreamFetch:
    """Batches of an iterable dataset, seen by DataLoader as map-style: each worker reads its own copy."""

    def __init__(
        self,
        dataset: Iterable[Any],
        collate_fn: Callable[[Any], Any],
        discarded_below: Number,
        *,
        drop_last: bool,
        places: Sequence[SampleLocation],
        run: int,
    ) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._discarded_below = discarded_below
        self._drop_last = drop_last
        self._places = places  # where to begin in that run; other runs begin at the beginning
        self._placed_run = run
        self._run = -1
        self._seen_discarded = 0
        self._tape: Tape[Any] = Tape(iter(()))

    def __getitems__(self, task: StreamTask) -> Arrived:
        return task.serial, self._batch(task)

    def _batch(self, task: StreamTask) -> StreamBatch:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if task.serial < self._discarded_below.value:
            return StreamBatch(worker)
        if task.run != self._run:
            self._begin(task, worker)
        tape = self._tape
        if task.discarded_below > self._seen_discarded:
            # What was read for discarded batches comes again, in batches of the new size.
            tape.rewind(task.handed[worker])
            self._seen_discarded = task.discarded_below
        tape.forget(task.handed[worker])
        ready = 0
        while ready < task.wanted and not tape.ended:
            if task.serial < self._discarded_below.value:
                return StreamBatch(worker)  # what was read stays on the tape
            ready = min(task.wanted, ready + _AT_A_TIME)
            tape.ready(ready)
        samples = tape.take(task.wanted)
        ended = len(samples) < task.wanted
        if not samples or (ended and self._drop_last):
            return StreamBatch(worker, ended=ended)
        place = SampleLocation(tape.position, *tape.mark(tape.position))
        try:
            data = self._collate_fn(samples)
        except StopIteration as error:
            raise RuntimeError("the collate_fn raised StopIteration") from error
        return StreamBatch(worker, len(samples), ended, place, data)

    def _begin(self, task: StreamTask, worker: int) -> None:
        place = self._places[worker] if task.run == self._placed_run else SampleLocation()
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(task.epoch)
        self._tape = open_stream(self.dataset, place)
        self._run, self._seen_discarded = task.run, task.discarded_below


def open_stream(dataset: Iterable[Any], place: SampleLocation) -> Tape[Any]:
    """The rest of a dataset from `place` on, by its own `load_state_dict` or else by reading up to there."""
    if place.state is not None and keeps_state(dataset):
        dataset.load_state_dict(place.state)  # type: ignore[attr-defined]
    source: Any = iter(dataset)
    keeper: Any = dataset if keeps_state(dataset) else source
    if place.state is not None and keeper is source:
        source.load_state_dict(place.state)
    snapshot = keeper.state_dict if keeps_state(keeper) else None
    skip = place.handed if place.state is None else place.skip
    tape = Tape(source, position=place.handed - skip, snapshot=snapshot)
    while tape.position < place.handed and tape.take(min(_AT_A_TIME, place.handed - tape.position)):
        tape.forget(tape.position)
    return tape


def keeps_state(thing: object) -> bool:
    """Whether it can save its position, and go back to it."""
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))
