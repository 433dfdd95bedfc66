"""`batchfit find`: from a target and flags to an answer.

Rules: what is wrong with the flags is said before the target is loaded, and what is wrong with the
target before a device is touched; every way a search can end has its exit code; an interrupted search
leaves what it found. An error is the user's if a step of theirs raised it, and batchfit's otherwise:
then it comes out with its whole traceback.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypedDict, cast

from batchfit import errors
from batchfit._cli.commands.find_answer import count_of, memory_label, show_answer
from batchfit._cli.exits import Code, CommandFailed, Terminated, load_torch, sigterm_interrupts, uninterrupted
from batchfit._cli.output import check_writable, stdout_for_results, write_atomically
from batchfit._cli.progress import (
    ProgressDisplay,
    is_terminal,
    own_warnings_as_notes,
    pass_on,
    progress_here,
    speaks,
)
from batchfit._cli.search_watch import SearchWatch
from batchfit._cli.target import Given
from batchfit._engine.workload import user_errors as failure
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._find.pure.search import Search
    from batchfit.results import FitResult
    from batchfit.workload import Workload


class FindSettings(TypedDict):
    """The keywords of `find_batch_size` that are flags."""

    budget: str | None
    max_size: int | None
    min_size: int
    strategy: str
    multiple_of: int
    power_of_two: bool
    tolerance: float
    start: int | None
    attempts: int
    steps: int
    soak_steps: int | None
    max_trials: int | None
    time_limit_s: float | None
    predict: bool
    device: str | None
    isolate: bool
    timeout_s: float | None
    resume: str | None
    store: bool
    fresh: bool
    key: str | None


def default_settings() -> FindSettings:
    """What `find_batch_size` does when it is told nothing."""
    from batchfit._find.find import find_batch_size

    parameters = inspect.signature(find_batch_size).parameters
    return cast(FindSettings, {name: parameters[name].default for name in FindSettings.__annotations__})


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """A search to run: how its workload is made, and what to call it.

    `explain` turns an error of a step into what to say about it. `store_asked`: the store is not only on by
    default, it was asked for. `arguments` are those of the target's script.
    """

    what: str
    make: Callable[[], Workload]
    explain: Callable[[BaseException], CommandFailed]
    settings: FindSettings
    intro: str = ""
    next_command: str = ""
    store_asked: bool = False
    arguments: tuple[str, ...] = ()


def find_target(
    text: str,
    settings: FindSettings,
    *,
    as_json: bool,
    output: Path | None,
    full_traceback: bool,
    store_asked: bool = False,
    arguments: Sequence[str] = (),
) -> Code:
    """Load a target and find its largest batch."""
    checked_flags(settings)
    if output is not None:
        check_writable(output)
    if settings["resume"] is not None:
        check_writable(Path(settings["resume"]), name="resume")
    given = Given.parse(text, arguments, full_traceback=full_traceback)
    job = SearchJob(
        what=text,
        make=given.load,
        explain=given.raised,
        settings=settings,
        store_asked=store_asked,
        arguments=tuple(arguments),
    )
    return run_job(job, as_json=as_json, output=output)


def checked_flags(settings: FindSettings) -> Search:
    """The search that the flags ask for. Wrong ones are refused without torch, the target or a device."""
    from batchfit._find.pure.search import Search

    try:
        budget = settings["budget"]
        return Search(
            strategy=settings["strategy"],
            budget_bytes=None if budget is None else parse_bytes(budget),
            min_size=settings["min_size"],
            max_size=settings["max_size"],
            multiple_of=settings["multiple_of"],
            power_of_two=settings["power_of_two"],
            tolerance=settings["tolerance"],
            start=settings["start"],
            attempts=settings["attempts"],
            max_trials=settings["max_trials"],
            soak=settings["soak_steps"] != 0,
        )
    except (ValueError, TypeError) as error:
        raise _wrong_flag(error) from None


def run_job(job: SearchJob, *, as_json: bool, output: Path | None) -> Code:
    """Make the workload, search, show and save the answer; how it ended."""
    search = checked_flags(job.settings)
    code = Code.FOUND
    fit: FitResult | None
    with stdout_for_results(alone=as_json) as stdout:
        progress = progress_here(steps=job.settings["steps"], soak_steps=job.settings["soak_steps"])
        watch = SearchWatch(progress)
        try:
            with sigterm_interrupts(), progress, own_warnings_as_notes(progress):
                fit = _search(job, watch, progress)
        except KeyboardInterrupt as stop:
            code = Code.TERMINATED if isinstance(stop, Terminated) else Code.INTERRUPTED
            fit = watch.partial(search)
        if fit is None:
            kept = job.settings["resume"]
            if watch.trials and not watch.device:
                raise CommandFailed(code, f"interrupted before a trial; the search so far is in {kept}")
            raise CommandFailed(code, f"interrupted after {len(watch.trials)} trials, before any size ran")
        if speaks():
            with uninterrupted():
                _deliver(job, fit, stdout, as_json=as_json, output=output, rows_stand=progress.draws_rows)
    return code


def _search(job: SearchJob, watch: SearchWatch, progress: ProgressDisplay) -> FitResult:
    settings = job.settings
    if job.intro:
        progress.note(job.intro)
    progress.doing("loading torch")
    load_torch()
    from batchfit._engine.device.budget import without_budget
    from batchfit._engine.device.resolve import resolve_device
    from batchfit._engine.trial.factory import Factory
    from batchfit._engine.workload.placement import device_to_run, ram_held_bytes
    from batchfit._engine.workload.target import parse_target
    from batchfit._find import find
    from batchfit._find.recall import check_store

    def loaded(device: str, available_bytes: int, *, held_bytes: int = 0) -> None:
        watch.device = device
        if settings["budget"] is None:
            watch.budget_bytes = without_budget(device, available_bytes, held_bytes=held_bytes)
        else:
            watch.budget_bytes = min(available_bytes, parse_bytes(settings["budget"]))
        memory = memory_label(watch.device, watch.budget_bytes)
        progress.note(f"{job.what} on {memory}, strategy {settings['strategy']}")
        progress.doing("choosing the first size")

    watched: Any
    from batchfit._engine.distributed.ranks import join_launched

    try:
        find.check_steps(settings["steps"], settings["soak_steps"], settings["time_limit_s"])
        find.check_isolation(settings["isolate"], settings["timeout_s"])
        settings = stored_where_possible(settings, asked=job.store_asked)
        check_store(settings["store"], settings["fresh"], settings["key"], isolate=settings["isolate"])
        _take_up(settings["resume"], watch, progress)
        if settings["isolate"]:  # a child makes the workload, and finds out what is wrong with the device
            join_launched()  # this process loads nothing of the target that could make a group
            passed_on = pass_on if progress.draws_rows else None  # or it would write over the picture
            watched = Factory(
                parse_target(job.what, job.arguments),
                on_loaded=loaded,
                on_step=watch.step,
                on_output=passed_on,
            )
        else:
            if settings["device"] is not None:
                resolve_device(settings["device"])
            progress.doing(f"loading {job.what}")
            workload = job.make()
            join_launched()
            settings = stored_where_possible(settings, workload, asked=job.store_asked)
            device = device_to_run(workload, settings["device"])
            loaded(device.name, device.budget_bytes(), held_bytes=ram_held_bytes(workload))
            watched = watch.over(workload)
    except (ValueError, TypeError) as error:
        raise _wrong_flag(error) from None
    progress.doing("choosing the first size" if watch.device else f"loading {job.what} in a child process")
    try:
        fit = find.find_batch_size(watched, on_trial=watch.on_trial, **settings)
    except (errors.TargetError, errors.SettingsDifferError, errors.ResultFileError) as error:
        raise CommandFailed(Code.USAGE, str(error)) from None
    except errors.ChildRaisedError as error:
        raise job.explain(error) from None
    except errors.NothingFitsError as error:
        raise CommandFailed(Code.NOTHING_FITS, str(error)) from None
    except errors.SearchStoppedError as error:
        raise CommandFailed(Code.STOPPED, str(error)) from None
    except errors.BatchfitError as error:
        raise CommandFailed(Code.RAISED, str(error), every_rank=True) from None
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) or failure.raised_by_step(error):
            raise job.explain(error) from None
        if isinstance(error, OSError) and settings["resume"] is not None and not watch.started:
            text = f"the search cannot be kept in {settings['resume']}: {error.strerror or error}"
            raise CommandFailed(Code.BROKEN, text) from None
        if isinstance(error, ValueError | TypeError) and not watch.started:
            raise _wrong_flag(error) from None
        raise
    if fit.trials_resumed == len(fit.trials):
        progress.note(f"the search in {settings['resume']} had ended before: nothing was run")
    return fit


def _take_up(resume: str | None, watch: SearchWatch, progress: ProgressDisplay) -> None:
    """Say what the file of an earlier run holds; an interrupt from now on loses none of it."""
    if resume is None:
        return
    from batchfit._find.resume import ResumeFile

    try:
        kept = ResumeFile(resume).kept()
    except errors.ResultFileError as error:
        raise CommandFailed(Code.USAGE, str(error)) from None
    if kept is not None and kept.trials:
        watch.trials.extend(kept.trials)
        progress.note(f"going on with the search in {resume}: {count_of(len(kept.trials), 'trial')} in it")


def stored_where_possible(
    settings: FindSettings, workload: Workload | None = None, *, asked: bool = False
) -> FindSettings:
    """The settings for this workload: the command's default must not refuse what has no key.

    That is a step without a model, and what a child makes; a flag that asks for the store is refused later.
    """
    if not settings["store"] and settings["key"] is not None:
        raise ValueError(f"key must be left out with --no-store, not {settings['key']!r}")
    if asked or not settings["store"]:
        return settings
    if settings["isolate"] and settings["key"] is None and not settings["fresh"]:
        return {**settings, "store": False}
    if workload is not None and workload.model is None and settings["key"] is None:
        return {**settings, "store": False, "fresh": False}
    return settings


def _deliver(
    job: SearchJob, fit: FitResult, stdout: TextIO, *, as_json: bool, output: Path | None, rows_stand: bool
) -> None:
    """Save, then show; where saving fails the result is shown all the same, and then the failure."""
    text = fit.to_json() + "\n"
    lost: OSError | None = None
    if output is not None:
        try:
            write_atomically(output, text)
        except OSError as error:
            lost = error
    saved, kept = None if lost else output, job.settings["resume"]
    from torch import distributed

    launched = distributed.is_available() and distributed.is_initialized()
    ranks = distributed.get_world_size() if launched else 1
    if as_json:
        stdout.write(text)
        stdout.flush()
        show_answer(fit, sys.stderr, with_table=False, saved=saved, ranks=ranks, kept=kept)
    else:
        with_table = not (rows_stand and is_terminal(stdout))
        show_answer(
            fit,
            stdout,
            with_table=with_table,
            saved=saved,
            next_command=job.next_command,
            ranks=ranks,
            kept=kept,
        )
    if lost:
        raise CommandFailed(
            Code.BROKEN, f"the result could not be saved to {output}: {lost.strerror or lost}"
        )


def _wrong_flag(error: Exception) -> CommandFailed:
    return CommandFailed(Code.USAGE, f"{error} (batchfit find --help lists the flags)")
