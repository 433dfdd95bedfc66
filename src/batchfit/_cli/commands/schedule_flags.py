"""The flags of `batchfit schedule`.

Rules: as in `_cli/app.py`: typer and nothing else at import time, since every `batchfit --help` pays for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, final

import typer

from batchfit._cli.flags import (
    Command,
    FlagValues,
    Group,
    OutputFile,
    end,
    flags_of,
    json_flag,
    plot_flag,
    show_help,
)
from batchfit._cli.help_texts import exit_codes
from batchfit._options import flag

HELP = f"""\
Look at batch-size schedules.

Examples:
  batchfit schedule show "0:256 20:512" --samples 50000 --epochs 60

{exit_codes("schedule")}
"""
SHOW_HELP = f"""\
Show what the schedule CONFIG will do: sizes, updates, learning rates.

CONFIG is a JSON or YAML file, or text such as "0:256 20:512". Updates are
counted as ResizableLoader makes them. Nothing is trained. With --fits it says
what does not fit.

Examples:
  batchfit schedule show s.json --samples 50000 --epochs 100 --initial 256
  batchfit schedule show "0:256 20:512" --samples 50000 --epochs 60
  batchfit schedule show "0:256 20:512" --samples 1.2M --epochs 90 --fits 300
  batchfit schedule show s.yaml --samples 1.2M --epochs 90 --fits fit.json

{exit_codes("schedule")}
"""


class Schedules(Group):
    """`batchfit schedule CONFIG` is `batchfit schedule show CONFIG`: it can mean nothing else."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments begin with, or `show` where they begin with a schedule."""
        known = args[0] in self.commands
        is_schedule = ":" in args[0] or args[0].endswith((".json", ".yaml", ".yml"))
        return super().resolve_command(ctx, ["show", *args] if is_schedule and not known else args)


schedule_app = typer.Typer(
    cls=Schedules, help=HELP, no_args_is_help=True, add_help_option=False, rich_markup_mode="rich"
)


@schedule_app.callback(help=HELP)
def schedule(
    # Our own, as in `_cli/app.py`: typer's would import pydantic.
    wanted: Annotated[
        bool,
        typer.Option("--help", "-h", help="Show this message and exit.", callback=show_help, is_eager=True),
    ] = False,
) -> None:
    """Keeps `show` a word of its own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShowSettings:
    """What `batchfit schedule show` is to show of a schedule."""

    samples: str = flag(
        kind=str, metavar="N", shown_default=False, help="Samples of an epoch, such as 50000 or 1.2M."
    )
    epochs: int = flag(kind=int, metavar="N", shown_default=False, help="Epochs of the run.")
    initial: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default="what CONFIG says at 0",
        help="Batch size that training starts with.",
    )
    lr: float | None = flag(
        None, float, metavar="RATE", shown_default=False, help="Learning rate at the initial batch size."
    )
    lr_rule: str = flag("none", metavar="RULE", help="none, linear, sqrt, seesaw or power(0.6).")
    fits: str | None = flag(
        None,
        str,
        metavar="N|FILE",
        shown_default=False,
        help="Largest batch of one process that fits, or the JSON of batchfit find, predict or profile: "
        "then with memory.",
    )
    world_size: int = flag(1, metavar="N", help="Ranks that share a batch; sizes are multiples of it.")
    microbatch_size: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default=False,
        help="Round sizes to multiples of N samples on every rank.",
    )
    tokens_per_sample: int | None = flag(
        None, int, metavar="N", shown_default=False, help="For a schedule in tokens."
    )
    drop_last: bool = flag(False, help="Leave out the short last batch of an epoch.")


@schedule_app.command(cls=Command, help=SHOW_HELP)
@flags_of(ShowSettings)
def show(
    config: Annotated[
        str,
        typer.Argument(metavar="CONFIG", show_default=False, help="A JSON or YAML file, or milestones."),
    ],
    flags: FlagValues,
    json: Annotated[bool, json_flag("The plan as JSON, alone on stdout.")] = False,
    output: OutputFile = None,
    plot: Annotated[Path | None, plot_flag("sizes and learning rate")] = None,
) -> None:
    from batchfit._cli.commands.schedule import show_schedule
    from batchfit._cli.delivery import Delivery

    delivery = Delivery(as_json=json, output=output, plot=plot)
    end(lambda: show_schedule(config, ShowSettings(**flags), delivery=delivery))
