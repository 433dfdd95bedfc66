"""The commands and their flags.

Rules: a flag of `find` is a keyword of `find_batch_size` with the same name and default (a test
compares the two); this module imports typer and nothing heavy, so that `--help` is quick; each command
does its work in a module of its own. One default differs: the store is on here, since a command is typed
again and again, and off there, since a program should not read a file that its author does not know of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import batchfit
from batchfit._cli.exits import MEANINGS, Code, CommandFailed

# In the help text and not in the epilog: versions of typer differ in what they do to an epilog's lines.
CODES = "Exit codes:\n" + "\n".join(f"  {int(code):>3}  {meaning}" for code, meaning in MEANINGS.items())

MAIN_HELP = f"""\
Find the right batch size for a PyTorch program, and keep it from running out of memory.

Examples:
  batchfit demo
  batchfit find train.py:make_workload --budget 24GiB
  batchfit doctor

{CODES}
"""

FIND_HELP = f"""\
Find the largest batch size that TARGET can run without running out of memory.

Sizes are really run, a few steps each, and the answer survives a soak of more steps. Model,
optimizer and random state are put back after every trial.

Examples:
  batchfit find train.py:make_workload
  batchfit find train.py:make_workload --budget 24GiB --multiple-of 8
  batchfit find mypackage.train:make --strategy grow --start 19 --max-size 4096
  batchfit find train.py:make_workload --json | jq .batch_size

where train.py has:
  def make_workload():
      ...
      return batchfit.training(model, optimizer, loss_fn, make_batch)

{CODES}
"""

DOCTOR_HELP = """\
Show what batchfit finds on this machine, and test that it works here.

Versions, devices, allocator settings, optional packages, and a small find under virtual memory.
Exits with 1 if something is broken.

Examples:
  batchfit doctor
  batchfit doctor --json > doctor.json
"""

DEMO_HELP = """\
Find the largest batch of a small GPT, on a GPU if there is one, in well under a minute.

Without a GPU it runs on the CPU, under virtual memory that runs out like a GPU's.

Examples:
  batchfit demo
  batchfit demo --output fit.json
"""

app = typer.Typer(
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


def _help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit()


@app.callback(help=MAIN_HELP)
def batchfit_command(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    # Our own: typer's, when it is not given, is None, and to make that a bool typer imports pydantic.
    show_help: Annotated[
        bool,
        typer.Option("--help", "-h", help="Show this message and exit.", callback=_help, is_eager=True),
    ] = False,
) -> None:
    """What `batchfit` does before any command: nothing but answer `--version`."""


SEARCH = "Search"
TRIAL = "Trials"
STORE = "Store"
OUTPUT = "Output"


@app.command(help=FIND_HELP)
def find(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            show_default=False,
            help="file.py:function or package.module:function: a function without required arguments that "
            "returns a Workload or a step(batch_size) callable.",
        ),
    ],
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
            help="Device whose memory is measured, such as cuda:1 or cpu.",
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
        int,
        typer.Option(
            metavar="N",
            rich_help_panel=TRIAL,
            help="Steps that the answer must survive at the end; 0: no soak.",
        ),
    ] = 25,
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
        typer.Option("--json", rich_help_panel=OUTPUT, help="The result as JSON, alone on stdout."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=OUTPUT,
            show_default=False,
            help="Write the result as JSON to FILE too.",
        ),
    ] = None,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", rich_help_panel=OUTPUT, help="Show whole tracebacks, not only your own frames."
        ),
    ] = False,
) -> None:
    from batchfit._cli.find import FindSettings, find_target

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
        device=device,
        store=store,
        fresh=fresh,
        key=key,
    )
    _end(lambda: find_target(target, settings, as_json=json, output=output, full_traceback=traceback))


@app.command(help=DOCTOR_HELP)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="The same as JSON, alone on stdout.")] = False,
) -> None:
    from batchfit._cli.doctor import examine

    _end(lambda: examine(as_json=json))


@app.command(help=DEMO_HELP)
def demo(
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the result goes; its folder is made if it is missing.")
    ] = Path("out/demo.json"),
) -> None:
    from batchfit._cli.demo import run_demo

    _end(lambda: run_demo(output=output))


def _end(command: Callable[[], Code]) -> None:
    """Run a command and exit with its code; say on stderr why it failed, if it did."""
    from batchfit._cli.output import complain

    try:
        code = command()
    except CommandFailed as failed:
        complain(failed)
        code = failed.code
    except KeyboardInterrupt:
        code = Code.INTERRUPTED  # where nothing was found yet that could be saved
    sys.stdout.flush()
    raise typer.Exit(int(code))
