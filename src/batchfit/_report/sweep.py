"""What the report says about a sweep: sizes, throughput and measures over the knobs, and every configuration.

Rules: a chart is drawn over a knob that is a number and has several values; the other knobs make the series,
or, where these would be too many to distinguish, single marks. What failed is named, and is in no chart. Two
knobs also make a table whose shades say what its numbers say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from batchfit._charts.scale import real
from batchfit._charts.svg import Axis, Chart, Line, Mark, Series, Shape, escaped
from batchfit._charts.throughput_page import format_rate
from batchfit._knobs import key_of, label, short
from batchfit._report.markup import Fact, HtmlTable, figure, panel, table_of
from batchfit._units import format_bytes
from batchfit.results import SweepRecord, SweepResult

_MOST_SERIES = 6
_MOST_CHARTS = 8
_MOST_CELLS = 24  # a side of the table of two knobs
_MOST_MARKS = 600  # in one chart: more are one blot
_LOOKS: tuple[tuple[Shape, Line], ...] = (
    ("dot", "solid"),
    ("square", "dashed"),
    ("triangle", "dotted"),
    ("diamond", "solid"),
    ("ring", "dashed"),
    ("cross", "dotted"),
)
_LOG_FROM = 16  # times the smallest value: from there on a linear axis crowds the small ones
_SHADES = 5

Value = Callable[[SweepRecord], Any]


def sweep_sections(name: str, sweep: SweepResult, number: int) -> Iterator[str]:
    """Charts over the knobs, the table of two knobs, and all configurations."""
    yield f"<h2>{escaped(name)}Sweep</h2>"
    if not sweep.complete:
        left = sweep.planned - len(sweep.records)
        yield f'<p class="warn">{left:,} of {sweep.planned:,} configurations are still to be run.</p>'
    if sweep.failed:
        yield f'<p class="warn">{len(sweep.failed):,} failed; the table below says why.</p>'
    for count, (chart, table) in enumerate(_figures(sweep)):
        yield figure(chart, table, name=f"sweep-{number}-{count}")
    yield _heat(sweep)
    yield panel("<h3>All configurations</h3>", table_of(_everything(sweep)))
    if sweep.skipped:
        items = "".join(
            f"<li>{escaped(label(one.knobs))}: {escaped(one.reason)}</li>" for one in sweep.skipped[:20]
        )
        more = f"<li>and {len(sweep.skipped) - 20:,} more</li>" if len(sweep.skipped) > 20 else ""
        yield panel(f'<h3>Skipped</h3><ul class="list">{items}{more}</ul>')


def sweep_charts(sweep: SweepResult) -> list[Chart]:
    """The charts alone."""
    return [chart for chart, _ in _figures(sweep)]


def sweep_clause(sweep: SweepResult) -> str:
    """The sweep in a sentence's part."""
    sizes = _sizes(sweep)
    done = f"{len(sweep.records):,} of {sweep.planned:,} configurations"
    if not sizes:
        return f"{done} were run, and none has a batch size"
    failed = f", {len(sweep.failed):,} failed" if sweep.failed else ""
    if min(sizes) == max(sizes):
        return f"{done} were run{failed}: batch size {max(sizes):,} in all of them"
    low, high = (
        next(one for one in sweep.records if one.batch_size_used == edge(sizes)) for edge in (min, max)
    )
    return (
        f"batch sizes go from {min(sizes):,} ({low.label}) to {max(sizes):,} ({high.label}) in {done}{failed}"
    )


def sweep_facts(sweep: SweepResult) -> list[Fact]:
    """The figures at the top."""
    failed = f"{len(sweep.failed):,} failed" if sweep.failed else "none failed"
    found = [Fact("configurations", f"{len(sweep.records):,}", f"of {sweep.planned:,}, {failed}")]
    sizes = _sizes(sweep)
    if sizes:
        trials = sum(len(one.trials) for one in sweep.records)
        ran_out = sum(one.ooms for one in sweep.records)
        found.append(Fact("batch sizes", f"{min(sizes):,} to {max(sizes):,}"))
        found.append(
            Fact("trials", f"{trials:,}", f"{ran_out:,} out of memory, {sweep.elapsed_s:.1f} s in all")
        )
    fast = [one for one in sweep.records if _number(one.samples_per_s) is not None]
    if fast:
        best = max(fast, key=lambda one: one.samples_per_s or 0.0)
        found.append(Fact("best throughput", f"{format_rate(best.samples_per_s or 0.0)}/s", best.label))
    return found


def _sizes(sweep: SweepResult) -> list[int]:
    return [one.batch_size_used for one in sweep.records if one.batch_size_used is not None]


def _number(value: object) -> float | None:
    """A number that can be drawn: charts begin at 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return real(value) if not math.isnan(value) and value >= 0 else None


def _numeric_knobs(sweep: SweepResult) -> list[str]:
    """Knobs that are numbers and have several values, the one with the most first."""
    found: dict[str, int] = {}
    for name in _knobs(sweep):
        values = [one.knobs.get(name) for one in sweep.records]
        if all(_number(value) is not None for value in values) and len(set(values)) > 1:
            found[name] = len(set(values))
    return sorted(found, key=lambda name: -found[name])


def _knobs(sweep: SweepResult) -> list[str]:
    return list(dict.fromkeys(name for one in sweep.records for name in one.knobs))


def _figures(sweep: SweepResult) -> list[tuple[Chart, HtmlTable]]:
    """Sizes over each knob; throughput and measures over the one with the most values."""
    knobs = _numeric_knobs(sweep)
    wanted: list[tuple[str, str, Value]] = [
        ("batch size", knob, lambda one: one.batch_size_used) for knob in knobs
    ]
    if knobs:
        wanted.append(("samples/s", knobs[0], lambda one: one.samples_per_s))
        measures = dict.fromkeys(name for one in sweep.records for name in one.measures)
        wanted += [(name, knobs[0], _measure(name)) for name in measures]
    found: list[tuple[Chart, HtmlTable]] = []
    for name, knob, value in wanted:
        records = [one for one in sweep.records if _number(value(one)) is not None][:_MOST_MARKS]
        if len({one.knobs[knob] for one in records}) > 1 and len(found) < _MOST_CHARTS:
            # A series looks the same in every chart over a knob, whatever is missing in one of them.
            order = list(dict.fromkeys(_others(one.knobs, knob) for one in sweep.records))
            found.append((_chart(name, knob, value, records, order), _table(name, value, records)))
    return found


def _measure(name: str) -> Value:
    return lambda one: one.measures.get(name)


def _chart(name: str, knob: str, value: Value, records: Sequence[SweepRecord], order: Sequence[str]) -> Chart:
    groups: dict[str, list[SweepRecord]] = {group: [] for group in order}
    for one in records:
        groups[_others(one.knobs, knob)].append(one)

    def marks(some: Sequence[SweepRecord], shape: Shape) -> tuple[Mark, ...]:
        ordered = sorted(some, key=lambda one: _number(one.knobs[knob]) or 0.0)
        return tuple(
            Mark(
                _number(one.knobs[knob]) or 0.0,
                _number(value(one)) or 0.0,
                f"{one.label}: {name} {_said(value(one))}",
                shape,
            )
            for one in ordered
        )

    if len(groups) > _MOST_SERIES:
        series: tuple[Series, ...] = (Series("", marks(records, "dot"), "c0"),)
    else:
        series = tuple(
            Series(group, marks(some, look[0]), f"c{n}", line=look[1], named=bool(group))
            for n, ((group, some), look) in enumerate(zip(groups.items(), _LOOKS, strict=False))
            if some
        )
    across = [_number(one.knobs[knob]) or 0.0 for one in records]
    wide = min(across) > 0 and max(across) >= _LOG_FROM * min(across)
    whole = all(value == int(value) for value in across)
    title = f"{name[:1].upper()}{name[1:]} over {knob}"
    about = f"{title}: {len(records)} configurations."
    return Chart(title, about, Axis(knob, log=wide, whole=whole), Axis(name), series)


def _others(knobs: Mapping[str, Any], knob: str) -> str:
    return label({name: value for name, value in knobs.items() if name != knob}) if len(knobs) > 1 else ""


def _said(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else short(value)


def _table(name: str, value: Value, records: Sequence[SweepRecord]) -> HtmlTable:
    knobs = list(dict.fromkeys(knob for one in records for knob in one.knobs))
    rows = ((*(_said(one.knobs.get(knob)) for knob in knobs), _said(value(one))) for one in records)
    return HtmlTable((*knobs, name), tuple(rows))


def _heat(sweep: SweepResult) -> str:
    """Sizes by two knobs: a table with shades; empty where there are not just two, or too many values."""
    knobs = _knobs(sweep)
    if len(knobs) != 2:
        return ""
    down, across = (
        list({key_of({"": one.knobs.get(name)}): one.knobs.get(name) for one in sweep.records}.values())
        for name in knobs
    )
    if not (1 < len(down) <= _MOST_CELLS and 1 < len(across) <= _MOST_CELLS):
        return ""
    found = {one.key: one for one in sweep.records}
    most = max(_sizes(sweep), default=1)
    body = ""
    for first in down:
        cells = ""
        for second in across:
            record = found.get(key_of({knobs[0]: first, knobs[1]: second}))
            size = None if record is None else record.batch_size_used
            shade = "" if size is None else f' class="shade-{_shade(size, most)}"'
            text = "failed" if record is not None and size is None else _said(size)
            cells += f"<td{shade}>{escaped(text)}</td>"
        body += f'<tr><th scope="row">{escaped(_said(first))}</th>{cells}</tr>'
    corner = escaped(f"{knobs[0]} \\ {knobs[1]}")
    head = "".join(f'<th scope="col">{escaped(_said(one))}</th>' for one in across)
    return panel(
        "<h3>Batch size by both knobs</h3>",
        f'<div class="scroll"><table class="heat"><thead><tr><th scope="col">{corner}</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>",
    )


def _shade(size: int, most: int) -> int:
    return min(_SHADES - 1, size * _SHADES // max(most, 1))


def _everything(sweep: SweepResult) -> HtmlTable:
    """All configurations; columns in which nothing stands are left out."""
    knobs = _knobs(sweep)
    measures = list(dict.fromkeys(name for one in sweep.records for name in one.measures))
    columns = (*knobs, "batch size", *measures, "samples/s", "peak", "trials", "took", "notes")
    rows = []
    for one in sweep.records:
        rate, peak = one.samples_per_s, one.peak_bytes
        rows.append(
            (
                *(_said(one.knobs.get(name)) for name in knobs),
                _said(one.batch_size_used),
                *(_said(one.measures.get(name)) for name in measures),
                "-" if rate is None else format_rate(rate),
                "-" if peak is None else format_bytes(peak),
                str(len(one.trials)),
                f"{one.elapsed_s:.1f} s",
                one.note or "-",
            )
        )
    return HtmlTable(columns, tuple(rows), words=("notes",)).without_empty(*knobs)
