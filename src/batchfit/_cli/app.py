"""The commands and their flags.

Rules: a flag of `find`, `predict`, `explain`, `profile` or `sweep` is a field of its options value, with its
name, default and help (`_options.flag`); a flag that may be repeated is a list. This module imports typer and
nothing heavy, so that `--help` is quick; each command does its work in a module of its own.
One default differs: the store is on in `batchfit find`, since a command is typed repeatedly, and off in
`find_batch_size`, since a program should not read a file that its author does not know of.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import batchfit
from batchfit._check.pure.options import CheckOptions
from batchfit._cli.commands.schedule_flags import schedule_app
from batchfit._cli.flags import (
    OUTPUT,
    AppliesPlan,
    Command,
    FlagValues,
    Group,
    ListGpus,
    ListModels,
    OutputFile,
    ProgramCommand,
    ProgramEnv,
    ProgramSet,
    ProjectTarget,
    ReportFile,
    TargetCommand,
    TargetOrCommand,
    WholeTracebacks,
    end,
    flags_of,
    json_flag,
    listed,
    listed_sizes,
    no_program_flags,
    plot_flag,
    program_words,
    script_arguments,
    show_help,
)
from batchfit._cli.help_texts import (
    CHECK_HELP,
    DEMO_HELP,
    DOCTOR_HELP,
    EXPLAIN_HELP,
    FIND_HELP,
    INIT_HELP,
    MAIN_HELP,
    PLAN_HELP,
    PREDICT_HELP,
    PROFILE_HELP,
    REPORT_HELP,
    RUN_HELP,
    SWEEP_HELP,
    WHY_HELP,
)
from batchfit._cli.sweep.sweep_flags import SweepFlags
from batchfit._explain.pure.options import ExplainOptions
from batchfit._find.pure.options import FindOptions
from batchfit._plan.pure.options import PlanOptions
from batchfit._predict.pure.options import PredictOptions
from batchfit._profile.pure.options import ProfileOptions
from batchfit._program.pure.run_options import RunOptions
from batchfit._why.pure.options import WhyOptions

if TYPE_CHECKING:
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.programs.find import ProgramCall

# What a command after -- has no use for: its trials are always processes of their own, and never traced.
NOT_FOR_PROGRAMS = ("isolate", "predict")

app = typer.Typer(
    cls=Group,
    name="batchfit",
    no_args_is_help=True,
    add_help_option=False,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchfit {batchfit.__version__}")
        raise typer.Exit()


@app.callback(help=MAIN_HELP)
def batchfit_command(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    # Our own: typer's, when it is not given, is None, and to make that a bool typer imports pydantic.
    show_help: Annotated[
        bool,
        typer.Option("--help", "-h", help="Show this message and exit.", callback=show_help, is_eager=True),
    ] = False,
) -> None:
    """What `batchfit` does before any command: nothing but answer `--version`."""


def _program(
    context: typer.Context,
    env: list[str] | None,
    sets: list[str] | None,
    flags: FlagValues,
    delivery: Delivery,
) -> ProgramCall:
    """What was typed of a command after `--`."""
    from batchfit._cli.programs.find import ProgramCall

    return ProgramCall(program_words(context), listed(env) or (), sets or (), flags, delivery)


@app.command(cls=TargetCommand, help=FIND_HELP)
@flags_of(FindOptions, store=True)
def find(
    context: typer.Context,
    flags: FlagValues,
    target: TargetOrCommand = None,
    env: ProgramEnv = None,
    set_: ProgramSet = None,
    json: Annotated[bool, json_flag("The result as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.find import find_target
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.target import TargetCall

    delivery = Delivery(as_json=json, output=output)
    source = context.get_parameter_source("store")
    if target is None:
        from batchfit._cli.programs.find import find_in_program

        program = _program(context, env, set_, flags, delivery)
        return end(lambda: find_in_program(program))
    no_program_flags(env, set_)
    asked = flags["store"] and source is not None and source.name == "COMMANDLINE"
    call = TargetCall(target, flags, delivery, traceback, script_arguments(context))
    end(lambda: find_target(call, store_asked=asked))


@app.command(cls=ProgramCommand, help=RUN_HELP)
@flags_of(RunOptions, FindOptions, store=True, without=NOT_FOR_PROGRAMS)
def run(
    context: typer.Context,
    flags: FlagValues,
    env: ProgramEnv = None,
    set_: ProgramSet = None,
    json: Annotated[bool, json_flag("With --dry-run: the command as JSON on stdout.")] = False,
    output: OutputFile = None,
) -> None:
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.programs.run import run_for_real

    delivery = Delivery(as_json=json, output=output)
    call = _program(context, env, set_, flags, delivery)
    end(lambda: run_for_real(call))


@app.command(cls=TargetCommand, help=PREDICT_HELP)
@flags_of(PredictOptions)
def predict(
    context: typer.Context,
    flags: FlagValues,
    target: TargetOrCommand = None,
    env: ProgramEnv = None,
    set_: ProgramSet = None,
    json: Annotated[
        bool,
        json_flag("The prediction as JSON, alone on stdout; a list where there are several GPUs."),
    ] = False,
    output: OutputFile = None,
    plot: Annotated[Path | None, plot_flag("memory against size")] = None,
    traceback: WholeTracebacks = False,
    list_gpus: ListGpus = False,
) -> None:
    from batchfit._cli.commands.predict import predict_target
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.target import TargetCall

    given = {**flags, "budget": listed(flags["budget"]), "gpu": listed(flags["gpu"])}
    delivery = Delivery(as_json=json, output=output, plot=plot)
    if target is None:
        from batchfit._cli.programs.traced import predict_program

        program = _program(context, env, set_, given, delivery)
        return end(lambda: predict_program(program))
    no_program_flags(env, set_)
    call = TargetCall(target, given, delivery, traceback, script_arguments(context))
    end(lambda: predict_target(call))


@app.command(cls=TargetCommand, help=EXPLAIN_HELP)
@flags_of(ExplainOptions)
def explain(
    context: typer.Context,
    flags: FlagValues,
    target: TargetOrCommand = None,
    env: ProgramEnv = None,
    set_: ProgramSet = None,
    json: Annotated[bool, json_flag("The explanation as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    plot: Annotated[Path | None, plot_flag("memory over one step")] = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.explain import explain_target
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.target import TargetCall

    delivery = Delivery(as_json=json, output=output, plot=plot)
    if target is None:
        from batchfit._cli.programs.traced import explain_program

        program = _program(context, env, set_, flags, delivery)
        return end(lambda: explain_program(program))
    no_program_flags(env, set_)
    call = TargetCall(target, flags, delivery, traceback, script_arguments(context))
    end(lambda: explain_target(call))


@app.command(cls=TargetCommand, help=PLAN_HELP)
@flags_of(PlanOptions)
def plan(
    context: typer.Context,
    flags: FlagValues,
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A model's name (Qwen/Qwen3-8B), its config.json, or a workload (file.py:name).",
        ),
    ],
    paste: Annotated[
        str | None,
        typer.Option(
            metavar="TRAINER",
            rich_help_panel=OUTPUT,
            show_default=False,
            help="Show what to paste for each GPU: transformers, trl, lightning or torchtune.",
        ),
    ] = None,
    apply: AppliesPlan = False,
    json: Annotated[bool, json_flag("The plan as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    report: ReportFile = None,
    traceback: WholeTracebacks = False,
    list_models: ListModels = False,
) -> None:
    from batchfit._cli.commands.plan import plan_target
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.target import TargetCall

    delivery = Delivery(as_json=json, output=output, report=report)
    call = TargetCall(target, flags, delivery, traceback, script_arguments(context))
    end(lambda: plan_target(call, paste, apply=apply))


@app.command(cls=TargetCommand, help=CHECK_HELP)
@flags_of(CheckOptions)
def check(
    context: typer.Context,
    flags: FlagValues,
    target: ProjectTarget = None,
    env: ProgramEnv = None,
    set_: ProgramSet = None,
    json: Annotated[bool, json_flag("The checks as JSON, alone on stdout; several are a list.")] = False,
    output: OutputFile = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default=False,
            help="Write Markdown to FILE too, for a comment on a pull request.",
        ),
    ] = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.check import check_targets
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.target import TargetCall

    delivery = Delivery(as_json=json, output=output, markdown=markdown)
    if target is None and script_arguments(context):
        from batchfit._cli.programs.traced import check_program

        program = _program(context, env, set_, flags, delivery)
        return end(lambda: check_program(program))
    no_program_flags(env, set_)
    call = TargetCall(target or "", flags, delivery, traceback, script_arguments(context))
    end(lambda: check_targets(call))


@app.command(cls=Command, help=WHY_HELP)
@flags_of(WhyOptions)
def why(
    snapshots: Annotated[
        list[Path],
        typer.Argument(
            metavar="SNAPSHOT...", show_default=False, help="Memory snapshots of one process, or of several."
        ),
    ],
    flags: FlagValues,
    json: Annotated[bool, json_flag("The post-mortem as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    plot: Annotated[Path | None, plot_flag("memory over the recorded history")] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default=False,
            help="Write an HTML page too; it ends in .html.",
        ),
    ] = None,
) -> None:
    from batchfit._cli.commands.why import explain_snapshots
    from batchfit._cli.delivery import Delivery

    delivery = Delivery(as_json=json, output=output, plot=plot)
    end(lambda: explain_snapshots(snapshots, flags, delivery, report=report))


@app.command(cls=TargetCommand, help=PROFILE_HELP)
@flags_of(ProfileOptions)
def profile(
    context: typer.Context,
    flags: FlagValues,
    target: TargetOrCommand = None,
    env: ProgramEnv = None,
    set_: ProgramSet = None,
    json: Annotated[bool, json_flag("The profile as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    plot: Annotated[Path | None, plot_flag("throughput against size")] = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.delivery import Delivery
    from batchfit._cli.target import TargetCall

    given = {**flags, "sizes": listed_sizes(flags["sizes"])}
    delivery = Delivery(as_json=json, output=output, plot=plot)
    if target is None:
        from batchfit._cli.programs.profile import profile_command

        program = _program(context, env, set_, given, delivery)
        return end(lambda: profile_command(program))
    from batchfit._cli.commands.profile import profile_target

    no_program_flags(env, set_)
    call = TargetCall(target, given, delivery, traceback, script_arguments(context))
    end(lambda: profile_target(call))


@app.command(cls=Command, help=SWEEP_HELP)
@flags_of(SweepFlags)
def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="What to run: YAML or JSON.")
    ],
    flags: FlagValues,
) -> None:
    from batchfit._cli.sweep.sweep import sweep_file

    end(lambda: sweep_file(file, SweepFlags(**flags)))


@app.command(cls=Command, help=REPORT_HELP)
def report(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="RESULT.json...", show_default=False, help="Result files, one or several."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page goes; it ends in .html.")
    ] = Path("report.html"),
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default=False, help="What stands over the page.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Draw the charts into FILE.png or FILE.svg too (needs matplotlib).",
        ),
    ] = None,
) -> None:
    from batchfit._cli.commands.report import write_report

    end(lambda: write_report(results, output=output, title=title, plot=plot))


@app.command(cls=Command, help=INIT_HELP)
def init(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="A script, or a config of torchtune's."),
    ],
    write: Annotated[bool, typer.Option("--write", help="Change FILE itself.")] = False,
) -> None:
    from batchfit._cli.commands.init import propose

    end(lambda: propose(file, write=write))


@app.command(cls=Command, help=DOCTOR_HELP)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="The same as JSON, alone on stdout.")] = False,
) -> None:
    from batchfit._cli.commands.doctor import examine

    end(lambda: examine(as_json=json))


@app.command(cls=Command, help=DEMO_HELP)
def demo(
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the result goes; its folder is made if it is missing.")
    ] = Path("out/demo.json"),
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default="in a temporary folder", help="Where the HTML report goes."
        ),
    ] = None,
) -> None:
    from batchfit._cli.commands.demo import run_demo

    end(lambda: run_demo(output=output, report=report))


app.add_typer(schedule_app, name="schedule")
