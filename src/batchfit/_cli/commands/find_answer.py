"""How `batchfit find` shows its answer: the size, then device, memory, trials and why the search stopped.

Rules: one list of lines serves the terminal, a log and a pipe; a line that scripts may want to parse is
not here (that is `--json`); nothing is claimed that was not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from batchfit._cli.progress import is_terminal, used_bytes
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import FitResult, Outcome

# How a child process can end without an answer.
_LITTLE_LARGER = 1.05
_ENDINGS: dict[Outcome, str] = {"killed": "killed", "timeout": "timed out"}


def memory_label(device: str, budget_bytes: int) -> str:
    """`cuda:0, 23.8 GiB` or `cpu, virtual memory of 512 MiB`."""
    if device.partition(":")[0] == "cpu":
        return f"{device}, virtual memory of {format_bytes(budget_bytes)}"
    return f"{device}, {format_bytes(budget_bytes)}"


def headline(fit: FitResult) -> str:
    """The answer in one line."""
    if fit.stopped_because == "interrupted":
        return f"interrupted: {fit.batch_size} is the largest batch size that ran so far"
    return f"{fit.size_text} {fit.lasted}"


def facts(
    fit: FitResult,
    *,
    saved: Path | None,
    ranks: int = 1,
    kept: str | None = None,
    use: Callable[[int], str] | None = None,
    next_command: str = "",
) -> list[tuple[str, str]]:
    """Device, memory, trials, and how to use the answer: (label, text) pairs.

    `use` shows the answer in the user's own command; `next_command` is what to ask next.
    """
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    runs = [used_bytes(trial) for trial in fit.trials if trial.size == fit.batch_size and trial.fits]
    used = max((count for count in runs if count is not None), default=None)
    lines = [("device", memory_label(fit.device, fit.budget_bytes))]
    if used is not None:
        lines.append(("memory", f"{format_bytes(used)} used, {used / fit.budget_bytes:.1%} of the budget"))
    if fit.shrunk_from_bytes is not None:
        gone = format_bytes(fit.shrunk_from_bytes - fit.budget_bytes)
        lines.append(("gone", f"{gone} went to other programs meanwhile; the size is for what is left"))
    if fit.made_of:
        lines.append(("batches", fit.made_of))
    lines += [
        ("trials", f"{len(fit.trials)} in {fit.elapsed_s:.1f} s{fit.resumed}, {_failures(fit)}"),
        ("stopped", f"because {_reason(fit)}"),
        *(("caveat", one) for one in fit.unseen),
    ]
    if fit.stopped_because != "interrupted" and use is not None:
        lines += [*dataset_note(fit.batch_size + 1, fit.samples), ("use it", use(fit.batch_size))]
    elif fit.max_tokens is not None and fit.stopped_because != "interrupted":
        lines.append(("use it", f"TokenBatchSampler(lengths, max_tokens={fit.max_tokens}){each}"))
    elif fit.stopped_because != "interrupted":
        lines += how_to_use(fit.batch_size, fit.samples, each=each)
    elif kept is not None:
        lines.append(("go on", f"the same command again: the search is in {kept}"))
    if fit.from_store:
        age = format_age(fit.stored_age_s or 0.0)
        lines.insert(0, ("stored", f"found {age} ago, confirmed now; --fresh searches again"))
    if saved is not None:
        lines.append(("saved", str(saved)))
    if next_command and fit.stopped_because != "interrupted":
        lines.append(("next", f"{next_command}  (is the largest also the fastest?)"))
    return lines


def how_to_use(
    batch_size: int, samples: int | None, *, each: str = "", use: Callable[[int], str] | None = None
) -> list[tuple[str, str]]:
    """The answer as a line of a program, or what `use` makes of a size.

    A batch that is larger than the dataset would never be full.
    """
    usable = batch_size if samples is None else min(batch_size, samples)
    line = f"DataLoader(dataset, batch_size={usable}){each}" if use is None else use(usable)
    return [*dataset_note(batch_size, samples), ("use it", line)]


def dataset_note(batch_size: int, samples: int | None) -> list[tuple[str, str]]:
    """That the dataset has fewer samples than the answer, where it has."""
    if samples is None or batch_size <= samples:
        return []
    return [("dataset", f"it has {samples} samples: no batch of it is larger")]


def _reason(fit: FitResult) -> str:
    """Why the search stopped; what failed just above the answer says more than what memory is left."""
    above = [trial for trial in fit.trials if not trial.fits and trial.size > fit.batch_size]
    if fit.stopped_because == "within_tolerance" and above:
        least = min(above, key=lambda trial: trial.size)
        if least.size <= _LITTLE_LARGER * fit.batch_size:
            return f"{least.size}, little larger, was tried and does not run"
        if least.outcome in _ENDINGS:  # which says nothing of the memory that is left
            return f"{least.size} was tried and does not run"
    return fit.reason


def _failures(fit: FitResult) -> str:
    """`none ran out of memory`, `2 ran out of memory, 1 was killed`."""
    counts = Counter(trial.outcome for trial in fit.trials)
    ran_out = counts["oom"] + counts["too_large"]
    parts = [f"{ran_out or 'none'} ran out of memory"]
    parts += [f"{counts[name]} {words}" for name, words in _ENDINGS.items() if counts[name]]
    return ", ".join(parts)


def show_answer(
    fit: FitResult,
    stream: TextIO,
    *,
    with_table: bool,
    saved: Path | None,
    ranks: int = 1,
    kept: str | None = None,
    use: Callable[[int], str] | None = None,
    next_command: str = "",
) -> None:
    """Write the end of a search to a stream, in colour where it is a terminal."""
    table = ""
    if with_table:
        table = str(fit).rpartition("\n")[0] + "\n"  # its last line is the summary, shown below at length
    rows = facts(fit, saved=saved, ranks=ranks, kept=kept, use=use, next_command=next_command)
    if not is_terminal(stream):
        body = "".join(f"{label:<8} {text}\n" for label, text in rows)
        stream.write(f"{table}\n{headline(fit)}\n{body}")
        stream.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if table:
        console.print(Text(table))
    colour = "bold green" if fit.stopped_because != "interrupted" else "bold yellow"
    console.print(Text("\n" + headline(fit), style=colour))
    for label, text in rows:
        strong = "bold" if label in ("use it", "go on") else ""
        console.print(Text.assemble((f"  {label:<8} ", "dim"), (text, strong)))


def format_age(age_s: float) -> str:
    """`40 seconds`, `3 hours`, `12 days`: one number, rounded down."""
    for noun, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if age_s >= length_s:
            return count_of(int(age_s // length_s), noun)
    return count_of(int(age_s), "second")


def count_of(number: int, noun: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
