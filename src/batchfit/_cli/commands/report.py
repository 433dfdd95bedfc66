"""`batchfit report`: result files as one HTML page, and as a picture.

Rules: what cannot be written is said before anything is read, what cannot be read before anything is written;
an output is never one of the inputs, and never has another file's ending, so that no result is lost by a slip
of the hand. Torch is not loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from batchfit._charts.memory_page import fact
from batchfit._charts.text_charts import Line
from batchfit._cli.delivery import show
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.output import check_writable
from batchfit._files import write_atomically
from batchfit.errors import ResultFileError

SUFFIXES = (".html", ".htm")


def write_report(
    files: Sequence[Path], *, output: Path, title: str | None = None, plot: Path | None = None
) -> Code:
    """Read results, write the page, and say in a few lines what is in it."""
    check_output(output, files)
    if plot is not None:
        from batchfit._cli.png import check_plot

        check_plot(plot)
    from batchfit._report.files import sources_of
    from batchfit._report.page import page
    from batchfit._report.sections import charts

    try:
        sources = sources_of(list(files))
    except ResultFileError as error:
        raise CommandFailed(Code.USAGE, str(error)) from None
    saved = [output]
    try:
        write_atomically(output, page(sources, title=title))
        if plot is not None:
            from batchfit._cli.png import draw_charts

            saved.append(plot)
            draw_charts(charts(sources), plot)
    except OSError as error:
        raise CommandFailed(
            Code.BROKEN, f"the report could not be saved to {saved[-1]}: {error.strerror or error}"
        ) from None
    results = [source.result for source in sources]
    show(lambda width, plain: report_lines(results, width), sys.stdout, saved=[str(one) for one in saved])
    return Code.FOUND


def check_output(output: Path, files: Sequence[Path] = ()) -> None:
    """Refuse an output that cannot be written or would be a mistake."""
    if output.suffix.lower() not in SUFFIXES:
        raise CommandFailed(Code.USAGE, f"output must end in .html, not {str(output)!r}")
    check_writable(output)
    if any(one.exists() and output.exists() and one.samefile(output) for one in files):
        raise CommandFailed(Code.USAGE, f"output must be another file than the results, not {str(output)!r}")


def report_lines(results: Sequence[object], width: int) -> list[Line]:
    """The headlines and the figures, as text."""
    import textwrap

    from batchfit._report.verdict import facts_of, verdict
    from batchfit.results import Result

    known = [one for one in results if isinstance(one, Result)]
    lines: list[Line] = [
        [(part, "strong")] for headline in verdict(known) for part in textwrap.wrap(headline, width)
    ]
    found = facts_of(known)
    room = max((len(one.name) for one in found), default=0) + 2
    for one in found:
        lines += fact(one.name, f"{one.value}{f' ({one.more})' if one.more else ''}", width, room=room)
    return [*lines, []]
