"""What the report says about each kind of result.

Rules: a section has a figure where a figure says more than a table, and always the numbers; what was not seen
or not steady stands beside what was. A kind that is new gets a function here and a line in `files.KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from batchfit._charts.check_page import verdict as verdict_of
from batchfit._charts.figures import (
    Memory,
    memory_chart,
    of_one_order,
    path_chart,
    throughput_chart,
    timeline_chart,
)
from batchfit._charts.memory_page import operation_name
from batchfit._charts.oom_chart import oom_chart
from batchfit._charts.svg import Chart, escaped
from batchfit._charts.throughput_page import POINT_COLUMNS, point_cells
from batchfit._report.files import NothingFits, SchedulePlan, Source
from batchfit._report.markup import HtmlTable, bars, figure, panel, table_of
from batchfit._report.oom import oom_sections
from batchfit._report.plan import plan_sections
from batchfit._report.schedule import has_rates, rate_chart, schedule_sections, size_chart
from batchfit._report.sweep import sweep_charts, sweep_sections
from batchfit._units import format_bytes, format_change
from batchfit.results import (
    TRIAL_COLUMNS,
    FitResult,
    Holder,
    MemoryCheck,
    MemoryExplanation,
    OomExplanation,
    Plan,
    Prediction,
    Result,
    SweepResult,
    ThroughputProfile,
    trial_row,
)

_MOST_HOLDERS = 8
OneResult = TypeVar("OneResult", bound=Result)


def sections(sources: Sequence[Source]) -> str:
    """All sections, in the order in which people ask: how fast, how large, why, when."""
    fits = _named(sources, FitResult)
    profiles = _named(sources, ThroughputProfile)
    explanations = _named(sources, MemoryExplanation)
    predictions = _named(sources, Prediction)
    nothing = [source.result for source in sources if isinstance(source.result, NothingFits)]
    memory = Memory(tuple(fits), tuple(predictions), tuple(profiles), tuple(explanations))
    return "".join(
        [
            *_each(_oom, _named(sources, OomExplanation)),
            *_each(plan_sections, _named(sources, Plan)),
            *_each(sweep_sections, _named(sources, SweepResult)),
            *_throughput(profiles),
            *_memory(memory),
            *(f'<p class="warn">{escaped(one.message or one.card)}</p>' for one in nothing),
            *_each(_search, fits),
            *_each(_explained, explanations),
            *_each(_checked, _named(sources, MemoryCheck)),
            *_each(schedule_sections, _named(sources, SchedulePlan)),
            _caveats(memory),
            _environment(sources),
        ]
    )


def _each(
    section: Callable[[str, OneResult, int], Iterator[str]], named: Sequence[tuple[str, OneResult]]
) -> Iterator[str]:
    """The sections of results of one kind, each with its name and number."""
    for number, (name, result) in enumerate(named):
        yield from section(name, result, number)


def charts(sources: Sequence[Source]) -> list[Chart]:
    """The figures alone, in the same order."""
    fits, profiles = _named(sources, FitResult), _named(sources, ThroughputProfile)
    explanations, predictions = _named(sources, MemoryExplanation), _named(sources, Prediction)
    plans = [plan for _, plan in _named(sources, SchedulePlan)]
    memory = Memory(tuple(fits), tuple(predictions), tuple(profiles), tuple(explanations))
    found = [oom_chart(one) for _, one in _named(sources, OomExplanation) if one.timeline]
    found += [throughput_chart(profiles)] if any(one.points for _, one in profiles) else []
    found += [memory_chart(group) for group in of_one_order(memory)]
    found += [chart for _, one in _named(sources, SweepResult) for chart in sweep_charts(one)]
    found += [path_chart(fit) for _, fit in fits]
    found += [timeline_chart(one) for _, one in explanations if one.timeline]
    found += [size_chart(plan) for plan in plans]
    found += [rate_chart(plan) for plan in plans if has_rates(plan)]
    return [chart for chart in found if any(one.marks for one in chart.series)]


def _named(sources: Sequence[Source], kind: type[OneResult]) -> list[tuple[str, OneResult]]:
    """Results of one kind; where there are several, each with a name of its own."""
    found = [(source, source.result) for source in sources if isinstance(source.result, kind)]
    if len(found) < 2:
        return [("", result) for _, result in found]
    names = [_name(source, result) for source, result in found]
    if len(set(names)) < len(names):
        files = [PurePath(source.name).stem for source, _ in found]
        names = files if len(set(files)) == len(files) else [f"{n} ({i})" for i, n in enumerate(names, 1)]
    return [(f"{name}: ", result) for name, (_, result) in zip(names, found, strict=True)]


def _name(source: Source, result: Result) -> str:
    where = getattr(result, "card", "") or getattr(result, "device", "") or getattr(result, "schedule", "")
    return str(where) or PurePath(source.name).stem or "result"


def _throughput(profiles: Sequence[tuple[str, ThroughputProfile]]) -> Iterator[str]:
    if not any(one.points for _, one in profiles):
        return
    yield "<h2>Throughput</h2>"
    yield figure(
        throughput_chart(profiles),
        _profile_table(profiles),
        name="throughput",
        note="The smallest size within reach of the best throughput is enough: beyond it, more memory buys "
        "hardly any more samples per second.",
    )
    for name, one in profiles:
        lines = [(f"{name}{found.kind}", found.evidence, found.advice) for found in one.diagnosis]
        if one.accumulation is not None:
            lines.append((f"{name}accumulation", one.accumulation.advice, ""))
        lines += [(f"{name}note", note, "") for note in one.notes]
        if lines:
            items = "".join(
                f"<li><b>{escaped(kind)}</b>: {escaped(text)}"
                + (f'<br><span class="dim">What to change: {escaped(advice)}</span>' if advice else "")
                + "</li>"
                for kind, text, advice in lines
            )
            yield panel(f'<h3>Bottleneck</h3><ul class="list">{items}</ul>')


def _profile_table(profiles: Sequence[tuple[str, ThroughputProfile]]) -> HtmlTable:
    columns = ("size", *(name.replace("+-", "±") for name in POINT_COLUMNS))
    rows: list[tuple[str, ...]] = []
    chosen: list[int] = []
    for name, one in profiles:
        sizes = {p.size for p in one.points}
        for p in one.points:
            if p.size == one.recommended:
                chosen.append(len(rows))
            rows.append((f"{name}{p.size:,}", *point_cells(p, unsteady=" (not steady)", sizes=sizes)))
    return HtmlTable(columns, tuple(rows), chosen=chosen).without_empty(*columns[:4])


def _memory(memory: Memory) -> Iterator[str]:
    groups = of_one_order(memory)
    if groups:
        yield "<h2>Memory</h2>"
    for number, group in enumerate(groups):
        chart = memory_chart(group)
        if len(groups) > 1:
            chart = replace(chart, title=f"{chart.title}, up to {format_bytes(max(group.budgets()))}")
        if any(one.marks for one in chart.series):
            yield figure(chart, _memory_table(group), name=f"memory-{number}", note=_memory_note(group))


def _caveats(memory: Memory) -> str:
    """What predictions and explanations do not know."""
    notes = [note for _, one in memory.predictions for note in one.unseen]
    notes += [note for _, one in memory.explanations for note in one.unseen]
    items = "".join(f"<li>{escaped(note)}</li>" for note in dict.fromkeys(notes))
    return f"<h2>What the trace could not see</h2>{panel(f'<ul class=list>{items}</ul>')}" if items else ""


def _memory_note(group: Memory) -> str:
    parts = []
    if any(not trial.fits for _, fit in group.fits for trial in fit.trials):
        parts.append("A trial that was out of memory stands on the budget's line.")
    how: dict[str, list[str]] = {}
    for _, one in group.predictions:
        left = f", {one.margin:.1%} of the budget left free" if one.margin else ""
        how.setdefault(f"{one.based_on}{left}", []).append(one.card)
    parts += [f"Predicted for {' and '.join(dict.fromkeys(gpus))} ({by})." for by, gpus in how.items()]
    return " ".join(parts)


def _memory_table(group: Memory) -> HtmlTable:
    rows: list[tuple[str, ...]] = []
    for name, fit in group.fits:
        for trial in fit.trials:
            row = trial_row(trial, fit.budget_bytes)
            rows.append((f"{trial.size:,}", f"{name}measured, {row[1]}", row[3], row[4]))
    for name, one in group.predictions:
        for point in one.curve:
            amounts = (format_bytes(point.peak_bytes), format_bytes(point.reserved_bytes))
            rows.append((f"{point.size:,}", f"{name}predicted", *amounts))
        for answer in one.answers:
            size = f"{answer.batch_size:,}" if answer.batch_size else "none"
            what = f"{name}predicted largest in {format_bytes(answer.budget_bytes)}"
            rows.append((size, what, format_bytes(answer.peak_bytes), "-"))
    for name, profile in group.profiles:
        for p in profile.points:
            seen = [format_bytes(b) if b is not None else "-" for b in (p.peak_bytes, p.reserved_bytes)]
            rows.append((f"{p.size:,}", f"{name}profiled", *seen))
        rows += [(f"{size:,}", f"{name}profiled, out of memory", "-", "-") for size in profile.too_large]
    for name, why in group.explanations:
        amounts = (format_bytes(why.peak_bytes), format_bytes(why.reserved_bytes))
        rows.append((f"{why.batch_size:,}", f"{name}explained", *amounts))
    return HtmlTable(("size", "from", "peak", "reserved"), tuple(rows), words=("from",))


def _search(name: str, fit: FitResult, number: int) -> Iterator[str]:
    chosen = [n for n, t in enumerate(fit.trials) if t.size == fit.batch_size and t.fits]
    rows = []
    for count, trial in enumerate(fit.trials, 1):
        why = f"{trial.phase}: {trial.message}" if trial.phase and trial.message else trial.message
        rows.append((str(count), *trial_row(trial, fit.budget_bytes), why))
    has_message = any(trial.message for trial in fit.trials)
    columns = ("trial", *TRIAL_COLUMNS, *(("message",) if has_message else ()))
    cut = tuple(row if has_message else row[:-1] for row in rows)
    yield f"<h2>{escaped(name)}Search</h2>"
    yield figure(
        path_chart(fit),
        HtmlTable(columns, cut, words=("message",), chosen=chosen[-1:]),
        name=f"search-{number}",
        note=f"Strategy {fit.strategy}; it stopped because {fit.reason}.{_asides(fit)}",
    )


def _asides(fit: FitResult) -> str:
    parts = []
    if fit.trials_resumed:
        parts.append(f" {fit.trials_resumed} of the trials were run earlier.")
    if fit.from_store:
        parts.append(" The size came from the store, and was confirmed.")
    if fit.shrunk_from_bytes is not None:
        parts.append(
            f" Other programs took memory meanwhile: it began with {format_bytes(fit.shrunk_from_bytes)}."
        )
    return "".join(parts)


def _explained(name: str, explanation: MemoryExplanation, number: int) -> Iterator[str]:
    yield f"<h2>{escaped(name)}What holds the peak at batch size {explanation.batch_size:,}</h2>"
    where = f", at {explanation.peak_source}" if explanation.peak_source else ""
    doing = f", {operation_name(explanation.peak_operation)}" if explanation.peak_operation else ""
    peak = f"{format_bytes(explanation.peak_bytes)} in {explanation.peak_phase}{doing}{where}"
    traced = f"traced for {explanation.card}, {explanation.based_on}"
    yield panel(
        f'<h3>By kind</h3><p class="dim">{escaped(peak)}; {escaped(traced)}.</p>',
        bars("kind", _rows(explanation.kinds)),
    )
    if explanation.timeline:
        kinds = sorted({kind for moment in explanation.timeline for kind in moment.kinds})
        every = max(1, len(explanation.timeline) // 20)
        rows = tuple(
            (str(m.at), m.phase, *(format_bytes(m.kinds.get(kind, 0)) for kind in kinds))
            for m in explanation.timeline[::every]
        )
        table = HtmlTable(("event", "phase", *kinds), rows, words=("phase",))
        yield figure(timeline_chart(explanation), table, name=f"timeline-{number}")
    yield panel(
        '<div class="columns">',
        f"<div>{bars('module', _rows(explanation.modules))}</div>",
        f"<div>{bars('source line', _rows(explanation.lines))}</div></div>",
    )
    if explanation.what_ifs:
        yield panel(_changes(explanation))


def _checked(name: str, check: MemoryCheck, number: int) -> Iterator[str]:
    yield f"<h2>{escaped(name)}Memory check: {escaped(verdict_of(check).lower())}</h2>"
    notes = "".join(f"<li>{escaped(one)}</li>" for one in (*check.failures, *check.reasons, *check.unseen))
    rows = tuple(
        (format_change(one.change_bytes, check.baseline_bytes or 0), one.name, one.what, one.code)
        for one in check.lines
    )
    table = table_of(HtmlTable(("change", "line", "what", "code"), rows, words=("line", "what", "code")))
    summary = f'<p class="dim">{escaped(check.summary)}.</p>'
    yield panel(summary, f'<ul class="list">{notes}</ul>' if notes else "", table if rows else "")


def _oom(name: str, why: OomExplanation, number: int) -> Iterator[str]:
    yield from oom_sections(name, why, number, _rows)


def _rows(holders: Sequence[Holder]) -> list[tuple[str, float, str, str]]:
    longest = max((one.share for one in holders), default=0.0) or 1.0
    rows = [
        (one.name, one.share / longest, format_bytes(one.peak_bytes), f"{one.share:.1%}")
        for one in holders[:_MOST_HOLDERS]
    ]
    rest = holders[_MOST_HOLDERS:]
    if rest:
        share = sum(one.share for one in rest)
        amount = format_bytes(sum(one.peak_bytes for one in rest))
        rows.append((f"{len(rest)} more", share / longest, amount, f"{share:.1%}"))
    return rows


def _changes(explanation: MemoryExplanation) -> str:
    """What would change it, the most first."""
    items = []
    for one in sorted(explanation.what_ifs, key=lambda one: -one.gain):
        if one.largest_before is not None and one.largest_after is not None:
            numbers = f"{one.largest_before:,} → {one.largest_after:,}"
        else:
            numbers = f"{format_bytes(one.peak_bytes_before)} → {format_bytes(one.peak_bytes_after)}"
        cost = f" Costs {escaped(one.cost)}." if one.cost else ""
        times = "fits" if one.largest_before == 0 else f"x{one.gain:.2f}"
        items.append(
            f'<li><span class="gain">{escaped(numbers)} ({times})</span> <b>{escaped(one.change)}</b>'
            f'<br><span class="dim">{escaped(one.how)}{cost}</span></li>'
        )
    what = "the largest batch" if explanation.largest is not None else "the peak"
    return f'<h3>What would change {what}</h3><ul class="list">{"".join(items)}</ul>'


def _environment(sources: Sequence[Source]) -> str:
    rows = []
    for source in sources:
        one = source.result
        kind = {"fit": "search", "memory": "explanation", "oom": "post-mortem"}.get(
            getattr(one, "kind", ""), getattr(one, "kind", "")
        )
        where = [getattr(one, name, "") for name in ("device", "device_model", "card")]
        versions = {name: getattr(one, name, "") for name in ("torch_version", "batchfit_version")}
        if isinstance(one, SweepResult):
            where = [*dict.fromkeys(record.device for record in one.records)]
            versions = {name: one.environment.get(name, "") for name in versions}
        budget = getattr(one, "budget_bytes", None)
        took = getattr(one, "elapsed_s", None)
        rows.append(
            (
                kind.replace("_", " "),
                ", ".join(str(part) for part in where if part) or "-",
                format_bytes(budget) if budget is not None else "-",
                versions["torch_version"] or "-",
                versions["batchfit_version"] or "-",
                "-" if took is None else f"{took:.1f} s",
                source.name or "-",
            )
        )
    columns = ("result", "device", "budget", "torch", "batchfit", "took", "file")
    table = HtmlTable(columns, tuple(rows), words=("result", "device", "file"))
    return f"<h2>Environment</h2>{panel(table_of(table.without_empty()))}"
