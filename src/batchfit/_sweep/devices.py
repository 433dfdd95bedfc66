"""A sweep on several devices of this machine: one child process for each, and whoever is free takes the next.

Rules:
- The parent alone keeps records; a configuration is given to one child at a time, so it has one record.
- A child that dies is noticed. Its configuration is tried once more, in another process; if that one dies
  too, the record says how. A device that is dead costs its child, not the sweep.
- A child that cannot even start ends the sweep, before every configuration is recorded as failed for it.
- However the engine ends (the last record, an error, Ctrl-C), no process is left.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import final

from batchfit import errors
from batchfit._engine.trial.child_process import wait_for_any
from batchfit._sweep.configuration import DEAD
from batchfit._sweep.job import Job
from batchfit._sweep.pure.events import OnEvent, SweepEvent
from batchfit._sweep.pure.grid import Entry
from batchfit._sweep.pure.visible_devices import VisibleDevice
from batchfit._sweep.worker import Death, Worker, check_may_have_children, portable
from batchfit.results import SweepRecord

log = logging.getLogger("batchfit")

TRIES = 2  # processes in which a configuration may die
_MOST_BAD_STARTS = 3  # in a row, of children on one device


@final
@dataclass(frozen=True, slots=True)
class Devices:
    """The engine: `Devices(places)(job, waiting, on_event)`."""

    places: tuple[VisibleDevice, ...]

    @property
    def at_once(self) -> int:
        """How many configurations run at a time."""
        return len(self.places)

    def __call__(
        self, job: Job, waiting: Sequence[Entry], on_event: OnEvent
    ) -> Generator[SweepRecord, None, None]:
        check_may_have_children()
        slots = [_DeviceSlot.at(place, job) for place in self.places[: len(waiting)]]
        queue = deque((entry, 1) for entry in waiting)
        ended = False
        try:
            while queue or any(slot.worker.entry is not None for slot in slots):
                for slot in slots:
                    if queue and slot.worker.entry is None:
                        slot.begin(*queue.popleft())
                wait_for_any(slot.worker.child for slot in slots if slot.worker.child is not None)
                for slot in slots:
                    for said in slot.worker.said():
                        if isinstance(said, SweepEvent):
                            on_event(said)
                            continue
                        record = slot.settled(said)
                        if record is None:
                            queue.appendleft(slot.again())
                            continue
                        yield record
            ended = True
        finally:
            for slot in slots:
                slot.worker.end(gently=ended)


@final
@dataclass(slots=True)
class _DeviceSlot:
    """A device, the process that works there, and what it has been given."""

    place: VisibleDevice
    worker: Worker
    entry: Entry | None = None
    number: int = 1  # how often this configuration has been given to a process
    bad_starts: int = 0

    @classmethod
    def at(cls, place: VisibleDevice, job: Job) -> _DeviceSlot:
        here = Job(job.factory, replace(job.settings, device=place.device))
        return cls(place, Worker(portable(here), environment=place.environment))

    def begin(self, entry: Entry, number: int) -> None:
        self.entry, self.number = entry, number
        self.worker.begin(entry)

    def again(self) -> tuple[Entry, int]:
        """What is to be run once more, by whoever is free."""
        assert self.entry is not None
        return self.entry, self.number

    def settled(self, said: SweepRecord | Death) -> SweepRecord | None:
        """The record to keep; None where the configuration is to be tried again."""
        assert self.entry is not None
        if isinstance(said, SweepRecord):
            self.bad_starts = 0
            if said.stopped_because == DEAD:
                self.worker.end()  # the next configuration has a process, and a context, of its own
            return said.model_copy(update={"device": self.place.name}) if self.place.is_cuda else said
        if not said.started:
            self.bad_starts += 1
            if self.bad_starts < _MOST_BAD_STARTS:
                return None
            raise errors.SearchStoppedError(
                f"a child process on {self.place.name} {said.text} before it could run anything, "
                f"{self.bad_starts} times in a row"
            )
        if self.number < TRIES:
            self.number += 1
            log.warning("%s: the process %s; trying it once more", self.entry.label, said.text)
            return None
        text = f"ChildDiedError: the process that ran it on {self.place.name} {said.text}, {TRIES} times"
        return self.worker.failed(self.entry, text)
