"""The command `batchfit`.

Rules: this package is the only place that prints; results go to stdout, everything else to stderr;
typer, rich, torch and pydantic are imported when a command needs them, so that `--help` needs only typer.
A reader of stderr that goes away ends nothing: progress is lost, and the answer and its exit code are not.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with one of `batchfit._cli.exits.Code`."""
    from batchfit._cli.signals import SIGNALS

    SIGNALS.install_for_process()
    from batchfit._cli.exits import Code, silence_broken_pipes, unbreakable

    sys.stderr = unbreakable(sys.stderr)
    try:
        from batchfit._cli.app import app

        app(prog_name="batchfit")
    except BrokenPipeError:
        silence_broken_pipes()
        sys.exit(Code.BROKEN)
    finally:
        SIGNALS.ignore_to_the_end()
