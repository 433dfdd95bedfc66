"""Pictures for a report, with matplotlib: `--plot FILE.png` or `.svg`.

Rules: matplotlib is optional and loaded here only, without a display; that it is missing is said before any
work; a file is there whole or not at all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.output import check_writable
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit._charts.svg import Chart, Series
    from batchfit._cli.commands.predict import Row
    from batchfit._cli.commands.schedule import FollowedSchedule
    from batchfit.results import MemoryExplanation, Prediction, ThroughputProfile

SUFFIXES = (".png", ".svg")
GIB, MIB = 2**30, 2**20
# The order in which kinds lie on each other: what is there all the time at the bottom. The colours are
# Okabe and Ito's, which people who see few colours can tell apart.
KINDS = {
    "weights": "#0072B2",
    "optimizer": "#E69F00",
    "gradients": "#CC79A7",
    "batch": "#56B4E9",
    "activations": "#009E73",
    "temporaries": "#999999",
    "workspaces": "#D55E00",
}


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before any work."""
    if path.suffix.lower() not in SUFFIXES:
        raise CommandFailed(Code.USAGE, f"plot must end in .png or .svg, not {str(path)!r}")
    check_writable(path, name="plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandFailed(Code.USAGE, 'pip install "batchfit[plot]" to use --plot: it needs matplotlib')


def draw_prediction(
    predictions: Sequence[Prediction], rows: Sequence[Row], path: Path, *, title: str
) -> None:
    """Memory against size: a curve for each GPU, a line for each budget, a mark at each answer."""
    figure, axes = _figure()
    unit, name = _unit(max(row.budget_bytes for row in rows))
    for number, one in enumerate(predictions):
        colour = f"C{number}"
        sizes = [point.size for point in one.curve]
        axes.plot(sizes, [p.peak_bytes / unit for p in one.curve], color=colour, label=f"{one.card}, peak")
        reserved = [p.reserved_bytes / unit for p in one.curve]
        axes.plot(sizes, reserved, color=colour, alpha=0.4, label=f"{one.card}, with the allocator's cache")
    for row in rows:
        height = row.budget_bytes / unit
        axes.axhline(height, color="0.5", linestyle="--", linewidth=1)
        text = f"{row.card}, {format_bytes(row.budget_bytes)}: {row.batch_size or 'nothing fits'}"
        axes.annotate(text, (0, height), xytext=(4, 3), textcoords="offset points", fontsize=8)
        if row.batch_size:
            axes.plot([row.batch_size], [row.peak_bytes / unit], "o", color="black", markersize=5)
    axes.set(xlabel="batch size", ylabel=f"memory ({name})", title=title, xlim=(0, None), ylim=(0, None))
    axes.legend(loc="lower right", fontsize=8)
    _save(figure, path)


def draw_explanation(explanation: MemoryExplanation, path: Path, *, title: str) -> None:
    """Live memory over one step, by kind, with its phases."""
    figure, axes = _figure()
    unit, name = _unit(explanation.peak_bytes)
    moments = explanation.timeline
    kinds = [kind for kind in KINDS if any(kind in moment.kinds for moment in moments)]
    kinds += sorted({kind for moment in moments for kind in moment.kinds} - set(KINDS))
    places = [moment.at for moment in moments]
    layers = [[moment.kinds.get(kind, 0) / unit for moment in moments] for kind in kinds]
    if moments:
        colours = [KINDS.get(kind, "#000000") for kind in kinds]
        # A block is there from one event to the next: steps, not slopes.
        axes.stackplot(places, layers, labels=kinds, colors=colours, step="post", linewidth=0)
    begins = [n for n in range(len(moments)) if n == 0 or moments[n].phase != moments[n - 1].phase]
    for n in begins:
        # Behind the areas: the peak is often a sliver where a phase begins.
        axes.axvline(moments[n].at, color="0.6", linewidth=0.8, zorder=0.5)
        where = (moments[n].at, 1.0)
        axes.annotate(
            moments[n].phase, where, xycoords=("data", "axes fraction"), xytext=(2, -9),
            textcoords="offset points", fontsize=7,
        )  # fmt: skip
    if explanation.budget_bytes is not None and explanation.budget_bytes < 2 * explanation.peak_bytes:
        axes.axhline(explanation.budget_bytes / unit, color="0.5", linestyle="--", linewidth=1)
    axes.set(
        xlabel="allocations and frees of one step",
        ylabel=f"memory ({name})",
        title=f"{title}, batch size {explanation.batch_size}: "
        f"{format_bytes(explanation.peak_bytes)} in {explanation.peak_phase}",
        ylim=(0, None),
    )
    if moments:
        peak = max(moments, key=lambda moment: sum(moment.kinds.values()))
        height = sum(peak.kinds.values()) / unit
        axes.annotate("peak", (peak.at, height), xytext=(6, -2), textcoords="offset points", fontsize=7)
        axes.plot([peak.at], [height], "v", color="black", markersize=4)
        axes.set_xlim(places[0], places[-1])
        axes.legend(loc="upper left", fontsize=8, reverse=True, bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def draw_profile(profile: ThroughputProfile, path: Path, *, title: str) -> None:
    """Samples per second against the size with its interval, and memory beside it."""
    figure, axes = _figure()
    points = profile.points
    sizes, rates = [p.size for p in points], [p.samples_per_s for p in points]
    low = [p.samples_per_s * (1 - p.step_s / p.step_s_high) for p in points]
    high = [p.samples_per_s * (p.step_s / p.step_s_low - 1) for p in points]
    axes.errorbar(sizes, rates, yerr=[low, high], color="C0", marker="o", markersize=4, capsize=2)
    chosen, least = profile.at(profile.recommended), profile.best.samples_per_s * (1 - profile.within)
    axes.axhline(least, color="0.5", linestyle="--", linewidth=1)
    axes.annotate(
        f"{1 - profile.within:.0%} of the best", (sizes[0], least), xytext=(0, 3), textcoords="offset points",
        fontsize=8,
    )  # fmt: skip
    axes.plot([chosen.size], [chosen.samples_per_s], "o", color="black", markersize=9, fillstyle="none")
    axes.annotate(
        str(chosen.size), (chosen.size, chosen.samples_per_s), xytext=(6, -14), textcoords="offset points"
    )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="batch size", ylabel="samples/s", ylim=(0, None))
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45, fontsize=7)
    axes.minorticks_off()
    if all(p.peak_bytes is not None for p in points):
        unit, name = _unit(max(p.peak_bytes or 0 for p in points))
        right = axes.twinx()
        right.plot(sizes, [(p.peak_bytes or 0) / unit for p in points], color="C1", linestyle=":", marker=".")
        right.set(ylabel=f"peak memory ({name})", ylim=(0, None))
        right.yaxis.label.set_color("C1")
        right.spines[["top"]].set_visible(False)
    axes.set_title(
        f"{title}: batch size {profile.recommended}, {chosen.samples_per_s:.4g} samples/s", fontsize=10
    )
    _save(figure, path)


def draw_schedule(shown: FollowedSchedule, path: Path) -> None:
    """Batch size over the epochs in stairs, and the learning rate where it follows."""
    figure, axes = _figure()
    ends = [phase.begins.samples for phase in shown.phases[1:]]
    ends.append(sum(phase.samples for phase in shown.phases))
    places = [0.0, *(end / shown.samples for end in ends)]
    axes.stairs([phase.size for phase in shown.phases], places, baseline=None, color="C0", linewidth=2)
    axes.set(xlabel="epoch", ylabel="batch size", ylim=(0, None), xlim=(0, places[-1]))
    if any(factor != 1 for factor in shown.factors):
        right = axes.twinx()
        rates = [factor * (shown.lr or 1.0) for factor in shown.factors]
        right.stairs(rates, places, baseline=None, color="C1", linewidth=1.5)
        right.set(ylabel="learning rate" if shown.lr else "factor of the learning rate", ylim=(0, None))
        right.spines[["top"]].set_visible(False)
        right.yaxis.label.set_color("C1")
    if shown.room is not None:
        fits = shown.room.largest * shown.world_size
        axes.axhline(fits, color="0.4", linestyle="--", linewidth=1)
        axes.annotate(
            f"{fits:,} fit at once", (0, fits), xytext=(3, 3), textcoords="offset points", fontsize=8
        )
        axes.set_ylim(0, 1.08 * max(fits, *(phase.size for phase in shown.phases)))
    axes.yaxis.label.set_color("C0")
    axes.set_title(
        f"{shown.config}: {shown.updates:,} updates, {shown.saved:.1%} fewer than at {shown.initial}"
    )
    _save(figure, path)


def draw_charts(charts: Sequence[Chart], path: Path) -> None:
    """The charts of a report, one below the other."""
    figure, rows = _figure(len(charts))
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
                getattr(axes, f"{name}axis").set_major_formatter("{x:g}")
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
    for mark in one.marks:
        if mark.label:
            axes.annotate(mark.label, (mark.x, mark.y), xytext=(6, 5), textcoords="offset points", fontsize=8)


def _figure(rows: int | None = None) -> tuple[Any, Any]:
    # Not pyplot: it would look for a display, and keep the figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5 * (rows or 1)), layout="constrained")
    grid = figure.subplots(rows or 1, squeeze=False)
    for axes in grid[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
    return figure, grid[0, 0] if rows is None else list(grid[:, 0])


def _unit(largest: int) -> tuple[int, str]:
    return (GIB, "GiB") if largest >= GIB else (MIB, "MiB")


def _save(figure: Any, path: Path) -> None:
    draft = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        figure.savefig(draft, dpi=150)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
