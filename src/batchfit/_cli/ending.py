"""What every command does at its end, and the help that all share.

Rules: a command ends with one exit code; why it failed is said on stderr, once. Imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from batchfit._cli.exits import Code, CommandFailed


def end(command: Callable[[], Code]) -> None:
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


def show_help(context: typer.Context, wanted: bool) -> None:
    """What `--help` does."""
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit()
