"""What `predict`, `explain` and `profile` share: a target that is loaded, and an answer that is delivered.

Rules: whatever goes wrong is said once, with the exit code that a script can act on. What is wrong with the
flags or the target's name is said before torch is loaded. Where a target cannot be built here, the error says
how it can be. An error that is neither the user's nor about an argument is ours: it comes with its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from batchfit import errors
from batchfit._charts.text import Line, as_text
from batchfit._cli.exits import (
    Code,
    CommandFailed,
    interrupt_code,
    load_torch,
    sigterm_interrupts,
    uninterrupted,
)
from batchfit._cli.output import check_writable, stdout_for_results
from batchfit._cli.progress import ProgressDisplay, is_terminal, own_warnings_as_notes, progress_here, speaks
from batchfit._cli.target import Given
from batchfit._engine.workload import user_errors as failure
from batchfit._engine.workload.target import home_of
from batchfit._files import write_atomically

if TYPE_CHECKING:
    from batchfit.workload import Workload

Options = TypeVar("Options")
# Roles of `batchfit._charts.text` as rich styles; a role that is missing has none.
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

    def check(self) -> None:
        """Refuse files that cannot be written, while nothing is lost yet."""
        if self.output is not None:
            check_writable(self.output)
        if self.plot is not None:
            from batchfit._cli.png import check_plot

            check_plot(self.plot)


@dataclass(frozen=True, slots=True)
class TargetCall:
    """What was typed: a target, the command's flags, where the answer goes, the target's own arguments."""

    target: str
    flags: Mapping[str, Any]
    delivery: Delivery = field(default_factory=Delivery)
    full_traceback: bool = False
    arguments: tuple[str, ...] = ()

    def given(self) -> Given:
        """The target, parsed; nothing is loaded."""
        return Given.parse(self.target, self.arguments, full_traceback=self.full_traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedAnswer:
    """An answer, ready to go out: as JSON, as lines for a given width, and as a picture."""

    json: str
    lines: Callable[[int, bool], list[Line]]  # (width, plain)
    draw: Callable[[Path], None]
    code: Code = Code.FOUND


Work = Callable[["Workload", ProgressDisplay], RenderedAnswer]


def run_traced(call: TargetCall, work: Work, *, command: str) -> Code:
    """Load the target, let `work` answer, and deliver: how it ended."""
    given = call.given()

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        progress.doing(f"loading {call.target}")
        workload = given.load(advise=True)
        with _explained(call, given, command):
            return work(workload, progress)

    call.delivery.check()
    return run_answer(call.delivery, answer)


def run_answer(delivery: Delivery, make: Callable[[ProgressDisplay], RenderedAnswer]) -> Code:
    """Let `make` answer with a progress display, and deliver: how it ended."""
    with stdout_for_results(alone=delivery.as_json) as stdout:
        progress = progress_here()
        try:
            with sigterm_interrupts(), progress, own_warnings_as_notes(progress):
                progress.doing("loading torch")
                load_torch()
                answer = make(progress)
        except KeyboardInterrupt as stop:
            raise CommandFailed(interrupt_code(stop), "interrupted before there was an answer") from None
        if speaks():
            with uninterrupted():
                deliver(answer, stdout, delivery)
    return answer.code


def checked_options(kind: type[Options], call: TargetCall, command: str) -> Options:
    """The options that the flags say; wrong ones are refused before torch is loaded."""
    try:
        return kind(**call.flags)
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, command) from None


def wrong_flag(error: Exception, command: str) -> CommandFailed:
    """A flag's value is refused."""
    where = (
        "predict --list-gpus lists the GPUs"
        if str(error).startswith("gpu ")
        else f"{command} --help lists the flags"
    )
    return CommandFailed(Code.USAGE, f"{error} (batchfit {where})")


@contextmanager
def _explained(call: TargetCall, given: Given, command: str) -> Iterator[None]:
    """Inside, an error ends the command with its exit code; one of batchfit's own comes out as it is."""
    try:
        yield
    except errors.UntraceableError as error:
        cause = error.__cause__ or error
        full = given.full_traceback
        shown = full or error.raised  # what may be an error of the user's is shown as one
        details = failure.details(cause, home=home_of(given.target), full=full) if shown else ""
        raise CommandFailed(Code.UNTRACEABLE, str(error), details=details, every_rank=True) from None
    except errors.NothingFitsError as error:
        raise CommandFailed(Code.NOTHING_FITS, str(error)) from None
    except errors.SearchStoppedError as error:
        raise CommandFailed(Code.STOPPED, str(error)) from None
    except errors.BatchfitError as error:
        raise CommandFailed(Code.RAISED, str(error), every_rank=True) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) or failure.raised_by_step(error):
            raise given.raised(error, advise=True) from None
        # Every argument that is refused is named first: "budget must be positive, not 0".
        if isinstance(error, ValueError | TypeError) and str(error).partition(" must ")[0] in call.flags:
            raise wrong_flag(error, command) from None
        raise


def deliver(answer: RenderedAnswer, stdout: TextIO, delivery: Delivery) -> None:
    """Save and draw, then show; where a file fails the answer is shown all the same, and then the failure."""
    saved, lost = [], []
    for path, write in (
        (delivery.output, lambda path: write_atomically(path, answer.json + "\n")),
        (delivery.plot, answer.draw),
    ):
        if path is None:
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
        pieces = [(text, STYLES.get(role, "")) for text, role in line]
        console.print(Text.assemble(*pieces), soft_wrap=True)


def _can_draw(stream: TextIO) -> bool:
    """Whether the stream's encoding has the characters of a picture."""
    try:
        "█┄⠉●→…".encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
