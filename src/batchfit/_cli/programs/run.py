"""`batchfit run -- python train.py --batch-size {}`: the size found or remembered, then the program itself.

Rules: stdout is the program's; all that is said here goes to stderr. What is wrong with the flags is said
before anything is started. An interrupt during the search ends the command, and during the run it is the
program's. Once the program has run, its exit code is the command's.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING

from batchfit._cli.commands.find import search_job
from batchfit._cli.commands.find_answer import count_of, headline
from batchfit._cli.exits import Code, CommandFailed, wrong_flag
from batchfit._cli.output import check_writable, stdout_for_results
from batchfit._cli.programs.find import ProgramCall, program_job, program_options
from batchfit._files import write_atomically
from batchfit._find.pure.options import FindOptions
from batchfit._options import flags_in
from batchfit._program.pure.run_options import RunOptions
from batchfit._program.pure.template import NO_PLACE, OUT, isolating_flag
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit._program.pure.template import CommandTemplate
    from batchfit._program.running.real_run import Started
    from batchfit.results import FitResult


# Flags of a command without a place for the size; nothing is searched, so that nothing is stored.
_WITHIN = ("budget", "out", "store")


def run_for_real(call: ProgramCall) -> int:
    """Find a size, or take the one that is known, and run the program with it; the exit code of both."""
    own = {name for name, _, _ in flags_in(RunOptions)}
    template = call.template("run", may_be_fixed=True)
    if template.is_fixed:
        return _run_within(call, template)
    try:
        options = RunOptions(**{name: value for name, value in call.flags.items() if name in own})
        if template.has_out and options.out is None and not options.dry_run:
            raise ValueError("out must be given where the command has {out}: --out runs/1 names the folder")
        if call.delivery.as_json and not options.dry_run:
            raise ValueError(
                "json must be left out without --dry-run, as stdout is the program's: --output FILE"
            )
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "run") from None
    flags = {name: value for name, value in call.flags.items() if name not in own}
    finding, stored = program_options(flags, "run")
    if flags.get("resume") is not None:
        check_writable(flags["resume"], name="resume")
    call.delivery.check()
    fit: FitResult | None = None
    size = options.size
    if size is None:
        job = program_job(template, finding, stored)
        with stdout_for_results(alone=True):
            ended = search_job(job)
        fit, size = ended.fit, options.size_of(ended.fit.batch_size, finding.search().sizes)
        if ended.code is not Code.FOUND:
            again = f"batchfit run --size {fit.batch_size} -- {template.shown_template()}"
            raise CommandFailed(
                ended.code, f"{headline(fit)}; the program was not started. Run it with: {again}"
            )
        _say(_found(fit, size))
    elif finding.search().sizes.index(size) < 0:
        raise wrong_flag(
            ValueError(f"size must be at least min_size ({finding.min_size}), not {size!r}"), "run"
        )
    if options.dry_run:
        return _show(call, template, size, options)
    return _run(call, template, size, options, finding, fit)


def _run_within(call: ProgramCall, template: CommandTemplate) -> int:
    """Run a command without a place for a size as it is, within the budget."""
    try:
        if call.flags.get("budget") is None:
            raise ValueError(
                f"{NO_PLACE}. With --budget 2GiB it is run as it is, and may use so much memory: on a CPU, "
                "virtual memory"
            )
        limit_bytes = FindOptions(budget=call.flags["budget"]).budget_bytes
        for name, usual, _ in (*flags_in(RunOptions), *flags_in(FindOptions)):
            if name not in _WITHIN and call.flags.get(name, usual) != usual:
                raise ValueError(f"{name} must be left out where the command has no place for the batch size")
        for name, given in (("output", call.delivery.output), ("json", call.delivery.as_json)):
            if given:
                raise ValueError(f"{name} must be left out where the command has no place for the batch size")
        if template.has_out and call.flags.get("out") is None:
            raise ValueError("out must be given where the command has {out}: --out runs/1 names the folder")
        flag = isolating_flag(template.words)
        if flag:
            raise ValueError(f"the command must start Python without {flag}, with which it ignores a budget")
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "run") from None
    options = RunOptions(out=call.flags.get("out"))
    assert limit_bytes is not None
    _say(f"each process may use {format_bytes(limit_bytes)}, on a CPU as virtual memory")
    return _run(call, template, 1, options, FindOptions(), None, limit_bytes=limit_bytes)


def _run(
    call: ProgramCall,
    template: CommandTemplate,
    size: int,
    options: RunOptions,
    finding: FindOptions,
    fit: FitResult | None,
    *,
    limit_bytes: int | None = None,
) -> int:
    from batchfit import errors
    from batchfit._program.running.foreground import flush_own_streams
    from batchfit._program.running.real_run import RealRun

    run = RealRun(
        template=template,
        sizes=finding.search().sizes,
        ran=() if fit is None else tuple(trial.size for trial in fit.trials if trial.fits),
        restarts=options.restarts,
        limit_bytes=limit_bytes,
        out="" if options.out is None else str(options.out),
        say=_say,
    )
    _say(f"running {template.shown(size, out=run.out or OUT)}")
    flush_own_streams()
    try:
        starts = run.to_the_end(size)
    except errors.ProgramError as error:
        raise CommandFailed(Code.RAISED, str(error)) from None
    code = starts[-1][1].exit_code
    if call.delivery.output is not None:
        try:
            write_atomically(call.delivery.output, _result(template, starts, fit))
        except OSError as error:
            _say(f"the result could not be saved to {call.delivery.output}: {error.strerror or error}")
    return code


def _result(template: CommandTemplate, starts: list[Started], fit: FitResult | None) -> str:
    import batchfit
    from batchfit.results import ProgramRun, ProgramStart

    run = ProgramRun(
        command=template.words,
        batch_size=starts[-1][0],
        exit_code=starts[-1][1].exit_code,
        starts=tuple(
            ProgramStart(batch_size=size, exit_code=one.exit_code, oom=one.too_large, elapsed_s=one.elapsed_s)
            for size, one in starts
        ),
        fit=fit,
        batchfit_version=batchfit.__version__,
    )
    return run.to_json() + "\n"


def _show(call: ProgramCall, template: CommandTemplate, size: int, options: RunOptions) -> Code:
    """The command, and nothing else, on stdout."""
    out = "{out}" if options.out is None else str(options.out)
    if call.delivery.as_json:
        sets = {one.text: size for one in template.sets}
        shown = {
            "kind": "run_plan",
            "schema_version": 1,
            "command": template.command(size, out=out),
            "environment": template.variables(size),
            "files": sets,
            "batch_size": size,
        }
        text = json.dumps(shown, indent=2)
    else:
        words = [f"{name}={value}" for name, value in template.variables(size).items()]
        text = " ".join([*words, shlex.join(template.command(size, out=out))])
        text += "".join(f"  # {one.key}: {size} in {one.file}" for one in template.sets)
    sys.stdout.write(f"{text}\n")
    return Code.FOUND


def _found(fit: FitResult, size: int) -> str:
    how = f"{headline(fit)}: {count_of(len(fit.trials), 'trial')} in {fit.elapsed_s:.1f} s"
    if fit.from_store:
        how = f"{headline(fit)}: remembered, and confirmed now (--fresh searches again)"
    return how if size == fit.batch_size else f"{how}; with the margin {size}"


def _say(text: str) -> None:
    sys.stderr.write(f"batchfit: {text}\n")
    sys.stderr.flush()
