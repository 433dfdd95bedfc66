"""The commands and their flags.

Rules: a flag of `find`, `predict`, `explain` or `profile` is a keyword of the function behind it, with the
same name and default (a test compares the two; a flag that may be repeated is a list); this module imports
typer and nothing heavy, so that `--help` is quick; each command does its work in a module of its own.
One default differs: the store is on in `batchfit find`, since a command is typed again and again, and off in
`find_batch_size`, since a program should not read a file that its author does not know of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import batchfit
from batchfit._cli.commands.schedule_flags import schedule_app
from batchfit._cli.ending import end, show_help
from batchfit._cli.flags import (
    OUTPUT,
    Command,
    Group,
    OutputFile,
    Target,
    TargetCommand,
    WholeTracebacks,
    json_flag,
    listed,
    listed_sizes,
    plot_flag,
    script_arguments,
)
from batchfit._cli.help_texts import (
    DEMO_HELP,
    DOCTOR_HELP,
    EXPLAIN_HELP,
    FIND_HELP,
    INIT_HELP,
    MAIN_HELP,
    PREDICT_HELP,
    PROFILE_HELP,
    REPORT_HELP,
    SWEEP_HELP,
)

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


SEARCH = "Search"
TRIAL = "Trials"
STORE = "Store"
PLACE = "Where"


@app.command(cls=TargetCommand, help=FIND_HELP)
def find(
    context: typer.Context,
    target: Target,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            show_default="what is free",
            help="Memory the program may use, such as 24GiB or 800MiB. On a CPU: virtual memory, which runs "
            "out like a GPU's.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            show_default="the workload's",
            help="Device whose memory is measured: cuda:1, 1, a UUID such as GPU-8932f937, or cpu.",
        ),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=SEARCH,
            help="How sizes are chosen: guided, bisect, halve, grow or powers.",
        ),
    ] = "guided",
    min_size: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=SEARCH, help="Smallest size to accept.")
    ] = 1,
    max_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel=SEARCH, show_default="no limit", help="Largest size to try."
        ),
    ] = None,
    multiple_of: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=SEARCH, help="Try only multiples of N.")
    ] = 1,
    power_of_two: Annotated[
        bool, typer.Option("--power-of-two", rich_help_panel=SEARCH, help="Try only powers of two.")
    ] = False,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            rich_help_panel=SEARCH,
            help="Stop this close to the largest size; 0 finds it exactly.",
        ),
    ] = 0.02,
    start: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel=SEARCH, show_default="the strategy's", help="First size to try."
        ),
    ] = None,
    attempts: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=SEARCH, help="Sizes that the strategy grow may try.")
    ] = 5,
    steps: Annotated[int, typer.Option(metavar="N", rich_help_panel=TRIAL, help="Steps of one trial.")] = 3,
    soak_steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            rich_help_panel=TRIAL,
            show_default="25, fewer once memory repeats itself",
            help="Steps that the answer must survive at the end; 0: no soak.",
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            metavar="N", rich_help_panel=TRIAL, show_default="no limit", help="Stop after this many trials."
        ),
    ] = None,
    time_limit_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=TRIAL,
            show_default="no limit",
            help="Begin no trial after this many seconds.",
        ),
    ] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict/--no-predict",
            rich_help_panel=SEARCH,
            help="On a GPU, let guided begin with what a prediction says.",
        ),
    ] = True,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate",
            rich_help_panel=TRIAL,
            help="Run each trial in a child process: one that is killed or hangs is too big, and the search "
            "goes on. Without prediction and store, which need the workload here.",
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=TRIAL,
            show_default="no limit",
            help="With --isolate: stop a child whose step takes longer.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=SEARCH,
            show_default=False,
            help="Keep the search in FILE after each trial; go on with the one that it holds.",
        ),
    ] = None,
    store: Annotated[
        bool,
        typer.Option(
            "--store/--no-store",
            rich_help_panel=STORE,
            help="Use an answer found before, confirmed by one trial, and keep this one.",
        ),
    ] = True,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", rich_help_panel=STORE, help="Search even if there is a stored answer, and replace it."
        ),
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=STORE,
            show_default="made from the workload",
            help="Name of this workload in the store; needed for a step without a model.",
        ),
    ] = None,
    json: Annotated[
        bool,
        json_flag("The result as JSON, alone on stdout."),
    ] = False,
    output: OutputFile = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.find import FindSettings, find_target

    settings = FindSettings(
        budget=budget,
        max_size=max_size,
        min_size=min_size,
        strategy=strategy,
        multiple_of=multiple_of,
        power_of_two=power_of_two,
        tolerance=tolerance,
        start=start,
        attempts=attempts,
        steps=steps,
        soak_steps=soak_steps,
        max_trials=max_trials,
        time_limit_s=time_limit_s,
        predict=predict,
        device=device,
        isolate=isolate,
        timeout_s=timeout_s,
        resume=resume,
        store=store,
        fresh=fresh,
        key=key,
    )
    source = context.get_parameter_source("store")
    asked = store and source is not None and source.name == "COMMANDLINE"
    end(
        lambda: find_target(
            target,
            settings,
            as_json=json,
            output=output,
            full_traceback=traceback,
            store_asked=asked,
            arguments=script_arguments(context),
        )
    )


def _list_gpus(wanted: bool) -> None:
    if wanted:
        from batchfit._charts.text import as_text
        from batchfit._cli.commands.predict import card_lines

        typer.echo(as_text(card_lines()))
        raise typer.Exit()


@app.command(cls=TargetCommand, help=PREDICT_HELP)
def predict(
    context: typer.Context,
    target: Target,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BYTES",
            show_default="what is free on the GPU, or all of --gpu",
            help="Memory the program may use, such as 80GiB or 24GiB,80GiB. May be given several times.",
        ),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CARD",
            show_default="the one that is here",
            help="Card to predict for: its memory and its choice of kernels, such as h100 or rtx4090. May be "
            "given several times.",
        ),
    ] = None,
    max_size: Annotated[
        int | None, typer.Option(metavar="N", show_default="no limit", help="Largest size that is wanted.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            show_default="0.02 without a GPU, 0.015 with one, 0.01 calibrated",
            help="Share of the budget to leave free.",
        ),
    ] = None,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            "--calibrate/--no-calibrate",
            show_default="where the workload is on a GPU",
            help="Run two small sizes on the GPU to correct the prediction.",
        ),
    ] = None,
    expandable_segments: Annotated[
        bool | None,
        typer.Option(
            "--expandable-segments/--no-expandable-segments",
            show_default="as PYTORCH_CUDA_ALLOC_CONF says",
            help="Whether the program will run with expandable segments.",
        ),
    ] = None,
    json: Annotated[
        bool,
        json_flag("The prediction as JSON, alone on stdout; a list where there are several cards."),
    ] = False,
    output: OutputFile = None,
    plot: Annotated[
        Path | None,
        plot_flag("memory against size"),
    ] = None,
    traceback: WholeTracebacks = False,
    list_gpus: Annotated[
        bool,
        typer.Option(
            "--list-gpus",
            rich_help_panel=OUTPUT,
            callback=_list_gpus,
            is_eager=True,
            help="Show the cards that --gpu knows, and exit.",
        ),
    ] = False,
) -> None:
    from batchfit._cli.commands.predict import PredictSettings, predict_target
    from batchfit._cli.traced import Delivery

    settings = PredictSettings(
        budget=listed(budget),
        gpu=listed(gpu),
        max_size=max_size,
        margin=margin,
        calibrate=calibrate,
        expandable_segments=expandable_segments,
    )
    delivery = Delivery(as_json=json, output=output, plot=plot)
    arguments = script_arguments(context)
    end(
        lambda: predict_target(
            target, settings, delivery=delivery, full_traceback=traceback, arguments=arguments
        )
    )


@app.command(cls=TargetCommand, help=EXPLAIN_HELP)
def explain(
    context: typer.Context,
    target: Target,
    batch_size: Annotated[int, typer.Option(metavar="N", show_default=False, help="Size to explain.")],
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            show_default="what is free on the GPU, or all of --gpu",
            help="Memory the program may use: what the largest batches are told for.",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="CARD", show_default="the one that is here", help="Card whose memory and kernels count."
        ),
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if/--no-what-if", help="Trace what checkpointing, bf16 and the like would change, too."
        ),
    ] = True,
    json: Annotated[
        bool,
        json_flag("The explanation as JSON, alone on stdout."),
    ] = False,
    output: OutputFile = None,
    plot: Annotated[
        Path | None,
        plot_flag("memory over one step"),
    ] = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.explain import ExplainSettings, explain_target
    from batchfit._cli.traced import Delivery

    settings = ExplainSettings(batch_size=batch_size, budget=budget, gpu=gpu, what_if=what_if)
    delivery = Delivery(as_json=json, output=output, plot=plot)
    arguments = script_arguments(context)
    end(
        lambda: explain_target(
            target, settings, delivery=delivery, full_traceback=traceback, arguments=arguments
        )
    )


@app.command(cls=TargetCommand, help=PROFILE_HELP)
def profile(
    context: typer.Context,
    target: Target,
    smallest: Annotated[
        int, typer.Option(metavar="N", help="Size to begin with, where a batch of 1 does not run.")
    ] = 1,
    largest: Annotated[
        int | None,
        typer.Option(metavar="N", show_default="what memory allows", help="Largest size to look at."),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N",
            show_default="chosen by what is measured",
            help="Time these sizes, and no others: 4,16,64. May be given several times.",
        ),
    ] = None,
    within: Annotated[
        float,
        typer.Option(metavar="SHARE", help="How far from the best throughput the recommended size may be."),
    ] = 0.05,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            show_default="all that is free; of RAM a quarter, at most 4 GiB",
            help="Memory the program may use, such as 24GiB.",
        ),
    ] = None,
    time_limit_s: Annotated[
        float | None,
        typer.Option(metavar="S", show_default="no limit", help="Stop with what was measured by then."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", show_default="where the workload is", help="Where it runs, such as cuda:1."
        ),
    ] = None,
    tokens_per_sample: Annotated[
        int | None,
        typer.Option(
            metavar="N", show_default="read off input_ids", help="Tokens in a sample, to tell tokens/s."
        ),
    ] = None,
    target_batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Batch that the training wants: where it does not fit, how to accumulate it.",
        ),
    ] = None,
    diagnose: Annotated[
        bool, typer.Option("--diagnose/--no-diagnose", help="Look for what holds throughput back.")
    ] = True,
    json: Annotated[bool, json_flag("The profile as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    plot: Annotated[
        Path | None,
        plot_flag("throughput against size"),
    ] = None,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.profile import ProfileSettings, profile_target
    from batchfit._cli.traced import Delivery

    settings = ProfileSettings(
        smallest=smallest,
        largest=largest,
        sizes=listed_sizes(sizes),
        within=within,
        budget=budget,
        time_limit_s=time_limit_s,
        device=device,
        tokens_per_sample=tokens_per_sample,
        target_batch_size=target_batch_size,
        diagnose=diagnose,
    )
    delivery = Delivery(as_json=json, output=output, plot=plot)
    arguments = script_arguments(context)
    end(
        lambda: profile_target(
            target, settings, delivery=delivery, full_traceback=traceback, arguments=arguments
        )
    )


@app.command(cls=Command, help=SWEEP_HELP)
def sweep(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="What to run: YAML or JSON.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            show_default=False,
            help="Change a key of FILE, such as knobs.max_crops=[12,13]. May be given several times.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            rich_help_panel=PLACE,
            show_default=False,
            help="Run on these, a process each: cuda:0,cuda:1.",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=PLACE,
            show_default=False,
            help="ray: as tasks of a Ray cluster.",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            rich_help_panel=PLACE,
            show_default="the cluster there is, or one here",
            help="Of the Ray cluster.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default="as FILE says, or FILE-results.json here",
            help="Where the result goes, after each configuration.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep that the output holds.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: run what failed again.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", rich_help_panel=OUTPUT, help="Replace what the output holds.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=OUTPUT, show_default=False, help="Write the table as CSV too."
        ),
    ] = None,
    json: Annotated[bool, json_flag("The result as JSON, alone on stdout.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the configurations, what would be run and where searches begin."
        ),
    ] = False,
    traceback: WholeTracebacks = False,
) -> None:
    from batchfit._cli.commands.sweep import SweepFlags, sweep_file

    flags = SweepFlags(
        sets=tuple(set_ or ()),
        devices=devices,
        engine=engine,
        ray_address=ray_address,
        output=output,
        resume=resume,
        retry_failed=retry_failed,
        overwrite=overwrite,
        csv=csv,
        as_json=json,
        dry_run=dry_run,
        full_traceback=traceback,
    )
    end(lambda: sweep_file(file, flags))


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
