"""stdout for results alone, output paths checked before any work, and the reason of a failure on stderr.

Rules: with `--json` nothing but the JSON reaches stdout, whatever the user's code or a child process
prints; a file is there whole or not at all; a path that cannot be written is refused before any work.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.progress import is_terminal, speaks
from batchfit._files import why_not_writable


@contextmanager
def stdout_for_results(*, alone: bool) -> Iterator[TextIO]:
    """A stream to stdout. `alone`: whatever else writes to stdout in the meantime goes to stderr."""
    if not alone:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def check_writable(path: Path, *, name: str = "output", make_folder: bool = False) -> None:
    """Refuse a path that cannot be written, while nothing is lost yet; `name` is the flag's."""

    def refuse(why: str) -> CommandFailed:
        return CommandFailed(
            Code.USAGE, f"{name} must be a file that can be written, not {str(path)!r}: {why}"
        )

    if str(path) == "-":
        raise refuse("use --json to have the result on stdout")
    if make_folder and not path.is_dir():
        try:
            path.resolve().parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refuse(f"{error}; --{name} names another") from None
    why = why_not_writable(path)
    if why == "permission denied" and name != "FILE":
        # Most often a default in a current folder that is read-only.
        raise refuse(f"{why}; --{name} names another")
    if why:
        raise refuse(why)


def complain(failed: CommandFailed) -> None:
    """Say on stderr why a command failed. Under torchrun rank 0 speaks, and any rank of its own error."""
    rank = "" if speaks() else f"rank {os.environ['RANK']}: "
    if rank and not failed.every_rank:
        return
    text = f"{failed.details}\n\n" if failed.details else ""
    message = f"{rank}error: {failed.text}"
    if is_terminal(sys.stderr):
        width = shutil.get_terminal_size().columns - 1
        message = textwrap.fill(message, width, break_long_words=False, break_on_hyphens=False)
        if not os.environ.get("NO_COLOR"):
            message = message.replace("error:", "\x1b[1;31merror:\x1b[0m", 1)
    sys.stderr.write(f"{text}{message}\n")
    sys.stderr.flush()
