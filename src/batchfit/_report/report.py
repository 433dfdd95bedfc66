"""`batchfit.report`: results as one HTML file.

Rules: an output that cannot be written and an input that cannot be read are errors before any writing;
the file is there whole or not at all; torch is not needed. Charts are drawn by `batchfit._charts.svg`, which
says why no plotting library is in the file: a report has about 100 KB at most.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from batchfit._files import why_not_writable, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable

    from batchfit.results import Result


def report(
    result: Result | str | Path | Iterable[Result | str | Path], path: str | Path, *, title: str | None = None
) -> Path:
    """Write one HTML page about one or several results.

    ```python
    batchfit.report(batchfit.find_batch_size(workload), "report.html")
    ```

    Args:
        result: a result, the path of a result's JSON file, or several of either.
        path: the file to write; it is there whole or not at all.
        title: the heading of the page; default: what the results are of.

    Returns:
        The path of the page.

    Raises:
        ResultFileError: a file is no result; names the field.
        TypeError: `title` is neither text nor None.
        ValueError: `path` cannot be written.
    """
    from batchfit._report.files import sources_of
    from batchfit._report.page import page

    where = checked_path(path)
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be text or None, not {title!r}")
    write_atomically(where, page(sources_of(result), title=title))
    return where


def checked_path(path: str | Path) -> Path:
    """The path of a file that can be written, as far as one can see."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the path of a file, not {path!r}")
    try:
        where = Path(path)
        why = why_not_writable(where)
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"path must be a file that can be written, not {path!r:.80}: {reason}") from None
    if why:
        raise ValueError(f"path must be a file that can be written, not {str(path)!r}: {why}")
    return where
