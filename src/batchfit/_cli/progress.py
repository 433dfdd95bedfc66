"""What a person sees while trials run: on stderr, never on stdout.

Rules: on a terminal each trial is a row as it ends, and one line below says what runs now; elsewhere
each trial is one plain line without control codes; a rank that is not rank 0 says nothing. Text that
comes from the user is never read as markup; what the user's code prints, in a child process too, stands above
the line. Drawing holds no tensor and no exception.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO

import batchfit
from batchfit._engine.trial.pure.soak import SOAK_STEPS
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from batchfit.results import Trial


class Notes(Protocol):
    """Takes lines for the person who typed the command."""

    def note(self, line: str) -> None: ...


class ProgressDisplay:
    """Shows the events that it is given; this one says nothing (ranks other than 0)."""

    draws_rows = False  # the trials stand on the terminal as a table: no need to print it again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Nothing is shown any more."""

    def doing(self, what: str) -> None:
        """Between trials: `loading train.py:make`."""

    def note(self, line: str) -> None:
        """A line that stays."""

    def step(self, size: int, number: int) -> None:
        """Step `number` of a trial begins."""

    def trial(self, number: int, trial: Trial, budget_bytes: int) -> None:
        """Trial `number` ended."""


def progress_here(*, steps: int = 0, soak_steps: int | None = 0) -> ProgressDisplay:
    """The progress that suits this process's stderr."""
    if not speaks():
        return ProgressDisplay()
    if is_terminal(sys.stderr):
        return Live(steps=steps, soak_steps=soak_steps)
    return TrialLines()


def speaks() -> bool:
    """Whether this process is the one that talks: rank 0, or not under torchrun at all."""
    return os.environ.get("RANK", "0").strip() in ("", "0")


def is_terminal(stream: TextIO) -> bool:
    """A terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


@contextmanager
def own_warnings_as_notes(progress: Notes) -> Iterator[None]:
    """Inside, a warning of batchfit's is a note for the person who typed the command, not a line of code."""
    package = os.path.dirname(batchfit.__file__)

    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, *rest: Any, **more: Any
        ) -> None:
            if filename.startswith(package + os.sep):
                progress.note(f"warning: {message}")
            else:
                before(message, category, filename, *rest, **more)

        warnings.showwarning = show
        yield


def pass_on(text: str, is_error: bool) -> None:
    """Print what a child process has printed: above the line that says what runs now."""
    (sys.stderr if is_error else sys.stdout).write(text)


class TrialLines(ProgressDisplay):
    """One plain line for each trial, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr

    def note(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def trial(self, number: int, trial: Trial, budget_bytes: int) -> None:
        self.note(trial_line(number, trial, budget_bytes))


def trial_line(number: int, trial: Trial, budget_bytes: int) -> str:
    """`trial 3: size 24: fits, 3 steps, 18.2 GiB of 23.8 GiB (76.5%), 0.41 s`."""
    used = used_bytes(trial)
    memory = "no memory reading"
    if used is not None:
        memory = f"{format_bytes(used)} of {format_bytes(budget_bytes)} ({used / budget_bytes:.1%})"
    steps = "1 step" if trial.steps_run == 1 else f"{trial.steps_run} steps"
    phase = f" in {trial.phase}" if trial.phase and not trial.fits else ""
    outcome = f"{trial.verdict}{phase}"
    return f"trial {number}: size {trial.size}: {outcome}, {steps}, {memory}, {trial.elapsed_s:.2f} s"


def used_bytes(trial: Trial) -> int | None:
    """What counts against the budget: what the allocator reserved where that is known, else the peak."""
    return trial.reserved_bytes if trial.reserved_bytes is not None else trial.peak_bytes


COLUMNS = {"size": 7, "verdict": 12, "steps": 5, "memory": 10, "of budget": 9, "s/step": 8, "time": 8}
_LONGEST_BAR, _SHORTEST_BAR = 24, 8
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_PATIENCE_S = 0.12  # between two pictures: the drawing thread shares the interpreter with the steps


class Picture:
    """What is redrawn at the bottom of a terminal, below the lines that stay; a context."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)

    def __enter__(self) -> Self:
        from rich.live import Live as RichLive

        self._live = RichLive(
            console=self._console,
            get_renderable=self.picture,
            refresh_per_second=1 / _PATIENCE_S,
            transient=True,
            # Where stdout is no terminal, what the user's code prints there belongs to whoever reads it.
            redirect_stdout=os.isatty(1),
        )
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def note(self, line: str) -> None:
        """A line that stays."""
        from rich.text import Text

        self._console.print(Text(line, style="dim"))

    def picture(self) -> RenderableType:
        """What stands there now."""
        raise NotImplementedError


class Live(Picture, ProgressDisplay):
    """Rows on a terminal, and a line below them with what runs now."""

    draws_rows = True

    def __init__(self, *, steps: int, soak_steps: int | None, console: Console | None = None) -> None:
        super().__init__(console)
        self._steps = steps
        self._soak_steps = max(SOAK_STEPS, steps) if soak_steps is None else soak_steps
        self._ascii = self._console.options.ascii_only
        self._columns, self.bar_width = _layout(self._console.width)
        self._what, self._since = "starting", time.monotonic()
        self._size, self._number, self._heading = 0, 0, False

    def doing(self, what: str) -> None:
        self._what, self._size, self._since = what, 0, time.monotonic()

    def step(self, size: int, number: int) -> None:
        if size != self._size or number == 1:
            self._since = time.monotonic()
        self._size, self._number = size, number

    def trial(self, number: int, trial: Trial, budget_bytes: int) -> None:
        if not self._heading:
            self._console.print()
            self._console.print(self._heads())
            self._heading = True
        self._console.print(self._row(trial, budget_bytes))
        self.doing("choosing the next size")

    def _heads(self) -> Text:
        from rich.text import Text

        cells = {name: _cell(name, name) for name in self._columns}
        if self.bar_width:
            cells["memory"] = " " * (self.bar_width + 2) + cells["memory"]
        return Text("  ".join(cells.values()), style="bold")

    def _row(self, trial: Trial, budget_bytes: int) -> Text:
        from rich.text import Text

        used = used_bytes(trial)
        share = used / budget_bytes if used is not None and budget_bytes else None
        colour = _colour(trial)
        cells = {
            "size": str(trial.size),
            "verdict": trial.verdict,
            "steps": str(trial.steps_run),
            "memory": "-" if used is None else format_bytes(used),
            "of budget": "-" if share is None else f"{share:.1%}",
            "s/step": "-" if trial.step_s is None else f"{trial.step_s:.3g}",
            "time": f"{trial.elapsed_s:.2f} s",
        }
        row = Text()
        for name in self._columns:
            row.append("  " if row else "")
            if name == "memory" and self.bar_width:
                full, rest = self.bar(share or 0.0)
                row.append(full, style=colour).append(rest, style="dim").append("  ")
            style = {"size": "bold", "outcome": colour}.get(name, "" if trial.fits else "dim")
            row.append(_cell(name, cells[name]), style=style)
        return row

    def bar(self, share: float) -> tuple[str, str]:
        """The part of a bar that is used, and the part that is free."""
        eighths = round(min(share, 1.0) * self.bar_width * 8)
        if self._ascii:
            used = "#" * round(eighths / 8)
            return used, "." * (self.bar_width - len(used))
        full, part = divmod(eighths, 8)
        used = "█" * full + (_EIGHTHS[part] if part else "")
        return used, "·" * (self.bar_width - len(used))

    def picture(self) -> Text:
        from rich.text import Text

        # Read once: the steps run in another thread than this.
        size, number, what, elapsed_s = self._size, self._number, self._what, time.monotonic() - self._since
        frames = "|/-\\" if self._ascii else "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
        line = Text(frames[int(elapsed_s / _PATIENCE_S) % len(frames)] + " ", style="cyan")
        if size:
            soaking = number > self._steps
            of = self._soak_steps if soaking else self._steps
            line.append(f"{'soaking' if soaking else 'trying'} {size}", style="bold")
            line.append(f"  step {number} of {max(of, number)}", style="none")
        else:
            line.append(what, style="none")
        line.append(f"  {elapsed_s:.0f} s" if elapsed_s >= 1 else "", style="dim")
        line.truncate(max(8, self._console.width - 1), overflow="ellipsis")
        return line


def _layout(console_width: int) -> tuple[list[str], int]:
    """The columns that a terminal has room for, and how long the bar of memory may be (0: none)."""
    for dropped in ((), ("s/step",), ("s/step", "time")):
        columns = [name for name in COLUMNS if name not in dropped]
        room = console_width - sum(COLUMNS[name] + 2 for name in columns) - 1
        if room >= _SHORTEST_BAR:
            return columns, min(room, _LONGEST_BAR)
    return [name for name in COLUMNS if name not in ("s/step", "time")], 0


def _cell(name: str, text: str) -> str:
    return text.ljust(COLUMNS[name]) if name == "verdict" else text.rjust(COLUMNS[name])


def _colour(trial: Trial) -> str:
    if not trial.fits:
        return "red"
    return "yellow" if trial.settled_retries else "green"
