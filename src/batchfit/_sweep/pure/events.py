"""What happens in a sweep, as values, and the lines that report it.

Rules: an event is made when its thing happens, by whoever runs the configuration; lines are made from events
alone, so that a log, a terminal and another process say the same. Imports nothing heavy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from batchfit._knobs import label, short

if TYPE_CHECKING:
    from batchfit.results import SweepRecord, Trial

log = logging.getLogger("batchfit")

Kind = Literal["begin", "search", "trying", "trial", "using", "measure", "measure_oom", "record"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEvent:
    """One thing that happened to one configuration of a sweep: what `on_event` is called with.

    Attributes:
        kind: "begin": its turn has come. "search": its workload is made. "trying": a trial begins. "trial":
            it ended. "using": the size is found. "measure": the measurement begins. "measure_oom": it was out
            of memory and continues at `size`. "record": all of it is in `record`.
        knobs: the values of its knobs, by name.
        size: the batch size per process in question; None where there is none.
        before: size of the last trial, or at which the measurement was out of memory.
        again: a size that has run is tried for longer (the stability check).
        estimate: what the estimate named; None without one.
        start: the first size that the search was given; None without one.
        budget_bytes: bytes that the program may use; 0 where that is not known.
        trial: the trial that ended, with "trial".
        record: the record, with "record".
    """

    kind: Kind
    knobs: Mapping[str, Any]
    size: int | None = None
    before: int | None = None
    again: bool = False  # a size that has run is tried for longer
    estimate: int | None = None
    start: int | None = None
    budget_bytes: int = 0
    trial: Trial | None = None
    record: SweepRecord | None = None

    @property
    def label(self) -> str:
        """`max_crops=12`."""
        return label(self.knobs)


OnEvent = Callable[[SweepEvent], object]


def report_event(event: SweepEvent, on_event: OnEvent | None) -> None:
    """Log an event, and hand it over."""
    line = event_line(event)
    if line:
        log.info("%s", line)
    if on_event is not None:
        on_event(event)


def event_line(event: SweepEvent) -> str:
    """The event as a line of a log; empty where there is nothing to say."""
    return _LINES[event.kind](event)


def _search(event: SweepEvent) -> str:
    if event.estimate is not None:
        how = f" (estimated: {event.estimate}, starting with: {event.start})"
    else:
        how = f" (starting with: {event.start})" if event.start is not None else ""
    return f"Finding the largest batch size for {event.label}{how}..."


def _trying(event: SweepEvent) -> str:
    if event.again:
        return f"  Trying batch size {event.size} for longer..."
    if event.before is None or event.size is None:
        return ""
    way = "larger" if event.size > event.before else "smaller"
    return f"  Trying {way} batch size: {event.size}..."


def _trial(event: SweepEvent) -> str:
    trial = event.trial
    assert trial is not None
    if trial.fits:
        steps = f" for {trial.steps_run} steps" if trial.soak else ""
        return f"✓ Batch size {trial.size} works{steps} for {event.label}"
    what = {"oom": "OOM", "too_large": "an error of size"}.get(trial.outcome, trial.outcome)
    return f"✗ Batch size {trial.size} caused {what} for {event.label}"


def _record(event: SweepEvent) -> str:
    record = event.record
    assert record is not None
    if record.error is not None:
        return f"✗ {event.label} failed: {record.error}"
    if not record.measures:
        return ""
    measures = ", ".join(f"{name}={short(value)}" for name, value in record.measures.items())
    return f"Measured {event.label} at batch size {record.batch_size_used}: {measures}"


_LINES: dict[str, Callable[[SweepEvent], str]] = {
    "begin": lambda event: f"Testing {event.label}",
    "search": _search,
    "trying": _trying,
    "trial": _trial,
    "using": lambda event: f"Using batch size: {event.size} for {event.label}",
    "measure": lambda event: f"Measuring {event.label} at batch size {event.size}...",
    "measure_oom": lambda event: (
        f"✗ Measuring at batch size {event.before} caused OOM for {event.label}; trying {event.size}..."
    ),
    "record": _record,
}
