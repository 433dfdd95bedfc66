"""Flags that several commands have, flags made from options values, and what every command does at its end.

Rules: as in `_cli/app.py`: typer and nothing else at import time, since every `batchfit --help` pays for it.
A command ends with one exit code; why it failed is said on stderr, once.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from batchfit._cli.exits import CommandFailed, interrupt_code
from batchfit._cli.signals import SIGNALS
from batchfit._options import Flag, flags_in

OUTPUT = "Output"
_SCRIPT_ARGUMENTS = "batchfit.script_arguments"
TARGET_HELP = (
    "file.py:name or package.module:name: a Workload, a step(batch_size), or a function without required "
    "arguments that returns one of these. Arguments of the script itself go after --."
)
FlagValues = dict[str, Any]  # what `flags_of` gives to a command
TargetOrCommand = Annotated[
    str | None,
    typer.Argument(
        metavar="[TARGET]",
        show_default=False,
        help=f"{TARGET_HELP} Without TARGET: any command after --, with {{}} in the place of the batch size.",
    ),
]
ProjectTarget = Annotated[
    str | None,
    typer.Argument(
        metavar="[TARGET]",
        show_default=False,
        help=(
            f"{TARGET_HELP} Without TARGET: any command after --, or all targets of [tool.batchfit.check] in "
            "pyproject.toml."
        ),
    ),
]
PROGRAM = "Commands after --"
ProgramEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME",
        rich_help_panel=PROGRAM,
        show_default=False,
        help="Give the command the batch size in this environment variable.",
    ),
]
ProgramSet = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FILE:KEY",
        rich_help_panel=PROGRAM,
        show_default=False,
        help="Give the command a copy of FILE, YAML or JSON, with the batch size at KEY "
        "(config.yaml:train.batch_size).",
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=OUTPUT, show_default=False, help="Write the JSON to FILE too."
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        rich_help_panel=OUTPUT,
        show_default=False,
        help="Write the answer as an HTML page to FILE, too.",
    ),
]
AppliesPlan = Annotated[
    bool,
    typer.Option(
        "--apply",
        help="On a machine with that GPU: run find and profile with a workload as it is, and compare.",
    ),
]
WholeTracebacks = Annotated[
    bool,
    typer.Option(
        "--traceback", rich_help_panel=OUTPUT, help="Show whole tracebacks, not only your own frames."
    ),
]


def _list_gpus(wanted: bool) -> None:
    if wanted:
        from batchfit._charts.text_charts import as_text
        from batchfit._cli.commands.predict import gpu_lines

        typer.echo(as_text(gpu_lines()))
        raise typer.Exit()


def _list_models(wanted: bool) -> None:
    if wanted:
        from batchfit._charts.text_charts import as_text
        from batchfit._cli.commands.plan import model_lines

        typer.echo(as_text(model_lines()))
        raise typer.Exit()


ListGpus = Annotated[
    bool,
    typer.Option(
        "--list-gpus",
        rich_help_panel=OUTPUT,
        callback=_list_gpus,
        is_eager=True,
        help="Show the GPUs that --gpu knows, and exit.",
    ),
]
ListModels = Annotated[
    bool,
    typer.Option(
        "--list-models",
        rich_help_panel=OUTPUT,
        callback=_list_models,
        is_eager=True,
        help="Show the models that are known by name, and exit.",
    ),
]


class Command(TyperCommand):
    """A command in whose help no type stands beside a flag that takes no value (`--json <bool>`)."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options."""
        return _untyped(super().get_params(ctx))


class TargetCommand(Command):
    """A command on a target: what stands after `--` is for the target's script, and is no flag of ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the script's arguments in the context's `meta`, and parse the others."""
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_SCRIPT_ARGUMENTS] = args[:at], tuple(args[at + 1 :])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line, with the script's arguments at its end."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


class ProgramCommand(TargetCommand):
    """A command on any program, whose own command stands after `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As for a target; a program's command without `--` before it is said."""
        if "--" not in args and not any(one in ("-h", "--help") for one in args):
            raise typer.BadParameter(
                "the program's command must stand after --: batchfit run -- python train.py --batch-size {}"
            )
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line, with the program's command at its end."""
        return [*TyperCommand.collect_usage_pieces(self, ctx), "-- COMMAND..."]


def script_arguments(context: typer.Context) -> tuple[str, ...]:
    """What the user gave after `--`."""
    arguments: tuple[str, ...] = context.meta.get(_SCRIPT_ARGUMENTS, ())
    return arguments


def program_words(context: typer.Context) -> tuple[str, ...]:
    """The command after `--`; a missing TARGET is said where there is none."""
    words = script_arguments(context)
    if not words:
        raise typer.BadParameter(
            f"give a TARGET (file.py:name), or any command after --: batchfit {context.command.name} -- "
            "python train.py --batch-size {}"
        )
    return words


def no_program_flags(env: list[str] | None, sets: list[str] | None) -> None:
    """Refuse flags that say where a command gets its size where there is a TARGET."""
    for name, given in (("--env", env), ("--set", sets)):
        if given:
            raise typer.BadParameter(f"{name} is for a command after --, without a TARGET")


def listed(values: list[str] | None) -> list[str] | None:
    """A flag that may be repeated may have commas, too: `--sizes 4,16 --sizes 64`."""
    return None if values is None else [one.strip() for value in values for one in value.split(",")]


def listed_sizes(values: list[str] | None) -> list[int] | None:
    """The same for whole numbers."""
    try:
        return None if values is None else [int(one) for one in listed(values) or ()]
    except ValueError:
        raise typer.BadParameter(
            f"sizes must be whole numbers such as 4,16,64, not {','.join(values or ())!r}"
        ) from None


class Group(TyperGroup):
    """The same for a command that has commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options."""
        return _untyped(super().get_params(ctx))


def _untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


def json_flag(help_text: str) -> Any:
    """`--json`."""
    return typer.Option("--json", rich_help_panel=OUTPUT, help=help_text)


def plot_flag(what: str) -> Any:
    """`--plot FILE`, which draws that."""
    help_text = f"Draw {what} into FILE.png or FILE.svg (needs matplotlib)."
    return typer.Option(metavar="FILE", rich_help_panel=OUTPUT, show_default=False, help=help_text)


def end(command: Callable[[], int]) -> None:
    """Run a command and exit with its code; say on stderr why it failed, if it did."""
    from batchfit._cli.output import complain

    code: int
    try:
        with SIGNALS.opened():
            code = command()
    except CommandFailed as failed:
        complain(failed)
        code = failed.code
    except (Exception, KeyboardInterrupt) as error:
        stop = SIGNALS.came_out(error)
        if stop is None:
            raise
        code = interrupt_code(stop)  # where nothing was found yet that could be saved
    sys.stdout.flush()
    raise typer.Exit(int(code))


def show_help(context: typer.Context, wanted: bool) -> None:
    """What `--help` does."""
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit()


def flags_of(
    *options: type[Any], without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of options values, in place of its parameter `flags`.

    The command gets their values there, by name. `without` are those that it has no use for, `defaults` those
    that differ on the command line.
    """
    found = [one for value in options for one in flags_in(value) if one[0] not in without]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        names = [name for name, _, _ in found]

        def run(**values: Any) -> None:
            command(flags={name: values.pop(name) for name in names}, **values)

        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name != "flags":
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            for name, default, flag in found:
                parameters.append(_parameter(name, defaults.get(name, default), flag))
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def _parameter(name: str, default: Any, flag: Flag) -> inspect.Parameter:
    """The parameter of which typer makes a flag: what is off by default has no `--no-` form."""
    spelling = flag.spelling or f"--{name.replace('_', '-')}"
    if flag.kind is bool and default is not False:
        spelling += f"/--no-{spelling.removeprefix('--')}"
    option = typer.Option(
        spelling,
        help=flag.help,
        metavar=flag.metavar,
        rich_help_panel=flag.panel,
        show_default=flag.shown_default,
    )
    kind: Any = list[str] if flag.repeats else flag.kind
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind | None if default is None else kind, option],
    )
