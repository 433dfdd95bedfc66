"""The flags of `batchfit sweep`.

Rules: as in `_cli/app.py`: nothing heavy at import time. How to search is said by the file, or by `--set`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from batchfit._options import flag

_OUTPUT = "Output"
_WHERE = "Where"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFlags:
    """The flags of `batchfit sweep`."""

    sets: Sequence[str] | None = flag(
        None,
        str,
        repeats=True,
        spelling="--set",
        metavar="KEY=VALUE",
        shown_default=False,
        help="Change a key of FILE, such as knobs.max_crops=[12,13]. May be given several times.",
    )
    devices: str | None = flag(
        None,
        str,
        metavar="LIST",
        panel=_WHERE,
        shown_default=False,
        help="Run on these, a process each: cuda:0,cuda:1.",
    )
    engine: str | None = flag(
        None,
        str,
        metavar="NAME",
        panel=_WHERE,
        shown_default=False,
        help="ray: as tasks of a Ray cluster.",
    )
    ray_address: str | None = flag(
        None,
        str,
        metavar="ADDRESS",
        panel=_WHERE,
        shown_default="the cluster there is, or one here",
        help="Of the Ray cluster.",
    )
    output: Path | None = flag(
        None,
        Path,
        metavar="FILE",
        panel=_OUTPUT,
        shown_default="as FILE says, or FILE-results.json here",
        help="Where the result goes, after each configuration.",
    )
    resume: bool = flag(False, help="Go on with the sweep that the output holds.")
    retry_failed: bool = flag(False, help="With --resume: run what failed again.")
    overwrite: bool = flag(False, panel=_OUTPUT, help="Replace what the output holds.")
    csv: Path | None = flag(
        None,
        Path,
        metavar="FILE",
        panel=_OUTPUT,
        shown_default=False,
        help="Write the table as CSV too.",
    )
    as_json: bool = flag(False, spelling="--json", panel=_OUTPUT, help="The result as JSON, alone on stdout.")
    dry_run: bool = flag(False, help="Show the configurations, what would be run and where searches begin.")
    full_traceback: bool = flag(
        False,
        spelling="--traceback",
        panel=_OUTPUT,
        help="Show whole tracebacks, not only your own frames.",
    )
