"""`batchfit sweep`: from a file to a size and a measurement for every configuration.

Rules: what is wrong with the file is said with its line, before anything is run; the result is on disk after
each configuration, and an interrupt loses only the one that was running; a sweep in which something failed
ends with another code than one in which nothing did.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from batchfit import errors
from batchfit._cli.exits import (
    Code,
    CommandFailed,
    interrupt_code,
    load_torch,
    uninterrupted,
    wrong_flag,
)
from batchfit._cli.output import check_writable, stdout_for_results
from batchfit._cli.programs.sweep import asked_of_command
from batchfit._cli.progress import own_warnings_as_notes, progress_here, speaks
from batchfit._cli.signals import SIGNALS
from batchfit._cli.sweep.sweep_file import SweepFile
from batchfit._cli.sweep.sweep_flags import SweepFlags
from batchfit._cli.sweep.sweep_table import screen_here
from batchfit._engine.workload import user_errors as failure
from batchfit._engine.workload.target import home_of, parse_target
from batchfit._sweep.pure.grid import Entry

if TYPE_CHECKING:
    from batchfit._sweep.job import Engine
    from batchfit._sweep.request import Asked
    from batchfit._sweep.sweep import SweepRecords
    from batchfit.results import SweepResult


def sweep_file(path: Path, flags: SweepFlags) -> Code:
    """Read the file, run what waits, and show the result."""
    if flags.dry_run and flags.csv is not None:
        raise CommandFailed(Code.USAGE, "csv must be left out with --dry-run, which measures nothing")
    named = ("devices", "engine", "ray_address")
    given = {name: value for name in named if (value := getattr(flags, name)) is not None}
    file = SweepFile.read(path, flags.sets or (), given)
    entries = file.entries()
    output = file.output if flags.output is None else flags.output
    for name, one in (("output", output), ("csv", flags.csv)):
        if one is not None and not flags.dry_run:
            check_writable(one, name=name)
    with stdout_for_results(alone=flags.as_json) as stdout, contextlib.ExitStack() as stack:
        with progress_here() as progress:
            progress.doing("loading torch")
            load_torch()
            asked, alone = _asked(file, flags)
        if flags.dry_run:
            if speaks():
                _show_plan(asked, _keeper(asked, output, flags, stack), stdout, as_json=flags.as_json)
            return Code.FOUND
        keeper, engine = _together(asked, alone, output, flags, stack)
        count = sum(not entry.why_not for entry in entries)
        heading = f"{path}: {count} configurations, results go to {output}"
        code, why = _run(asked, keeper, engine, heading)
        with uninterrupted():
            result = keeper.result()
            if speaks():
                _deliver(result, flags, stdout, output=None if keeper.stale else output)
    return _ended(result, code, why, _command(path, flags, stale=keeper.stale))


def _asked(file: SweepFile, flags: SweepFlags) -> tuple[Asked, Engine]:
    from batchfit._sweep.engines import engine_of
    from batchfit._sweep.pure.options import SweepOptions
    from batchfit._sweep.request import Asked

    if file.is_command:
        return asked_of_command(file)
    given: dict[str, Any] = file.options
    named = {key: str(file.data[key]) for key in ("factory", "measure") if file.data.get(key) is not None}
    if isinstance(given.get("estimate"), str) and given["estimate"] != "predict":
        named["estimate"] = given["estimate"]
        given["estimate"] = file.target("estimate")
    if given.get("measure") is not None:
        given["measure"] = file.target("measure")
    factory = file.target("factory")
    try:
        _check_named(file)
        options = SweepOptions(**given)
        asked = Asked.of(factory, file.data["knobs"], options, named=named)
        return asked, engine_of(options)
    except (errors.TargetError, SyntaxError) as error:
        raise file.wrong(str(error), ("factory",)) from None
    except ImportError as error:
        if not str(error).startswith("pip install"):
            raise _raised(error, factory, full=flags.full_traceback) from None
        raise file.wrong(str(error), ("engine",)) from None
    except (ValueError, TypeError) as error:
        if not _is_refusal(error):
            raise _raised(error, factory, full=flags.full_traceback) from None
        raise file.failure_of(error) from None
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's module may raise anything
        raise _raised(error, factory, full=flags.full_traceback) from None


def _check_named(file: SweepFile) -> None:
    """The functions besides the factory are there: each is named by its own key where it is not."""
    from batchfit._engine.workload.target import load_function

    for key in ("measure", "estimate"):
        text = file.data.get(key)
        if not isinstance(text, str) or (key == "estimate" and text == "predict"):
            continue
        try:
            load_function(parse_target(file.target(key)))
        except errors.TargetError as error:
            raise file.wrong(str(error), (key,)) from None


def _is_refusal(error: Exception) -> bool:
    """An argument was refused by us: the user's own frames are not in it."""
    return " must " in str(error) and failure.last_users_line(error) is None


def _raised(error: BaseException, factory: str, *, full: bool) -> CommandFailed:
    if isinstance(error, CommandFailed):
        return error
    home = home_of(parse_target(factory))
    text = failure.headline(error, what=factory, home=home)
    return CommandFailed(Code.RAISED, text, details=failure.details(error, home=home, full=full))


def _together(
    asked: Asked, alone: Engine, output: Path, flags: SweepFlags, stack: contextlib.ExitStack
) -> tuple[SweepRecords, Engine]:
    """The file and the engine; under torchrun rank 0 has the file, and all ranks what is in it."""
    from batchfit._engine.distributed.ranks import telling_others
    from batchfit._sweep.engines import all_ranks, over_ranks
    from batchfit._sweep.sweep import SweepRecords

    ranks = stack.enter_context(all_ranks())
    stack.enter_context(telling_others(ranks))
    keeper = _keeper(asked, output, flags, stack) if ranks.is_main else SweepRecords(asked, None)
    try:
        keeper.share(ranks)
    except errors.BatchfitError as error:
        raise CommandFailed(Code.RAISED, str(error)) from None
    return keeper, over_ranks(ranks, alone)


def _keeper(asked: Asked, output: Path, flags: SweepFlags, stack: contextlib.ExitStack) -> SweepRecords:
    from batchfit._sweep.sweep import SweepRecords

    if flags.dry_run and not (flags.resume and output.exists()):
        return SweepRecords(asked, None)
    try:
        return SweepRecords.of(
            asked,
            output,
            resume=flags.resume,
            retry_failed=flags.retry_failed,
            overwrite=flags.overwrite,
            stack=stack,
        )
    except errors.BatchfitError as error:
        text = str(error)
        if "is there already" in text:
            text = text.replace("(resume)", "(--resume)").replace("(overwrite)", "(--overwrite)")
            text = text.replace("name another file", "name another file (--output)")
        raise CommandFailed(Code.USAGE, text) from None
    except ValueError as error:
        raise wrong_flag(error, "sweep") from None


def _run(asked: Asked, keeper: SweepRecords, engine: Engine, heading: str) -> tuple[Code, str]:
    """Run what waits; how it ended, and why where it ended early."""
    from batchfit._sweep.sweep import run_sweep

    screen = screen_here(asked.wanted, keeper.records, at_once=lambda: getattr(engine, "at_once", 1))
    if speaks():
        screen.note(heading)
    if keeper.resumed:
        screen.note(f"going on with {keeper.path}: {keeper.resumed} configurations are in it")
    try:
        with SIGNALS.opened(), screen, own_warnings_as_notes(screen):
            run_sweep(asked, keeper, engine=engine, on_event=screen.on_event)
    except KeyboardInterrupt as stop:
        SIGNALS.came_out(stop)
        return interrupt_code(stop), "interrupted"
    except errors.BatchfitError as error:
        return Code.RAISED, str(error)
    except (TypeError, ValueError) as error:  # what only an engine finds out, such as a cluster without GPUs
        if not _is_refusal(error):
            raise
        raise CommandFailed(Code.USAGE, str(error)) from None
    return Code.FOUND, ""


def _deliver(result: SweepResult, flags: SweepFlags, stdout: TextIO, *, output: Path | None) -> None:
    """Save, then show; where the table cannot be saved the result is shown all the same."""
    lost: OSError | None = None
    if flags.csv is not None:
        try:
            result.to_csv(flags.csv)
        except OSError as error:
            lost = error
    if flags.as_json:
        stdout.write(result.to_json() + "\n")
    shown = sys.stderr if flags.as_json else stdout
    files = (output, None if lost else flags.csv)
    saved = ", ".join(str(one) for one in files if one is not None and one.exists())
    if result.records:
        shown.write(f"{result}\n")
    shown.write(f"saved: {saved}\n" if saved else "")
    shown.flush()
    stdout.flush()
    if lost:
        raise CommandFailed(
            Code.BROKEN, f"the result could not be saved to {flags.csv}: {lost.strerror or lost}"
        )


def _command(path: Path, flags: SweepFlags, *, stale: bool) -> str:
    """The command that goes on with the same sweep; `stale`: the file is still as it was before."""
    words = ["batchfit", "sweep", str(path)]
    for one in flags.sets or ():
        words += ["--set", one]
    for name in ("devices", "engine", "ray_address", "output"):
        value = getattr(flags, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    if stale and flags.overwrite:
        return shlex.join([*words, "--overwrite"])
    return shlex.join([*words, "--resume", *(["--retry-failed"] if stale else [])])


def _ended(result: SweepResult, code: Code, why: str, command: str) -> Code:
    failed, done = len(result.failed), len(result.records)
    if why:
        left = result.planned - done
        again = f"{left} of {result.planned} configurations are left: {command}"
        raise CommandFailed(code, f"{why}; {again}")
    if not failed:
        return code
    if failed < done:
        return Code.SOME_FAILED
    first = result.failed[0]
    at = f" at {first.error_at}" if first.error_at else ""
    nothing_fits = all((one.error or "").startswith("NothingFitsError") for one in result.failed)
    kind = Code.NOTHING_FITS if nothing_fits else Code.RAISED
    raise CommandFailed(
        kind, f"every configuration failed; {first.label} in {first.failed_in}{at}: {first.error}"
    )


def _begins_with(asked: Asked, entry: Entry) -> int | str | None:
    """The first size of a configuration; None where the search chooses it, words where its estimate fails."""
    settings = asked.job.settings
    if entry.why_not:
        return None
    if not settings.auto:
        return settings.batch_size
    if settings.estimate is None or settings.batch_size is None:
        return None
    try:
        return settings.estimate(dict(entry.configuration), settings.batch_size)
    except Exception as error:  # noqa: BLE001  a function of the user's may raise anything
        return f"{type(error).__name__}: {error}"


def _show_plan(asked: Asked, keeper: SweepRecords, stdout: TextIO, *, as_json: bool) -> None:
    """The configurations, what would be run, and where each search would begin."""
    from batchfit.results import text_table

    entries = keeper.entries()
    settings = asked.job.settings
    begins = [_begins_with(asked, entry) for entry in entries]
    if as_json:
        plan = [
            {"knobs": dict(entry.configuration), "begins_with": size, "skipped": entry.why_not or None}
            for entry, size in zip(entries, begins, strict=True)
        ]
        planned = {"kind": "sweep_plan", "schema_version": 1, "configurations": plan}
        stdout.write(json.dumps(planned, indent=2, default=str) + "\n")
        stdout.flush()
        return
    rows = [
        (
            *(str(value) for value in entry.configuration.values()),
            "-" if size is None else str(size),
            f"skipped: {entry.why_not}" if entry.why_not else "run",
        )
        for entry, size in zip(entries, begins, strict=True)
    ]
    columns = (*entries[0].configuration, "begins with", "what")
    waiting = sum(not entry.why_not for entry in entries)
    most = "as many as fit" if settings.batch_size is None else f"at most {settings.batch_size}"
    how = f"strategy {settings.strategy}, {most}" if settings.auto else f"fixed at {settings.batch_size}"
    stdout.write(f"{text_table(columns, rows)}\n")
    stdout.write(f"{waiting} of {len(entries)} configurations would be run ({how})\n")
    stdout.flush()
