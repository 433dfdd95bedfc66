"""`batchfit why`: the post-mortem of an OOM, from the snapshots that PyTorch writes.

Rules: as `explain`; torch is not loaded, and nothing in a file is run (`batchfit._why.pure.pickle_reader`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchfit._charts.oom_page import oom_lines
from batchfit._cli.delivery import Delivery, RenderedAnswer, deliver
from batchfit._cli.exits import Code, CommandFailed, checked_options
from batchfit._cli.flags import FlagValues
from batchfit._cli.output import stdout_for_results
from batchfit._cli.progress import progress_here
from batchfit._why.pure.options import WhyOptions
from batchfit.errors import ResultFileError

if TYPE_CHECKING:
    from batchfit.results import OomExplanation


def explain_snapshots(
    files: Sequence[Path], flags: FlagValues, delivery: Delivery, *, report: Path | None = None
) -> Code:
    """Read snapshots and say why the process was out of memory; the flags are options of `explain_oom`."""
    options = checked_options(WhyOptions, flags, "why")
    delivery.check()
    if report is not None:
        from batchfit._cli.commands.report import check_output

        check_output(report, files)
    with stdout_for_results(alone=delivery.as_json) as stdout:
        from batchfit._why.why import explain_files

        with progress_here() as progress:
            progress.doing(f"reading {', '.join(one.name for one in files)}")
            try:
                found = explain_files(files, options)
            except ResultFileError as error:
                raise CommandFailed(Code.USAGE, str(error)) from None
        if report is not None:
            _write_report(found, report)
        deliver(_rendered(found), stdout, delivery)
    return Code.FOUND


def _rendered(found: OomExplanation) -> RenderedAnswer:
    return RenderedAnswer(
        json=found.to_json(),
        lines=lambda width, plain: oom_lines(found, width=width, plain=plain),
        draw=lambda path: _draw_file(found, path),
    )


def _write_report(found: OomExplanation, path: Path) -> None:
    from batchfit._report.report import report

    try:
        report(found, path)
    except OSError as error:
        raise CommandFailed(
            Code.BROKEN, f"the report could not be saved to {path}: {error.strerror or error}"
        ) from None


def _draw_file(found: OomExplanation, path: Path) -> None:
    from batchfit._charts.oom_chart import oom_chart
    from batchfit._cli.png import draw_charts

    draw_charts([oom_chart(found)], path, title=found.name)
