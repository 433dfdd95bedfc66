"""`batchfit profile -- python train.py --batch-size {}`: throughput by batch size, from runs of the program.

Rules: as in `profile`, with the same answer. Each timing is a run of the command; what needs the step in this
process (FLOPs, the data loader alone, an idle GPU) is not looked at.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batchfit._cli.commands.profile import rendered, shown_points
from batchfit._cli.delivery import RenderedAnswer, run_answer
from batchfit._cli.exits import Code, checked_options, interrupt_code
from batchfit._cli.programs.find import known_failures
from batchfit._profile.pure.options import ProfileOptions

if TYPE_CHECKING:
    from batchfit._cli.programs.find import ProgramCall
    from batchfit._cli.progress import ProgressDisplay
    from batchfit._program.pure.template import CommandTemplate


def profile_command(call: ProgramCall) -> Code:
    """Profile a command; the flags are options of `profile_throughput`."""
    template = call.template("profile")
    options = checked_options(ProfileOptions, call.flags, "profile")
    call.delivery.check()

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        with known_failures("profile", call.flags):
            return _profiled(template, options, progress)

    return run_answer(call.delivery, answer)


def _profiled(
    template: CommandTemplate, options: ProfileOptions, progress: ProgressDisplay
) -> RenderedAnswer:
    from batchfit._program.profile import profile_program
    from batchfit._program.trials import ProgramTarget

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
