"""`batchfit profile -- python train.py --batch-size {}`: throughput by batch size, from runs of the program.

Rules: as in `profile`, with the same answer. Each timing is a run of the command; what needs the step in this
process (FLOPs, the data loader alone, an idle GPU) is not looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchfit import errors
from batchfit._cli.commands.profile import rendered, shown_points
from batchfit._cli.exits import (
    Code,
    CommandFailed,
    interrupt_code,
    load_torch,
    sigterm_interrupts,
    uninterrupted,
)
from batchfit._cli.output import stdout_for_results
from batchfit._cli.progress import own_warnings_as_notes, progress_here
from batchfit._cli.traced import RenderedAnswer, deliver, wrong_flag
from batchfit._profile.pure.options import ProfileOptions

if TYPE_CHECKING:
    from batchfit._cli.programs.find import ProgramCall
    from batchfit._cli.progress import ProgressDisplay


def profile_command(call: ProgramCall) -> Code:
    """Profile a command; the flags are options of `profile_throughput`."""
    call.template("profile")  # a wrong one is refused before anything else
    try:
        options = ProfileOptions(**call.flags)
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "profile") from None
    call.delivery.check()
    with stdout_for_results(alone=call.delivery.as_json) as stdout:
        progress = progress_here()
        try:
            with sigterm_interrupts(), progress, own_warnings_as_notes(progress):
                progress.doing("loading torch")
                load_torch()
                answer = _profiled(call, options, progress)
        except KeyboardInterrupt as stop:
            raise CommandFailed(interrupt_code(stop), "interrupted before there was an answer") from None
        except errors.ProgramError as error:
            raise CommandFailed(Code.RAISED, str(error), details="\n".join(error.lines)) from None
        except errors.NothingFitsError as error:
            raise CommandFailed(Code.NOTHING_FITS, str(error)) from None
        except errors.SearchStoppedError as error:
            raise CommandFailed(Code.STOPPED, str(error)) from None
        except ValueError as error:
            if str(error).partition(" must ")[0] not in (*call.flags, "set"):
                raise
            raise wrong_flag(error, "profile") from None
        with uninterrupted():
            deliver(answer, stdout, call.delivery)
    return answer.code


def _profiled(call: ProgramCall, options: ProfileOptions, progress: ProgressDisplay) -> RenderedAnswer:
    from batchfit._program.throughput import profile_program
    from batchfit._program.trials import ProgramTarget

    template = call.template("profile")
    target = ProgramTarget(
        template=template,
        budget_bytes=options.budget_bytes,
        device=None if options.device is None else str(options.device),
    )
    progress.note(f"timing {template.shown_template()}")
    code = Code.FOUND
    try:
        profile = profile_program(
            target,
            replace(options, on_point=shown_points(progress)),
            on_size=lambda size: progress.doing(f"running with batch size {size}"),
        )
    except KeyboardInterrupt as stop:
        if (timed := getattr(stop, "profile", None)) is None:
            raise
        profile, code = timed, interrupt_code(stop)
    return rendered(profile, code, title=template.shown_template())
