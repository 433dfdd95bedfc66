"""Flags that several commands have.

Rules: as in `_cli/app.py`: typer and nothing else at import time, since every `batchfit --help` pays for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

OUTPUT = "Output"
TARGET_HELP = (
    "file.py:function or package.module:function: a function without required arguments that returns a "
    "Workload or a step(batch_size) callable."
)
Target = Annotated[str, typer.Argument(metavar="TARGET", show_default=False, help=TARGET_HELP)]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=OUTPUT, show_default=False, help="Write the JSON to FILE too."
    ),
]
WholeTracebacks = Annotated[
    bool,
    typer.Option(
        "--traceback", rich_help_panel=OUTPUT, help="Show whole tracebacks, not only your own frames."
    ),
]


class Command(TyperCommand):
    """A command in whose help no type stands beside a flag that takes no value (`--json <bool>`)."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its arguments and options."""
        return _untyped(super().get_params(ctx))


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
