"""Charts as a file, with matplotlib: `--plot FILE.png` or `.svg`.

Rules: what is drawn is a `Chart`, the value that the report draws too (`batchfit._charts.figures`).
matplotlib is optional and loaded here only, without a display; that it is missing is an error before any
work; a file is there whole or not at all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfit._charts.text_charts import short_count
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.output import check_writable

if TYPE_CHECKING:
    from batchfit._charts.svg import Chart, Series

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before any work."""
    if path.suffix.lower() not in SUFFIXES:
        raise CommandFailed(Code.USAGE, f"plot must end in .png or .svg, not {str(path)!r}")
    check_writable(path, name="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandFailed(Code.USAGE, 'pip install "batchfit[plot]" to use --plot: it needs matplotlib')


def draw_charts(charts: Sequence[Chart], path: Path, *, title: str = "") -> None:
    """Draw charts, one below the other, under a title."""
    figure, rows = _figure(len(charts))
    if title:
        figure.suptitle(title)
    for chart, axes in zip(charts, rows, strict=True):
        for one in chart.series:
            _draw_series(axes, one)
        for rule in chart.rules:
            line = axes.axhline if rule.axis == "y" else axes.axvline
            line(rule.at, color="0.4", linestyle="--", linewidth=1)
            where = (0.01, rule.at) if rule.axis == "y" else (rule.at, 0.97)
            coordinates = ("axes fraction", "data") if rule.axis == "y" else ("data", "axes fraction")
            axes.annotate(
                rule.label, where, xycoords=coordinates, xytext=(3, 3), textcoords="offset points", fontsize=8
            )
        for axis, name in ((chart.x, "x"), (chart.y, "y")):
            if axis.log:
                getattr(axes, f"set_{name}scale")("log", base=2)
                getattr(axes, f"{name}axis").set_major_formatter(lambda value, _: short_count(value))
            elif name == "y":
                axes.set_ylim(0, None)
        axes.set(xlabel=chart.x.name, ylabel=chart.y.name, title=chart.title)
        if sum(bool(one.name) for one in chart.series) > 1:
            axes.legend(fontsize=8)
    _save(figure, path)


# The shapes and colours of `batchfit._charts.svg` as matplotlib calls them.
_MARKERS = {"dot": "o", "ring": "o", "cross": "x", "square": "s", "triangle": "^", "diamond": "D", "none": ""}
_DASHES = {"": "", "solid": "-", "stairs": "-", "dashed": "--", "dotted": ":"}
_COLOURS = {"fits": "#009E73", "oom": "#D55E00", "other": "#E69F00", "c5": "0.4"}


def _draw_series(axes: Any, one: Series) -> None:
    colour = _COLOURS.get(one.role, f"C{one.role[1:]}")
    across, up = [mark.x for mark in one.marks], [mark.y for mark in one.marks]
    name = one.name or "_nolegend_"
    if one.line == "area":
        floors = [mark.low or 0.0 for mark in one.marks]
        axes.fill_between(across, floors, up, step="post", color=colour, label=name, linewidth=0)
        return
    shape = one.marks[0].shape if one.marks else "none"
    axes.plot(
        across,
        up,
        color=colour,
        label=name,
        marker=_MARKERS[shape],
        linestyle=_DASHES[one.line] or "none",
        markerfacecolor="none" if shape in ("ring", "square") else colour,
        drawstyle="steps-post" if one.line == "stairs" else "default",
    )
    bars = [mark for mark in one.marks if mark.low is not None and mark.high is not None]
    if bars:
        spread = [[mark.y - (mark.low or 0) for mark in bars], [(mark.high or 0) - mark.y for mark in bars]]
        places = [mark.x for mark in bars], [mark.y for mark in bars]
        axes.errorbar(*places, yerr=spread, fmt="none", ecolor=colour, capsize=2)
    for mark in one.marks:
        if mark.label:
            axes.annotate(mark.label, (mark.x, mark.y), xytext=(6, 5), textcoords="offset points", fontsize=8)


def _figure(rows: int) -> tuple[Any, list[Any]]:
    # Not pyplot: it would look for a display, and keep the figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5 * rows), layout="constrained")
    grid = figure.subplots(rows, squeeze=False)[:, 0]
    for axes in grid:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    return figure, list(grid)


def _save(figure: Any, path: Path) -> None:
    draft = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        figure.savefig(draft, dpi=150)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
