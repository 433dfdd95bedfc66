"""The charts of each result, as values: which lines, bars and marks; `svg.py` draws them.

Rules: a chart shows what was measured or predicted and nothing between that would look like it. Results share
a chart where their memory is of one order, so that a prediction lies under the search that followed it. An
outcome has a shape of its own. What is written about a point is what the table says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from batchfit._charts.scale import byte_axis, real
from batchfit._charts.svg import Axis, Chart, Mark, Rule, Series, Shape, chart_css, draw, escaped, key
from batchfit._charts.throughput_page import format_rate, format_seconds
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import (
        FitResult,
        MemoryExplanation,
        Moment,
        Prediction,
        ThroughputPoint,
        ThroughputProfile,
        Trial,
    )

# What a trial's ending looks like, and how it is called where there is a whole sentence of room.
OUTCOMES: dict[str, tuple[Shape, str, str]] = {
    "sustained": ("diamond", "fits", "sustained"),
    "retries": ("ring", "other", "fits, with allocation retries"),
    "fits": ("dot", "fits", "fits"),
    "oom": ("cross", "oom", "ran out of memory"),
    "too_large": ("square", "oom", "too large"),
    "killed": ("triangle", "oom", "killed"),
    "timeout": ("ring", "oom", "took too long"),
}
# The order in which kinds of memory lie on each other: what is always there at the bottom.
KINDS = ("weights", "optimizer", "gradients", "batch", "activations", "temporaries", "workspaces")
_COLUMNS = 80  # moments of a timeline that are drawn: a chart has not many more pixels
_ONE_ORDER = 8  # budgets further apart than this do not share an axis


@dataclass(frozen=True, slots=True)
class Memory:
    """Results that say how memory grows with the size; each has a name, or none where it is alone."""

    fits: tuple[tuple[str, FitResult], ...] = ()
    predictions: tuple[tuple[str, Prediction], ...] = ()
    profiles: tuple[tuple[str, ThroughputProfile], ...] = ()
    explanations: tuple[tuple[str, MemoryExplanation], ...] = ()

    def budgets(self) -> list[int]:
        """The bytes that these results are about."""
        found = [one.budget_bytes for _, one in self.fits] + [one.budget_bytes for _, one in self.predictions]
        found += [one.budget_bytes for _, one in self.profiles]
        return found + [one.budget_bytes or one.peak_bytes for _, one in self.explanations]


def of_one_order(memory: Memory) -> list[Memory]:
    """The same results in groups whose budgets can share an axis, the smallest first."""
    edges: list[float] = []
    for budget in sorted(memory.budgets()):
        if not edges or budget > edges[-1] * _ONE_ORDER:
            edges.append(max(budget, 1))

    def group(budget: float) -> int:
        return max([n for n, edge in enumerate(edges) if budget >= edge], default=0)

    return [
        Memory(
            tuple(pair for pair in memory.fits if group(pair[1].budget_bytes) == number),
            tuple(pair for pair in memory.predictions if group(pair[1].budget_bytes) == number),
            tuple(pair for pair in memory.profiles if group(pair[1].budget_bytes) == number),
            tuple(
                pair
                for pair in memory.explanations
                if group(pair[1].budget_bytes or pair[1].peak_bytes) == number
            ),
        )
        for number in range(len(edges))
    ]


def trial_tip(trial: Trial, budget_bytes: int | None) -> str:
    """`size 64: fits, peak 12.1 GiB of 23.8 GiB, 35.2 ms a step`."""
    words = OUTCOMES.get(_ending(trial), ("dot", "", trial.outcome))[2]
    if trial.outcome == "oom":
        words += f" in step {trial.steps_run + 1}"
    parts = [f"size {trial.size:,}: {words}"]
    if trial.peak_bytes is not None:
        of = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
        parts.append(f"peak {format_bytes(trial.peak_bytes)}{of}")
    if trial.reserved_bytes is not None:
        parts.append(f"{format_bytes(trial.reserved_bytes)} reserved")
    if trial.step_s is not None:
        parts.append(f"{format_seconds(trial.step_s)} a step")
    return ", ".join(parts)


def path_chart(fit: FitResult) -> Chart:
    """The sizes in the order in which they were tried."""
    order = tuple(Mark(n, t.size, shape="none") for n, t in enumerate(fit.trials, 1))
    series = [Series("order of the trials", order, "c5", line="dotted")]
    answer = max((n for n, t in enumerate(fit.trials, 1) if t.size == fit.batch_size and t.fits), default=0)
    marks = [
        (
            _ending(trial),
            Mark(
                number,
                trial.size,
                f"trial {number}, {trial_tip(trial, fit.budget_bytes)}",
                *OUTCOMES[_ending(trial)][:2],
                label=f"{fit.batch_size:,}" if number == answer else "",
            ),
        )
        for number, trial in enumerate(fit.trials, 1)
    ]
    series += _by_outcome(marks)
    return Chart(
        "Search path",
        f"{len(fit.trials)} trials in the order in which they were run, by batch size; the answer is "
        f"{fit.batch_size}.",
        Axis("trial", whole=True, least=1),
        Axis("batch size", log=True, switched=True, whole=True),
        tuple(series),
    )


def memory_chart(memory: Memory) -> Chart:
    """Memory against size: what was measured, what was predicted, and the budgets."""
    top = max([*memory.budgets(), *_peaks(memory)], default=1)
    unit, unit_name = byte_axis(top)
    end = max(_sizes(memory), default=1) * 1.2
    series: list[Series] = []
    for number, (name, one) in enumerate(memory.predictions):
        series += _predicted(name, one, _colour(number), unit, end)
    for name, fit in memory.fits:
        series += _measured(name, fit, unit)
    for name, profile in memory.profiles:
        series += _profiled(name, profile, unit)
    for name, why in memory.explanations:
        tip = f"size {why.batch_size:,}: traced peak {format_bytes(why.peak_bytes)} in {why.peak_phase}"
        mark = Mark(why.batch_size, real(why.peak_bytes) / unit, tip, "triangle")
        series.append(Series(f"{name}explained", (mark,), "c4"))
    budgets = {budget: f"budget {format_bytes(budget)}" for budget in _budget_lines(memory)}
    return Chart(
        "Memory against batch size",
        f"Memory in {unit_name} by batch size, under a budget of "
        f"{', '.join(format_bytes(one) for one in budgets) or 'any size'}.",
        Axis("batch size", log=_is_crowded(memory), switched=True, whole=True),
        Axis(f"memory, {unit_name}"),
        tuple(series),
        tuple(Rule(real(at) / unit, label) for at, label in budgets.items()),
    )


# Classes of the style sheet for results beside each other; c5, the grey one, is for what is beside the point.
_COLOURS = ("c0", "c1", "c2", "c3", "c4", "c6")


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def throughput_chart(profiles: Sequence[tuple[str, ThroughputProfile]]) -> Chart:
    """Samples per second against size, with what is enough and the size that is recommended."""
    series, rules = [], []
    for number, (name, one) in enumerate(profiles):
        shapes: tuple[Shape, ...] = ("dot", "square", "triangle")
        marks = tuple(
            Mark(
                p.size,
                real(p.samples_per_s),
                _point_tip(p),
                "diamond" if p.size == one.recommended else shapes[number % 3],
                label=f"recommended {p.size:,}" if p.size == one.recommended else "",
                low=real(p.samples_per_s * p.step_s / p.step_s_high) if p.step_s_high > 0 else None,
                high=real(p.samples_per_s * p.step_s / p.step_s_low) if p.step_s_low > 0 else None,
            )
            for p in one.points
        )
        line = ("solid", "dashed", "dotted")[number % 3]
        series.append(Series(f"{name}samples/s", marks, _colour(number), line=line))  # type: ignore[arg-type]
        if one.points:
            enough = one.best.samples_per_s * (1 - one.within)
            rules.append(Rule(real(enough), f"{name}{1 - one.within:.0%} of the best", role="c5"))
    sizes = ", ".join(str(one.recommended) for _, one in profiles)
    return Chart(
        "Throughput against batch size",
        f"Samples per second by batch size; recommended: {sizes}.",
        Axis("batch size", log=True, switched=True, whole=True),
        Axis("samples/s"),
        tuple(series),
        tuple(rules),
    )


def timeline_chart(explanation: MemoryExplanation) -> Chart:
    """Live memory over one step, by kind, one on the other."""
    unit, unit_name = byte_axis(explanation.peak_bytes)
    moments = _thinned(explanation)
    series, floors = stacked_kinds(moments, KINDS, unit)
    tips = tuple(
        Mark(
            m.at,
            floor,
            f"{m.phase}: {format_bytes(sum(m.kinds.values()))} live, most of it {_most(m.kinds)}",
            "none",
        )
        for m, floor in list(zip(moments, floors, strict=True))[::4]
    )
    peak = max(range(len(moments)), key=floors.__getitem__, default=0)
    top = (
        Mark(
            moments[peak].at,
            floors[peak],
            _peak_tip(explanation),
            "triangle",
            label=f"peak in {explanation.peak_phase}",
        ),
    )
    series += [Series("", tips, "c5"), Series("", top if moments else (), "c5")]
    begins = [next(group) for _, group in groupby(moments, key=lambda moment: moment.phase)]
    return Chart(
        "Memory over one step",
        f"Live memory over the allocations of one step at batch size {explanation.batch_size}; "
        f"{_peak_tip(explanation)}.",
        Axis("allocations and frees of one step, in order"),
        Axis(f"memory, {unit_name}"),
        tuple(one for one in series if one.marks),
        tuple(Rule(moment.at, moment.phase, "x", role="c5") for moment in begins if moment.phase),
    )


def stacked_kinds(
    moments: Sequence[Moment], order: Sequence[str], unit: int
) -> tuple[list[Series], list[float]]:
    """An area per kind of memory, one on the other, and where the last one ends at each moment."""
    kinds = [kind for kind in order if any(m.kinds.get(kind) for m in moments)]
    kinds += sorted({kind for m in moments for kind in m.kinds} - set(order))
    floors = [0.0] * len(moments)
    series = []
    for number, kind in enumerate(kinds):
        marks = []
        for n, moment in enumerate(moments):
            height = floors[n] + real(moment.kinds.get(kind, 0)) / unit
            marks.append(Mark(moment.at, height, shape="none", low=floors[n]))
            floors[n] = height
        series.append(Series(kind, tuple(marks), f"c{number % 7}", line="area", named=True))
    return series, floors


def as_cell(chart: Chart) -> str:
    """A chart for a notebook's cell, with the style sheet that it needs; nothing where there is no point."""
    if not any(one.marks for one in chart.series):
        return ""
    keys = "".join(f"<span>{key(one)} {escaped(one.name)}&emsp;</span>" for one in chart.series if one.name)
    style = f"{chart_css()}.bf-cell{{max-width:640px}}"
    picture = draw(chart, width=640, height=260)
    return f'<div class="bf-cell"><style>{style}</style>{picture}<p>{keys}</p></div>'


def _ending(trial: Trial) -> str:
    """The key of `OUTCOMES` for a trial."""
    if trial.fits and trial.soak:
        return "sustained" if trial.sustained else "retries"
    return trial.outcome


def _by_outcome(marks: Iterable[tuple[str, Mark]]) -> list[Series]:
    """A series an outcome, in the order of `OUTCOMES`."""
    found: dict[str, list[Mark]] = {}
    for ending, mark in marks:
        found.setdefault(ending, []).append(mark)
    return [
        Series(OUTCOMES[ending][2], tuple(found[ending]), OUTCOMES[ending][1])
        for ending in OUTCOMES
        if ending in found
    ]


def _predicted(name: str, one: Prediction, role: str, unit: int, end: float) -> list[Series]:
    curve = [point for point in one.curve if point.size <= max(end, 2)]
    if not curve:
        return []
    live, whole = [], []
    for point in curve:
        about = f"size {point.size:,}: predicted peak {format_bytes(point.peak_bytes)}"
        live.append(Mark(point.size, real(point.peak_bytes) / unit, about, "none"))
        about = (
            f"size {point.size:,}: predicted {format_bytes(point.reserved_bytes)} with the allocator's cache"
        )
        whole.append(Mark(point.size, real(point.reserved_bytes) / unit, about, "none"))
    found = [Series(f"{name}predicted peak", tuple(live), role, line="solid", named=True)]
    if any(point.reserved_bytes > point.peak_bytes for point in curve):
        found.append(
            Series(f"{name}predicted, with the allocator's cache", tuple(whole), role, line="dashed")
        )
    answers = [
        Mark(
            answer.batch_size,
            real(answer.peak_bytes) / unit,
            f"predicted largest batch {answer.batch_size:,}: peak {format_bytes(answer.peak_bytes)} of "
            f"{format_bytes(answer.budget_bytes)}",
            "square",
            label=f"predicted {answer.batch_size:,}",
        )
        for answer in one.answers
        if 0 < answer.batch_size <= end
    ]
    return [*found, Series(f"{name}predicted largest", tuple(answers), role)] if answers else found


def _measured(name: str, fit: FitResult, unit: int) -> list[Series]:
    marks = []
    rings = []
    for number, trial in enumerate(fit.trials):
        tip = trial_tip(trial, fit.budget_bytes)
        shape, role, _ = OUTCOMES[_ending(trial)]
        # A trial that was out of memory needed more than there is: it stands on the budget.
        height = trial.peak_bytes if trial.fits else fit.budget_bytes
        if height is None:
            continue
        last = not any(later.size == fit.batch_size and later.fits for later in fit.trials[number + 1 :])
        label = f"found {fit.batch_size:,}" if trial.size == fit.batch_size and trial.fits and last else ""
        marks.append((_ending(trial), Mark(trial.size, real(height) / unit, tip, shape, role, label)))
        if trial.fits and trial.reserved_bytes is not None:
            rings.append(Mark(trial.size, real(trial.reserved_bytes) / unit, tip, "ring"))
    found = [Series(f"{name}{one.name}", one.marks, one.role) for one in _by_outcome(marks)]
    if rings:
        found.append(Series(f"{name}measured, with the allocator's cache", tuple(rings), "c5"))
    return found


def _profiled(name: str, profile: ThroughputProfile, unit: int) -> list[Series]:
    marks = [
        Mark(
            p.size, real(p.peak_bytes) / unit, f"size {p.size:,}: peak {format_bytes(p.peak_bytes)}", "square"
        )
        for p in profile.points
        if p.peak_bytes is not None
    ]
    lost = [
        Mark(size, real(profile.budget_bytes) / unit, f"size {size:,}: ran out of memory", "cross")
        for size in profile.too_large
    ]
    found = (
        Series(f"{name}profiled peak", tuple(marks), "c3"),
        Series(f"{name}profiled, out of memory", tuple(lost), "oom"),
    )
    return [one for one in found if one.marks]


def _sizes(memory: Memory) -> list[int]:
    sizes = [trial.size for _, fit in memory.fits for trial in fit.trials]
    sizes += [answer.batch_size for _, one in memory.predictions for answer in one.answers]
    sizes += [one.batch_size for _, one in memory.predictions]
    sizes += [point.size for _, one in memory.profiles for point in one.points]
    sizes += [size for _, one in memory.profiles for size in one.too_large]
    return sizes + [one.batch_size for _, one in memory.explanations]


def _is_crowded(memory: Memory) -> bool:
    """Whether sizes that were far too large would press all others into a corner of a linear axis."""
    ran = [trial.size for _, fit in memory.fits for trial in fit.trials if trial.fits]
    ran += [one.batch_size for _, one in memory.predictions]
    ran += [one.batch_size for _, one in memory.explanations]
    ran += [point.size for _, one in memory.profiles for point in one.points]
    return max(_sizes(memory), default=1) > 4 * max(ran, default=1)


def _peaks(memory: Memory) -> list[int]:
    peaks = [trial.peak_bytes or 0 for _, fit in memory.fits for trial in fit.trials]
    return peaks + [one.peak_bytes for _, one in memory.explanations]


def _budget_lines(memory: Memory) -> list[int]:
    found = [fit.budget_bytes for _, fit in memory.fits]
    for _, one in memory.predictions:
        found += [answer.budget_bytes for answer in one.answers] or [one.budget_bytes]
    found += [one.budget_bytes for _, one in memory.profiles]
    found += [one.budget_bytes for _, one in memory.explanations if one.budget_bytes]
    return sorted({budget for budget in found if budget > 0})


def _thinned(explanation: MemoryExplanation) -> list[Moment]:
    """The moments, at most some hundred: of neighbours the one in which the most is live."""
    moments = explanation.timeline
    every = max(1, -(-len(moments) // _COLUMNS))
    return [
        max(moments[n : n + every], key=lambda moment: sum(moment.kinds.values()))
        for n in range(0, len(moments), every)
    ]


def _most(kinds: dict[str, int]) -> str:
    return max(kinds, key=kinds.__getitem__, default="nothing")


def _peak_tip(explanation: MemoryExplanation) -> str:
    return f"peak {format_bytes(explanation.peak_bytes)} in {explanation.peak_phase}"


def _point_tip(point: ThroughputPoint) -> str:
    steady = "" if point.steady else ", not steady"
    gain = "" if point.gain is None else f", x{point.gain:.2f} of half the size"
    rate = f"{format_rate(point.samples_per_s)} samples/s, {format_seconds(point.step_s)} a step"
    return f"size {point.size:,}: {rate} ± {point.spread:.1%}{steady}{gain}"
