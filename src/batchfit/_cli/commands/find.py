"""`batchfit find`: from a target and flags to an answer.

Rules: what is wrong with the flags is said before the target is loaded, and what is wrong with the
target before a device is touched; every way a search can end has its exit code; an interrupted search
leaves what it found. An error is the user's if a step of theirs raised it, and batchfit's otherwise:
then it comes out with its whole traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from batchfit import errors
from batchfit._cli.commands.find_answer import count_of, memory_label, show_answer
from batchfit._cli.exits import (
    Code,
    CommandFailed,
    failure_of,
    interrupt_code,
    load_torch,
    uninterrupted,
    wrong_flag,
)
from batchfit._cli.output import check_writable, stdout_for_results
from batchfit._cli.progress import (
    ProgressDisplay,
    is_terminal,
    own_warnings_as_notes,
    pass_on,
    progress_here,
    speaks,
)
from batchfit._cli.search_watch import SearchWatch
from batchfit._cli.signals import SIGNALS
from batchfit._cli.target import TargetCall
from batchfit._engine.workload import user_errors as failure
from batchfit._files import write_atomically
from batchfit._find.pure.options import FindOptions

if TYPE_CHECKING:
    from batchfit.results import FitResult
    from batchfit.workload import Workload


@dataclass(frozen=True, kw_only=True)
class SearchJob:
    """A search to run: how its workload is made, and what to call it.

    `explain` turns an error of a step into what to say about it. `store_asked`: the store is not only on by
    default, it was asked for. `arguments` are those of the target's script. `trials` makes what runs the
    trials in place of a workload, and `modules` are loaded for it. `use` shows how the size that was found is
    used, and `next_command` is what to ask next.
    """

    what: str
    make: Callable[[], Workload]
    explain: Callable[[BaseException], CommandFailed]
    options: FindOptions
    intro: str = ""
    store_asked: bool = False
    arguments: tuple[str, ...] = ()
    trials: Callable[[SearchWatch, ProgressDisplay], Any] | None = None
    modules: tuple[str, ...] = ()
    use: Callable[[int], str] | None = None
    next_command: str = ""


def find_target(call: TargetCall, *, store_asked: bool = False) -> Code:
    """Load a target and find its largest batch; the flags are options of `find_batch_size`."""
    if call.flags.get("resume") is not None:
        check_writable(Path(call.flags["resume"]), name="resume")
    options = options_of(call.flags, store_asked=store_asked)
    call.delivery.check()
    given = call.given()
    job = SearchJob(
        what=call.target,
        make=given.load,
        explain=given.raised,
        options=options,
        store_asked=store_asked,
        arguments=call.arguments,
        next_command=f"batchfit profile {call.target}",
    )
    return run_job(job, as_json=call.delivery.as_json, output=call.delivery.output)


def options_of(flags: Mapping[str, Any], *, store_asked: bool = False) -> FindOptions:
    """The options that the flags say; wrong ones are refused without torch, the target or a device.

    The command's default, a store, does not refuse `--isolate`, which has none; a store that is asked for
    does.
    """
    values = {"store": False, "key": None, "fresh": False, "isolate": False, **flags}
    try:
        if not values["store"] and values["key"] is not None:
            raise ValueError(f"key must be left out with --no-store, not {values['key']!r}")
        if values["isolate"] and values["key"] is None and not values["fresh"] and not store_asked:
            values["store"] = False
        return FindOptions(**values)
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "find") from None


@dataclass(frozen=True, kw_only=True)
class EndedSearch:
    """A search that has ended: its answer, the exit code, whether its rows stand on the terminal."""

    fit: FitResult
    code: Code
    rows_stand: bool


def run_job(job: SearchJob, *, as_json: bool, output: Path | None) -> Code:
    """Make the workload, search, show and save the answer; how it ended."""
    with stdout_for_results(alone=as_json) as stdout, SIGNALS.closed():
        ended = search_job(job)
        if speaks():
            with uninterrupted():
                rows = ended.rows_stand
                _deliver(job, ended.fit, stdout, as_json=as_json, output=output, rows_stand=rows)
    return ended.code


def search_job(job: SearchJob) -> EndedSearch:
    """Make the workload and search; an interrupt leaves what was found, if anything was."""
    options, code = job.options, Code.FOUND
    fit: FitResult | None
    progress = progress_here(steps=options.steps, soak_steps=options.soak_steps)
    watch = SearchWatch(progress)
    with SIGNALS.closed():
        try:
            with SIGNALS.opened(), progress, own_warnings_as_notes(progress):
                fit = _search(job, watch, progress)
        except (Exception, KeyboardInterrupt) as error:
            stop = SIGNALS.came_out(error)
            if stop is None:
                raise
            code = interrupt_code(stop)
            fit = watch.partial(options.search())
    if fit is None:
        if watch.trials and not watch.device:
            kept = options.resume
            raise CommandFailed(code, f"interrupted before a trial; the search so far is in {kept}")
        raise CommandFailed(code, f"interrupted after {len(watch.trials)} trials, before any size ran")
    return EndedSearch(fit=fit, code=code, rows_stand=progress.draws_rows)


def _search(job: SearchJob, watch: SearchWatch, progress: ProgressDisplay) -> FitResult:
    if job.intro:
        progress.note(job.intro)
    progress.doing("loading torch")
    load_torch("batchfit._find.find", *job.modules)
    from batchfit._find.find import find_with

    try:
        _take_up(job.options.resume, watch, progress)
        if job.trials is not None:
            watched, options = job.trials(watch, progress), job.options
        elif job.options.isolate:
            watched, options = _in_children(job, watch, progress), job.options
        else:
            watched, options = _loaded_here(job, watch, progress)
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "find") from None
    if job.trials is not None:
        progress.doing(f"starting {job.what}")
    else:
        progress.doing(
            "choosing the first size" if watch.device else f"loading {job.what} in a child process"
        )
    try:
        fit = find_with(watched, lambda: replace(options, on_trial=watch.on_trial))
    except (Exception, SystemExit) as error:
        failed = _failed(error, job, watch)
        if failed is None:
            raise
        raise failed from None
    if fit.trials_resumed == len(fit.trials):
        progress.note(f"the search in {options.resume} had ended before: nothing was run")
    return fit


def _in_children(job: SearchJob, watch: SearchWatch, progress: ProgressDisplay) -> Any:
    """What children are to load; a child finds out what is wrong with the device."""
    from batchfit._engine.distributed.ranks import join_launched
    from batchfit._engine.trial.factory import Factory
    from batchfit._engine.workload.target import parse_target

    join_launched()  # this process loads nothing of the target that could make a group
    return Factory(
        parse_target(job.what, job.arguments),
        on_loaded=partial(show_device, job, watch, progress),
        on_step=watch.step,
        on_output=pass_on if progress.draws_rows else None,  # or it would write over the picture
    )


def _loaded_here(
    job: SearchJob, watch: SearchWatch, progress: ProgressDisplay
) -> tuple[Workload, FindOptions]:
    """The workload, watched, and the options for it: without a store where it has no key."""
    from batchfit._engine.device.resolve import device_to_run, resolve_device
    from batchfit._engine.device.tensors import ram_bytes
    from batchfit._engine.distributed.ranks import join_launched

    options = job.options
    if options.device is not None:
        resolve_device(options.device)
    progress.doing(f"loading {job.what}")
    workload = job.make()
    join_launched()
    if options.store and not job.store_asked and workload.model is None and options.key is None:
        options = replace(options, store=False, fresh=False)
    device = device_to_run(workload._held, options.device)
    show_device(
        job, watch, progress, device.name, device.budget_bytes(), held_bytes=ram_bytes(workload._held)
    )
    return watch.over(workload), options


def show_device(
    job: SearchJob,
    watch: SearchWatch,
    progress: ProgressDisplay,
    device: str,
    available_bytes: int,
    *,
    held_bytes: int = 0,
) -> None:
    """Say where the search runs and within which budget, once both are known."""
    from batchfit._engine.device.device import without_budget

    asked_bytes = job.options.budget_bytes
    watch.device = device
    if asked_bytes is None:
        watch.budget_bytes = without_budget(device, available_bytes, held_bytes=held_bytes)
    else:
        watch.budget_bytes = min(available_bytes, asked_bytes)
    memory = memory_label(watch.device, watch.budget_bytes)
    progress.note(f"{job.what} on {memory}, strategy {job.options.strategy}")
    progress.doing("choosing the first size")


def _failed(error: BaseException, job: SearchJob, watch: SearchWatch) -> CommandFailed | None:
    """How a search that raised ends; None for an error of batchfit's own."""
    if isinstance(error, errors.ChildRaisedError):
        return job.explain(error)
    known = failure_of(error)
    if known is not None:
        return known
    if isinstance(error, SystemExit) or failure.raised_by_step(error):
        return job.explain(error)
    resume = job.options.resume
    if isinstance(error, OSError) and resume is not None and not watch.started:
        return CommandFailed(Code.BROKEN, f"the search cannot be kept in {resume}: {error.strerror or error}")
    if isinstance(error, ValueError | TypeError) and not watch.started:
        return wrong_flag(error, "find")
    return None


def _take_up(resume: str | os.PathLike[str] | None, watch: SearchWatch, progress: ProgressDisplay) -> None:
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
    saved = None if lost else output
    kept = None if job.options.resume is None else str(job.options.resume)
    from torch import distributed

    launched = distributed.is_available() and distributed.is_initialized()
    ranks = distributed.get_world_size() if launched else 1
    show = partial(
        show_answer, saved=saved, ranks=ranks, kept=kept, use=job.use, next_command=job.next_command
    )
    if as_json:
        stdout.write(text)
        stdout.flush()
        show(fit, sys.stderr, with_table=False)
    else:
        with_table = not (rows_stand and is_terminal(stdout))
        show(fit, stdout, with_table=with_table)
    if lost:
        raise CommandFailed(
            Code.BROKEN, f"the result could not be saved to {output}: {lost.strerror or lost}"
        )
