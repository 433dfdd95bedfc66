"""Tables of results, as text and for a notebook.

Rules: cells come as texts and are escaped where they go into HTML; columns are as wide as what is in them.
"""

from __future__ import annotations

import html
from collections.abc import Sequence


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under their names.

    Args:
        columns: the headings.
        rows: the cells of each row, as text.

    Returns:
        The table with aligned columns.
    """
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (columns, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def without_empty(
    columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """The table without the columns in which no row has a value ("-"): `reserved` on a CPU."""
    kept = [at for at in range(len(columns)) if not rows or any(row[at] != "-" for row in rows)]
    return [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """The same table for a notebook.

    Args:
        columns: the headings.
        rows: the cells of each row, as text.
        caption: a line above the table.

    Returns:
        An HTML table.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"
    )
