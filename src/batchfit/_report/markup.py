"""Parts of the report's page as HTML: figures with their switches and tables, lists, facts.

Rules: every text that comes in is escaped here; there are no style attributes and no scripts in what goes
out, so the page's policy can forbid both. A figure stands with JavaScript off: its table is a `<details>`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from batchfit._charts.svg import Chart, draw, escaped, key

WIDE = (820, 330)
NARROW = (340, 270)


@dataclass(frozen=True, slots=True)
class HtmlTable:
    """Cells under their names; columns in `words` are read as text, rows in `chosen` stand out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: Collection[str] = ()
    chosen: Collection[int] = ()

    def without_empty(self, *kept: str) -> HtmlTable:
        """The table without columns in which no row has anything; `kept` stay."""
        keep = [
            n for n, name in enumerate(self.columns) if name in kept or any(r[n] != "-" for r in self.rows)
        ]
        return replace(
            self,
            columns=tuple(self.columns[n] for n in keep),
            rows=tuple(tuple(row[n] for n in keep) for row in self.rows),
        )


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure that people look for first."""

    name: str
    value: str
    more: str = ""


def figure(chart: Chart, table: HtmlTable, *, name: str, note: str = "") -> str:
    """A chart in all its drawings, its switches, its legend and its numbers."""
    begins = "log" if chart.begins_log else "linear"
    both = (chart.begins_log, not chart.begins_log) if chart.is_switched else (chart.begins_log,)
    # The texts of the points are in the first drawing only. The script copies them to the others, which a
    # page without scripts shows on phones at most, where nothing hovers.
    pictures = "".join(
        draw(
            chart,
            width=width,
            height=height,
            log=log,
            name=f"{name}-{kind}{'-log' if log else ''}",
            tips=kind == "wide" and log == chart.begins_log,
        )
        for log in both
        for kind, (width, height) in (("wide", WIDE), ("narrow", NARROW))
    )
    return (
        f'<figure id="{name}" data-axis="{begins}" data-view="plot">'
        f"<figcaption><h3>{escaped(chart.title)}</h3>{_paragraph(note)}</figcaption>"
        f'<div class="tools">{_axis_switch(chart)}{_view_switch()}{_zoom_buttons(chart)}</div>'
        f'<div class="plot">{pictures}</div>{_legend(chart)}'
        f"<details><summary>The numbers</summary>{table_of(table)}</details></figure>"
    )


def table_of(table: HtmlTable) -> str:
    """A table that scrolls inside itself where the page is narrow."""
    classes = [' class="words"' if name in table.words else "" for name in table.columns]
    head = "".join(
        f'<th scope="col"{c}>{escaped(name)}</th>' for name, c in zip(table.columns, classes, strict=True)
    )
    body = "".join(
        f"<tr{' class=chosen' if number in table.chosen else ''}>"
        + "".join(f"<td{c}>{escaped(cell)}</td>" for cell, c in zip(row, classes, strict=True))
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bars(title: str, rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Rows of (name, share of the longest, amount, share): a table whose bars need no colour to be read."""
    body = "".join(
        f"<tr><td>{escaped(name)}</td>"
        '<td class="bar"><svg aria-hidden="true">'
        f'<rect width="{min(max(share, 0.0), 1.0):.1%}" height="12" rx="2"/></svg></td>'
        f"<td>{escaped(amount)}</td><td>{escaped(part)}</td></tr>"
        for name, share, amount, part in rows
    )
    return (
        f'<table class="bars"><thead><tr><th scope="col">{escaped(title)}</th><th></th>'
        f'<th scope="col">memory</th><th scope="col">share</th></tr></thead><tbody>{body}</tbody></table>'
    )


def facts(found: Sequence[Fact]) -> str:
    """The figures at the top."""
    cells = "".join(
        f"<div><dt>{escaped(one.name)}</dt><dd>{escaped(one.value)}"
        + (f"<small>{escaped(one.more)}</small>" if one.more else "")
        + "</dd></div>"
        for one in found
    )
    return f'<dl class="facts">{cells}</dl>' if cells else ""


def panel(*parts: str) -> str:
    """A frame round some parts."""
    return f'<div class="card">{"".join(parts)}</div>'


def _paragraph(text: str) -> str:
    return f"<p>{escaped(text)}</p>" if text else ""


def _axis_switch(chart: Chart) -> str:
    if not chart.is_switched:
        return ""
    what = chart.x.name if chart.x.switched else chart.y.name
    buttons = "".join(
        f'<button type="button" data-to-axis="{kind}" aria-pressed="{pressed}">{kind}</button>'
        for kind, pressed in (("linear", _yes(not chart.begins_log)), ("log", _yes(chart.begins_log)))
    )
    return f'<span class="switch" role="group" aria-label="axis of {escaped(what)}">{buttons}</span>'


def _yes(value: bool) -> str:
    return "true" if value else "false"


def _view_switch() -> str:
    return (
        '<span class="switch" role="group" aria-label="view">'
        '<button type="button" data-to-view="plot" aria-pressed="true">plot</button>'
        '<button type="button" data-to-view="table" aria-pressed="false">table</button></span>'
    )


def _zoom_buttons(chart: Chart) -> str:
    if not chart.zooms:
        return ""
    return (
        '<span class="switch" role="group" aria-label="zoom">'
        '<button type="button" data-zoom="in">zoom to the end</button>'
        '<button type="button" data-zoom="all" disabled>whole</button></span>'
    )


def _legend(chart: Chart) -> str:
    """What each shape and dash stands for; a click hides it. One series alone needs no words."""
    if sum(bool(one.name) for one in chart.series) < 2:
        return ""
    entries = "".join(
        f'<li><button type="button" data-of="{number}" aria-pressed="true">{key(one)} {escaped(one.name)}'
        "</button></li>"
        for number, one in enumerate(chart.series)
        if one.name
    )
    return f'<ul class="legend">{entries}</ul>'
