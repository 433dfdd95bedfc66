"""`batchfit predict`, `explain` and `check -- COMMAND`: a program traced as it runs on a CPU.

Rules: as in the same commands of a target; what is wrong with the command or the flags is said before
anything is started. Nothing is calibrated: no GPU is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchfit._cli.commands import check as check_command
from batchfit._cli.commands import explain as explain_command
from batchfit._cli.commands import predict as predict_command
from batchfit._cli.delivery import RenderedAnswer, run_answer
from batchfit._cli.exits import Code, checked_options, wrong_flag
from batchfit._cli.programs.find import ProgramCall, known_failures
from batchfit._engine.allocator.gpus import DEFAULT, Gpu
from batchfit._explain.pure.options import ExplainOptions

if TYPE_CHECKING:
    from batchfit._cli.progress import ProgressDisplay
    from batchfit._predict.pure.options import PredictOptions
    from batchfit._program.pure.template import CommandTemplate
    from batchfit._program.tracing.traces import ProgramTraces
    from batchfit.results import Prediction


_NO_RANKS = "ranks must be left out for a command after --: name a workload (train.py:workload)"


def predict_program(call: ProgramCall) -> Code:
    """Predict the largest size of a program for each GPU and budget."""
    template = call.template("predict")
    wanted = predict_command.options_of(call.flags)
    try:
        if call.flags.get("calibrate"):
            raise ValueError("calibrate must be left out for a command: its steps run on a CPU")
        if wanted[0].ranks is not None:
            raise ValueError(_NO_RANKS)
        if wanted[0].target is None and not wanted[0].budgets_bytes:
            raise ValueError("gpu must be given for a command (--gpu h100), or budget (--budget 24GiB)")
    except ValueError as error:
        raise wrong_flag(error, "predict") from None
    call.delivery.check()
    text = template.shown_template()

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._program.tracing.predict import predict_program

        known: list[ProgramTraces] = []

        def predict(options: PredictOptions) -> Prediction:
            gpu = options.target or DEFAULT
            traces = known[0].for_gpu(gpu) if known else _traces(template, gpu, progress)
            known[:] = [traces]
            return predict_program(traces, options)

        with known_failures("predict", call.flags):
            found = predict_command.predicted(predict, wanted, progress, text)
        most = known[0].most_size if known else None
        explain = predict_command.next_command(found, "batchfit explain", f" -- {text}", most=most)
        return predict_command.rendered(found, text, explain, use=template.shown)

    return run_answer(call.delivery, answer)


def explain_program(call: ProgramCall) -> Code:
    """Explain the memory of a program at one size."""
    template = call.template("explain")
    options = checked_options(ExplainOptions, call.flags, "explain")
    if options.ranks is not None:
        raise wrong_flag(ValueError(_NO_RANKS), "explain")
    call.delivery.check()

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._program.tracing.explain import explain_program

        with known_failures("explain", call.flags):
            traces = _traces(template, options.target or DEFAULT, progress)
            return explain_command.rendered(explain_program(traces, options), template.shown_template())

    return run_answer(call.delivery, answer)


def check_program(call: ProgramCall) -> Code:
    """Check the memory of a program against its baseline."""
    template = call.template("check", may_be_fixed=True)
    text = template.shown_template()
    flags = check_command.project_checks().flags_of(text)
    options = check_command.options_of(call.flags, flags, needs_size=not template.is_fixed)
    call.delivery.check()

    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._program.tracing.check import check_program

        with known_failures("check", call.flags):
            traces = _traces(template, options.target or DEFAULT, progress)
            return check_command.rendered([check_program(traces, options, name=text)])

    return run_answer(call.delivery, answer)


def _traces(template: CommandTemplate, gpu: Gpu, progress: ProgressDisplay) -> ProgramTraces:
    from batchfit._program.tracing.traces import ProgramTraces

    def show(doing: str, size: int) -> None:
        at = "" if template.is_fixed else f" at batch size {size}"
        progress.doing(f"{doing} the program{at}")

    return ProgramTraces(template, gpu, on_run=show)
