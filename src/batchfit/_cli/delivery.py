"""What commands with one answer share: they show it on the screen, print it as JSON, or save it in files.

Rules: a file that cannot be written is refused before any work. Where one fails all the same, the answer is
shown first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from batchfit._charts.text_charts import Line, as_text
from batchfit._cli.exits import (
    Code,
    CommandFailed,
    interrupt_code,
    load_torch,
    uninterrupted,
)
from batchfit._cli.output import check_writable, stdout_for_results
from batchfit._cli.progress import ProgressDisplay, is_terminal, own_warnings_as_notes, progress_here, speaks
from batchfit._cli.signals import SIGNALS
from batchfit._files import write_atomically

# Roles of `batchfit._charts.text_charts` as rich styles; a role that is missing has none.
STYLES = {
    "strong": "bold",
    "dim": "dim",
    "head": "bold",
    "good": "bold green",
    "warn": "yellow",
    "level": "yellow",
    "curve": "cyan",
    "weights": "blue",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "batch": "cyan",
    "workspaces": "red",
    "temporaries": "bright_black",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Where an answer goes."""

    as_json: bool = False
    output: Path | None = None
    plot: Path | None = None
    markdown: Path | None = None
    report: Path | None = None

    def check(self) -> None:
        """Refuse files that cannot be written, while nothing is lost yet."""
        if self.output is not None:
            check_writable(self.output)
        if self.markdown is not None:
            check_writable(self.markdown, name="markdown")
        if self.report is not None:
            check_writable(self.report, name="report")
        if self.plot is not None:
            from batchfit._cli.png import check_plot

            check_plot(self.plot)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedAnswer:
    """An answer, ready to go out: as JSON, as lines for a given width, as a picture, Markdown, or HTML."""

    json: str
    lines: Callable[[int, bool], list[Line]]  # (width, plain)
    draw: Callable[[Path], None] | None = None
    markdown: str = ""
    page: Callable[[], str] = str  # where there is a report of it
    code: Code = Code.FOUND


def run_answer(delivery: Delivery, make: Callable[[ProgressDisplay], RenderedAnswer]) -> Code:
    """Let `make` answer with a progress display, and deliver: how it ended."""
    with stdout_for_results(alone=delivery.as_json) as stdout, SIGNALS.closed():
        progress = progress_here()
        try:
            with SIGNALS.opened(), progress, own_warnings_as_notes(progress):
                progress.doing("loading torch")
                load_torch()
                answer = make(progress)
        except (Exception, KeyboardInterrupt) as error:
            stop = SIGNALS.came_out(error)
            if stop is None:
                raise
            raise CommandFailed(interrupt_code(stop), "interrupted before there was an answer") from None
        if speaks():
            with uninterrupted():
                deliver(answer, stdout, delivery)
    return answer.code


def deliver(answer: RenderedAnswer, stdout: TextIO, delivery: Delivery) -> None:
    """Save and draw, then show; where a file fails the answer is shown all the same, and then the failure."""
    saved, lost = [], []
    for path, write in (
        (delivery.output, lambda path: write_atomically(path, answer.json + "\n")),
        (delivery.plot, answer.draw),
        (delivery.markdown, lambda path: write_atomically(path, answer.markdown)),
        (delivery.report, lambda path: write_atomically(path, answer.page())),
    ):
        if path is None or write is None:
            continue
        try:
            write(path)
            saved.append(str(path))
        except OSError as error:
            lost.append(f"{path}: {error.strerror or error}")
    if delivery.as_json:
        stdout.write(answer.json + "\n")
        stdout.flush()
    show(answer.lines, sys.stderr if delivery.as_json else stdout, saved=saved)
    if lost:
        raise CommandFailed(Code.BROKEN, f"the result could not be saved to {'; '.join(lost)}")


def show(lines: Callable[[int, bool], list[Line]], stream: TextIO, *, saved: Sequence[str] = ()) -> None:
    """Write lines to a stream: as wide as its terminal and in colour, or 80 columns of plain text."""
    ends: list[Line] = [[(f"  {'saved':<11}", "dim"), (", ".join(saved), "")]] if saved else []
    if not is_terminal(stream):
        plain = not _can_draw(stream)
        stream.write(as_text([*lines(80, plain), *ends]) + "\n")
        stream.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for line in [*lines(min(console.width, 120), console.options.ascii_only), *ends]:
        spans = [(text, STYLES.get(role, "")) for text, role in line]
        console.print(Text.assemble(*spans), soft_wrap=True)


def _can_draw(stream: TextIO) -> bool:
    """Whether the stream's encoding has the characters of a picture."""
    try:
        "█┄⠉●→…".encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
