"""What a sweep runs for each configuration, as a value that other processes can load, and who runs it.

Rules:
- A `Job` can be pickled where its functions can, so another process may run it; `in_full` is the one for a
  process with another current folder.
- An engine maps configurations that wait to records as they end (`Engine`), and changes nothing about them;
  `here` is the one of this process, which ends where the device has died.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

from batchfit import errors
from batchfit._engine.workload.target import in_full
from batchfit._knobs import Configuration
from batchfit._sweep.configuration import DEAD, run_configuration
from batchfit._sweep.pure.events import OnEvent
from batchfit._sweep.pure.grid import Entry
from batchfit._sweep.run_state import SweepSettings
from batchfit.results import SweepRecord


@final
@dataclass(frozen=True, slots=True)
class Job:
    """What is run for each configuration; `factory` is a function of the knobs, or a target's text."""

    factory: Callable[..., object] | str
    settings: SweepSettings

    def run(self, configuration: Configuration, on_event: OnEvent | None = None) -> SweepRecord:
        """The record of one configuration."""
        return run_configuration(self.factory, configuration, self.settings, on_event=on_event)

    def in_full(self) -> Job:
        """The same job for a process with another current folder."""
        settings = self.settings
        named = {name: in_full(getattr(settings, name)) for name in ("measure", "estimate")}
        return Job(in_full(self.factory), replace(settings, **named))


class Engine(Protocol):
    """Runs the configurations that wait, and yields each record as soon as it is there, in any order."""

    def __call__(
        self, job: Job, waiting: Sequence[Entry], on_event: OnEvent
    ) -> Generator[SweepRecord, None, None]: ...


def here(job: Job, waiting: Sequence[Entry], on_event: OnEvent) -> Generator[SweepRecord, None, None]:
    """The engine of this process: one after the other."""
    for entry in waiting:
        record = job.run(entry.configuration, on_event)
        yield record
        if record.stopped_because == DEAD:
            raise errors.SearchStoppedError(
                f"the device died in {entry.label}, and nothing more can run in this process "
                f"({record.error}). Start the sweep again with resume."
            )
