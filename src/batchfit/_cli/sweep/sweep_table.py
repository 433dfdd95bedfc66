"""A sweep on the screen while it runs: a table on a terminal, lines anywhere else.

Rules: a line is that of the log (`_sweep.pure.events`); a table shows every configuration that there is room
for, what runs now and about how long the rest will take; nothing is drawn where nobody reads, and where the
reader goes away in the middle (`2>&1 | head`) the sweep runs on in silence. Rich is loaded for a terminal
only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

from batchfit._cli.progress import Picture, is_terminal, speaks
from batchfit._knobs import key_of, short
from batchfit._sweep.pure.events import SweepEvent, event_line
from batchfit._sweep.pure.grid import Entry

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from batchfit.results import SweepRecord

_GAP = 2  # between two columns
_LEAST_COLUMN = 5  # a word that can still be distinguished from others
_LEAST_STATUS = 24  # what runs now: "measuring at 1024  12 s"


def screen_here(
    entries: Sequence[Entry], records: Sequence[SweepRecord], *, at_once: Callable[[], int] = lambda: 1
) -> SweepTable | SweepLines:
    """The screen that suits this process's stderr; `at_once()` is how many configurations run at a time."""
    if speaks() and is_terminal(sys.stderr):
        return SweepTable(entries, records, at_once=at_once)
    stream = sys.stderr if speaks() else None
    return SweepLines(stream, total=len(entries), done=len(records), at_once=at_once)


class Pace:
    """How long the rest will take, by what has been run now."""

    def __init__(self, waiting: int, at_once: Callable[[], int] = lambda: 1) -> None:
        self.waiting = waiting
        self._at_once = at_once
        self._times_s: list[float] = []

    def ended(self, elapsed_s: float) -> None:
        """A configuration ended."""
        self.waiting -= 1
        self._times_s.append(elapsed_s)

    @property
    def left(self) -> str:
        """`about 3 min left`; empty before the first has ended and after the last."""
        if not self._times_s or self.waiting <= 0:
            return ""
        each_s = sum(self._times_s) / len(self._times_s)
        rounds = max(1.0, self.waiting / max(1, self._at_once()))
        return f"about {_seconds(rounds * each_s)} left"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class SweepLines:
    """The log's lines, and after each configuration how far the sweep is."""

    def __init__(
        self,
        stream: TextIO | None,
        *,
        total: int,
        done: int = 0,
        at_once: Callable[[], int] = lambda: 1,
    ) -> None:
        self._stream = stream
        self._done, self._total = done, total
        self._pace = Pace(total - done, at_once)
        self._running: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to end."""

    def note(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def on_event(self, event: SweepEvent) -> None:
        line, key = event_line(event), key_of(event.knobs)
        if event.record is None:
            self._running.add(key)
        if line and event.kind == "trying" and len(self._running) > 1:
            line = f"{line.removesuffix('...')} for {event.label}..."  # or nobody knows whose line it is
        if line:
            self.note(line)
        self._running -= {key} if event.record is not None else set()
        if event.record is not None:
            self._done += 1
            self._pace.ended(event.record.elapsed_s)
            left = f", {self._pace.left}" if self._pace.left else ""
            self.note(f"{self._done} of {self._total} configurations{left}")


class SweepTable(Picture):
    """One row per configuration, redrawn on a terminal."""

    def __init__(
        self,
        entries: Sequence[Entry],
        records: Sequence[SweepRecord],
        *,
        console: Console | None = None,
        at_once: Callable[[], int] = lambda: 1,
    ) -> None:
        super().__init__(console)
        self._entries = entries
        self._records = {record.key: record for record in records}
        self._doing: dict[str, tuple[str, float]] = {}  # what runs now, and since when
        self._pace = Pace(len(entries) - len(self._records), at_once)

    def on_event(self, event: SweepEvent) -> None:
        key = key_of(event.knobs)
        if event.record is not None:
            self._records[key] = event.record
            self._doing.pop(key, None)
            self._pace.ended(event.record.elapsed_s)
            return
        since = self._doing[key][1] if key in self._doing else time.monotonic()
        self._doing[key] = (_doing(event), since)

    def picture(self) -> RenderableType:
        """The table as it is now."""
        from rich.console import Group
        from rich.table import Table as RichTable

        records = dict(self._records)  # read once: the sweep runs in another thread than this
        knobs = list(self._entries[0].configuration)
        measures = list(dict.fromkeys(name for one in records.values() for name in one.measures))
        visible = self._visible(records, max(3, self._console.height - 4))
        rows = [self._row(entry, records.get(entry.key), measures) for entry in visible]
        names = [*knobs, "batch size", *measures]
        widths = [max(len(name), *(row[index].cell_len for row in rows)) for index, name in enumerate(names)]
        shown = column_widths(widths, first=len(knobs) + 1, room=self._console.width)
        table = RichTable(box=None, pad_edge=False, header_style="bold")
        for name, width in zip(names, shown, strict=False):
            table.add_column(name, justify="right", no_wrap=True, overflow="ellipsis", width=width)
        # rich 13.7 to 14.0 counts a gap after the last column, too, and would shorten another for it.
        left = self._console.width - sum(width + _GAP for width in shown) - _GAP
        table.add_column("", no_wrap=True, overflow="ellipsis", width=max(1, left))
        for row in rows:
            table.add_row(*row[: len(shown)], row[-1])
        return Group(table, self._foot(len(records)))

    def _visible(self, records: Mapping[str, SweepRecord], room: int) -> Sequence[Entry]:
        """The rows around what runs now, where not all of them have room."""
        if len(self._entries) <= room:
            return self._entries
        now = next((i for i, entry in enumerate(self._entries) if entry.key not in records), 0)
        first = min(max(0, now - room * 2 // 3), len(self._entries) - room)
        return self._entries[first : first + room]

    def _row(self, entry: Entry, record: SweepRecord | None, measures: Sequence[str]) -> list[Text]:
        from rich.text import Text

        values: list[tuple[str, str]] = [(short(value), "") for value in entry.configuration.values()]
        if record is None:
            what, since = self._doing.get(entry.key, ("", 0.0))
            seconds = f"  {time.monotonic() - since:.0f} s" if what else ""
            values += [("", "")] * (1 + len(measures)) + [(what + seconds, "cyan")]
        else:
            values.append((short(record.batch_size_used), "bold"))
            values += [(short(record.measures.get(name)), "") for name in measures]
            failed = record.error is not None
            values.append((record.error or f"{record.elapsed_s:.1f} s", "red" if failed else "dim"))
        return [Text(text, style=style) for text, style in values]

    def _foot(self, done: int) -> Text:
        from rich.text import Text

        failed = sum(one.error is not None for one in list(self._records.values()))
        parts = [f"{done} of {len(self._entries)} configurations", self._pace.left]
        parts.append(f"{failed} failed" if failed else "")
        return Text(", ".join(part for part in parts if part), style="dim")


def column_widths(widths: Sequence[int], *, first: int, room: int) -> list[int]:
    """The width of each column that is shown, by what they would take and the width of the terminal.

    The `first` ones, knobs and batch size, are always there, cut where they must be. Measures follow as far
    as there is room for them whole; the file has them all. What runs now has a place in any case.
    """
    shown = list(widths[:first])
    room -= _LEAST_STATUS
    while sum(width + _GAP for width in shown) > room and max(shown) > _LEAST_COLUMN:
        shown[shown.index(max(shown))] -= 1
    for width in widths[first:]:
        if sum(one + _GAP for one in shown) + width + _GAP > room:
            break
        shown.append(width)
    return shown


def _doing(event: SweepEvent) -> str:
    words: dict[str, Any] = {
        "begin": "making the workload",
        "search": "choosing a size",
        "trying": f"{'soaking' if event.again else 'trying'} {event.size}",
        "trial": "choosing the next size",
        "using": f"{event.size} found",
        "measure": f"measuring at {event.size}",
        "measure_oom": f"out of memory: measuring at {event.size}",
    }
    return str(words[event.kind])
