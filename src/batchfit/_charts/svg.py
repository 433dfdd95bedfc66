"""Charts as SVG text, drawn here and not in the reader's browser.

Rules: a chart is a value, and its picture a pure function of it, so one drawing serves the report with
JavaScript on or off, a notebook, a printer and a test. Nothing is shown by colour alone: a series has a shape
or a dash of its own, and what matters is written beside its line. Every text is escaped here, in one place.
There are no style attributes (a page's Content-Security-Policy may forbid them): looks are in `chart.css`.

Why not Plotly: a page with it is 4.8 MB, is empty without JavaScript, and its labels shrink on a phone. Here
a chart is some kilobytes, and a report draws it for a wide and for a narrow page, with letters of one size.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from typing import Literal

from batchfit._charts.scale import Scale, count_text, scale_over, ticks_within

Line = Literal["", "solid", "dashed", "dotted", "stairs", "area"]
_Box = tuple[float, float, float, float]
Shape = Literal["dot", "ring", "cross", "square", "triangle", "diamond", "none"]

_CAPITAL = 10.5  # pixels of a capital letter in bold
LETTER = 7.4  # pixels of a letter of 12 pixels, rather too many than too few
ROW = 15.0
_TOP, _RIGHT, _BOTTOM = 32.0, 14.0, 38.0
# Paths round 0, about as large to the eye as each other.
SHAPES: dict[str, str] = {
    "dot": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0Z",
    "ring": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0Z",
    "cross": "M-4.5-4.5L4.5 4.5M-4.5 4.5L4.5-4.5",
    "square": "M-4.5-4.5H4.5V4.5H-4.5Z",
    "triangle": "M0-5.5L5.2 4H-5.2Z",
    "diamond": "M0-6.5L6.5 0L0 6.5L-6.5 0Z",
    "none": "",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """A point: its tip, what is written beside it, and how sure its height is.

    Of an area, `low` is its floor.
    """

    x: float
    y: float
    tip: str = ""
    shape: Shape = "dot"
    role: str = ""  # a class of the style sheet; the series' where it is empty
    label: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Marks that belong together, and the line through them; one without a name is in no legend."""

    name: str
    marks: tuple[Mark, ...]
    role: str
    line: Line = ""
    named: bool = False  # its name is written at the end of its line


@dataclass(frozen=True, slots=True)
class Rule:
    """A straight line across the chart: a budget, an answer."""

    at: float
    label: str
    axis: Literal["x", "y"] = "y"
    role: str = "budget"


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: `log` is how it begins; a chart whose axis may be `switched` is drawn both ways."""

    name: str
    log: bool = False
    switched: bool = False
    whole: bool = False  # only whole numbers stand at it
    least: float = 0.0  # and none below this


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn; `about` says it in a sentence for those who do not see it."""

    title: str
    about: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()
    zooms: bool = False  # whether a page with scripts lets a stretch of its x axis be looked at

    @property
    def is_switched(self) -> bool:
        """Whether one of its axes can be changed between linear and log."""
        return self.x.switched or self.y.switched

    @property
    def begins_log(self) -> bool:
        """Whether the axis that can be changed is logarithmic at first."""
        return self.x.log if self.x.switched else self.y.log


def chart_css() -> str:
    """The style sheet that charts need, wherever they stand."""
    return (resources.files("batchfit._charts") / "chart.css").read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """Text that is safe in markup and in quoted attributes; what XML has no place for is left out."""
    kept = "".join(c for c in text if c in "\t\n" or (ord(c) >= 32 and not 0xD800 <= ord(c) <= 0xDFFF))
    return html.escape(kept.replace("\x7f", ""), quote=True)


def draw(
    chart: Chart, *, width: int, height: int, log: bool | None = None, name: str = "", tips: bool = True
) -> str:
    """The chart as an `<svg>` element; `log` is for the axis that may be switched, `name` makes ids unique.

    Of several drawings of a chart one needs `tips`: all have the same points in the same order.
    """
    plan = _plan(chart, width, height, chart.begins_log if log is None else log)
    labels = _Labels(plan)
    lines = [_line(plan, number, one) for number, one in enumerate(chart.series)]
    rules = [_rule(plan, one, labels) for one in chart.rules]
    marks = [_marks(plan, number, one, labels, tips=tips) for number, one in enumerate(chart.series)]
    ends = [_end(plan, number, one, labels) for number, one in enumerate(chart.series) if one.named]
    classes = f"bf-chart {'narrow' if width < 500 else 'wide'} {'log' if plan.log else 'linear'}"
    ids = f' aria-labelledby="{name}-t {name}-d"' if name else ""
    drawn = f"{''.join(lines)}{''.join(rules)}{''.join(marks)}{''.join(ends)}"
    if chart.zooms and name:
        ids += f' data-x="{_n(plan.x.begin)} {_n(plan.x.end)} {plan.x.low:g} {plan.x.high:g}"'
        drawn = _movable(plan, drawn, name)
    return (
        f'<svg class="{classes}" viewBox="0 0 {width} {height}" role="group"{ids}>'
        f"<title{_id(name, 't')}>{escaped(chart.title)}</title>"
        f"<desc{_id(name, 'd')}>{escaped(chart.about)}</desc>"
        f"{_axes(plan)}{drawn}</svg>"
    )


def _movable(plan: _ChartPlan, drawn: str, name: str) -> str:
    """What is drawn in a frame of its own, so that a stretch of it can be shown as wide as the whole."""
    wide, high = plan.x.end - plan.x.begin, plan.y.begin
    return (
        f'<clipPath id="{name}-c"><rect x="{_n(plan.x.begin)}" width="{_n(wide + _RIGHT)}" '
        f'height="{_n(high)}"/></clipPath><g clip-path="url(#{name}-c)"><g class="moves">{drawn}</g></g>'
    )


def key(one: Series) -> str:
    """A series' line and shape, small, for a legend."""
    line = f'<path class="line {one.line}" d="M0 7H26"/>' if one.line not in ("", "area") else ""
    if one.line == "area":
        line = '<path class="area" d="M2 2H24V12H2Z"/>'
    shape = one.marks[0].shape if one.marks else "none"
    role = (one.marks[0].role if one.marks else "") or one.role
    mark = (
        f'<path class="mark {shape} {role}" transform="translate(13 7)" d="{SHAPES[shape]}"/>'
        if SHAPES[shape]
        else ""
    )
    size = 'width="26" height="14" viewBox="0 0 26 14"'
    return f'<svg class="bf-key {one.role}" {size} aria-hidden="true">{line}{mark}</svg>'


@dataclass(frozen=True, slots=True)
class _ChartPlan:
    chart: Chart
    x: Scale
    y: Scale
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    width: float
    height: float
    log: bool


def _plan(chart: Chart, width: int, height: int, log: bool) -> _ChartPlan:
    """Scales and ticks: the left margin is as wide as the numbers that stand there."""
    x_log = log if chart.x.switched else chart.x.log
    y_log = log if chart.y.switched else chart.y.log
    marks = [mark for one in chart.series for mark in one.marks]
    heights = [part for m in marks for part in (m.y, m.low, m.high) if part is not None]
    heights += [rule.at for rule in chart.rules if rule.axis == "y"]
    across = [mark.x for mark in marks] + [rule.at for rule in chart.rules if rule.axis == "x"]
    bottom = height - _BOTTOM
    y = scale_over(heights, bottom, _TOP, log=y_log, headroom=0.08)
    y_ticks = _ticks(y, max(2, int((bottom - _TOP) / 38)), chart.y)
    left = max([len(count_text(tick)) for tick in y_ticks], default=1) * LETTER + 10
    x = scale_over(across, left, width - _RIGHT, log=x_log, headroom=0.03)
    widest = len(count_text(round(x.high))) + 2.5
    x_ticks = _ticks(x, min(12, int((width - left) / (widest * LETTER))), chart.x)
    return _ChartPlan(chart, x, y, tuple(x_ticks), tuple(y_ticks), width, height, log)


def _ticks(scale: Scale, most: int, axis: Axis) -> list[float]:
    found = [tick for tick in ticks_within(scale, most) if tick >= axis.least]
    return [tick for tick in found if tick == int(tick)] if axis.whole else found


def _axes(plan: _ChartPlan) -> str:
    """Grid, numbers and the names of both axes."""
    left, right, bottom = plan.x.begin, plan.x.end, plan.y.begin
    ups = [(plan.y.place(tick), count_text(tick)) for tick in plan.y_ticks]
    alongs = [(plan.x.place(tick), count_text(tick)) for tick in plan.x_ticks]
    grid = "".join(f"M{_n(left)} {_n(at)}H{_n(right)}" for at, _ in ups)
    axis = f"M{_n(left)} {_n(bottom)}H{_n(right)}" + "".join(f"M{_n(at)} {_n(bottom)}v4" for at, _ in alongs)
    at_left = "".join(f'<text x="{_n(left - 6)}" y="{_n(at + 4)}">{text}</text>' for at, text in ups)
    below = "".join(f'<text x="{_n(at)}" y="{_n(bottom + 16)}">{text}</text>' for at, text in alongs)
    return (
        f'<path class="grid" d="{grid}"/><path class="axis" d="{axis}"/>'
        f'<g class="dim end">{at_left}</g><g class="dim mid">{below}</g>'
        f'<text x="2" y="12" class="name">{escaped(plan.chart.y.name)}</text>'
        f'<text x="{_n(right)}" y="{_n(plan.height - 5)}" class="end name">'
        f"{escaped(plan.chart.x.name)}</text>"
    )


def _line(plan: _ChartPlan, number: int, one: Series) -> str:
    if not one.line or not one.marks:
        return ""
    places = [(plan.x.place(mark.x), plan.y.place(mark.y)) for mark in one.marks]
    if one.line == "area":
        floors = [plan.y.place(mark.low or 0.0) for mark in one.marks]
        path = (
            _stairs(places) + "L" + _stairs(list(zip((x for x, _ in places), floors, strict=True)), back=True)
        )
        return f'<g data-series="{number}" class="{one.role}"><path class="area" d="{path}Z"/></g>'
    path = _stairs(places) if one.line == "stairs" else "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)
    return f'<g data-series="{number}" class="{one.role}"><path class="line {one.line}" d="{path}"/></g>'


def _stairs(places: Sequence[tuple[float, float]], *, back: bool = False) -> str:
    """A path that holds each height until the next place; `back` runs from right to left, without the M."""
    places = [(round(x), round(y)) for x, y in places]  # straight lines are sharp on whole pixels
    if not back:
        parts = [f"M{_n(places[0][0])} {_n(places[0][1])}"]
        before = places[0][1]
        for x, y in places[1:]:
            if _n(y) != _n(before):
                parts.append(f"H{_n(x)}V{_n(y)}")
                before = y
        return "".join([*parts, f"H{_n(places[-1][0])}"])
    parts = [f"{_n(places[-1][0])} {_n(places[-1][1])}"]
    for (x, _), (_, earlier) in zip(reversed(places), list(reversed(places))[1:], strict=False):
        if f"V{_n(earlier)}" != parts[-1][-len(f"V{_n(earlier)}") :]:
            parts.append(f"H{_n(x)}V{_n(earlier)}")
    return "".join([*parts, f"H{_n(places[0][0])}"])


def _marks(plan: _ChartPlan, number: int, one: Series, labels: _Labels, *, tips: bool) -> str:
    """Points, each with its tip; one without a shape is there for the pointer only."""
    parts = []
    for mark in one.marks:
        x, y = plan.x.place(mark.x), plan.y.place(mark.y)
        if mark.shape == "none" or one.line == "area":
            if mark.tip:
                title = f"<title>{escaped(mark.tip)}</title>" if tips else ""
                parts.append(f'<circle class="pt" cx="{_n(x)}" cy="{_n(y)}" r="2">{title}</circle>')
            continue
        bar = ""
        if mark.low is not None and mark.high is not None:
            high, low = plan.y.place(mark.high) - y, plan.y.place(mark.low) - y
            bar = f'<path class="bar" d="M0 {_n(high)}V{_n(low)}M-4 {_n(high)}h8M-4 {_n(low)}h8"/>'
        tip = f"<title>{escaped(mark.tip)}</title>" if tips else ""
        text = labels.beside((x, y), text=mark.label) if mark.label else ""
        parts.append(
            f'<g class="pt {mark.role or one.role}" tabindex="0" role="img" '
            f'transform="translate({_n(x)} {_n(y)})">{tip}{bar}'
            f'<path class="mark {mark.shape}" d="{SHAPES[mark.shape]}"/></g>{text}'
        )
    return f'<g data-series="{number}" class="{one.role}">{"".join(parts)}</g>' if parts else ""


def _rule(plan: _ChartPlan, one: Rule, labels: _Labels) -> str:
    left, right, bottom = plan.x.begin, plan.x.end, plan.y.begin
    if one.axis == "y":
        at = plan.y.place(one.at)
        text = labels.along(at, one.label)
        return f'<g class="rule {one.role}"><path d="M{_n(left)} {_n(at)}H{_n(right)}"/>{text}</g>'
    at = plan.x.place(one.at)
    text = labels.beside((at, _TOP + 4), text=one.label)
    return f'<g class="rule {one.role}"><path d="M{_n(at)} {_n(_TOP)}V{_n(bottom)}"/>{text}</g>'


def _end(plan: _ChartPlan, number: int, one: Series, labels: _Labels) -> str:
    """A series' name at the end of its line, or beside it where there is room."""
    if not one.marks:
        return ""
    if one.line == "area":
        text = labels.inside(one)
    else:
        places = [(plan.x.place(mark.x), plan.y.place(mark.y)) for mark in reversed(one.marks)]
        text = labels.beside(*places, text=one.name)
    return f'<g data-series="{number}" class="{one.role}">{text}</g>' if text else ""


@dataclass(slots=True)
class _Labels:
    """Finds places for words: inside the chart, on no other word, mark or level; on no curve if it can be."""

    plan: _ChartPlan
    taken: list[_Box] = field(default_factory=list)
    curves: list[_Box] = field(default_factory=list)

    def __post_init__(self) -> None:
        for one in self.plan.chart.series:
            for mark in one.marks:
                if mark.shape != "none":
                    x, y = self.plan.x.place(mark.x), self.plan.y.place(mark.y)
                    above = self.plan.y.place(mark.high) if mark.high is not None else y
                    below = self.plan.y.place(mark.low) if mark.low is not None else y
                    self.taken.append((x - 6, min(above, y - 6), x + 6, max(below, y + 6)))
            if one.line in ("solid", "dashed", "dotted"):
                self.curves += _along(self.plan, one)
        for rule in self.plan.chart.rules:
            if rule.axis == "y":
                y = self.plan.y.place(rule.at)
                self.taken.append((self.plan.x.begin, y - 1, self.plan.x.end, y + 1))

    def beside(self, *points: tuple[float, float], text: str) -> str:
        """Words about one of some points, the first if it can be; none where there is no room for them."""
        wide = sum(_CAPITAL if letter.isupper() else LETTER for letter in text)
        spots = []
        for x, y in points:
            spots += [(x - wide - 9, y - 5), (x + 9, y - 5), (x + 9, y + 13), (x - wide - 9, y + 13)]
            spots += [(x - wide / 2, y - 10), (x - wide / 2, y + 22), (x - wide - 9, y + 28), (x + 9, y + 28)]
        return self._first(spots, text, wide)

    def inside(self, one: Series) -> str:
        """An area's name where it is thickest, if it is thick enough there and on either side."""
        wide = len(one.name) * LETTER
        spots = []
        for mark in one.marks:
            x, top, floor = (
                self.plan.x.place(mark.x),
                self.plan.y.place(mark.y),
                self.plan.y.place(mark.low or 0),
            )
            spots.append((floor - top, x, top, floor))
        begins, ends = min(spot[1] for spot in spots) + wide / 2, max(spot[1] for spot in spots) - wide / 2
        spots = [
            (thick, min(max(x, begins), max(begins, ends)), top, floor) for thick, x, top, floor in spots
        ]
        for thick, x, top, floor in sorted(spots, reverse=True)[:8]:
            near = [spot for spot in spots if abs(spot[1] - x) <= wide / 2]
            top, floor = max(spot[2] for spot in near), min(spot[3] for spot in near)
            if thick >= ROW and floor - top >= ROW:
                found = self._first([(x - wide / 2, (top + floor) / 2 + 4)], one.name, wide, within=True)
                if found:
                    return found
        return ""

    def along(self, y: float, text: str) -> str:
        """Words about a level: over or under its line, at the left or at the right."""
        wide = len(text) * LETTER
        left, right = self.plan.x.begin + 6, self.plan.x.end - wide - 2
        across = [left, right, *(left + (right - left) * share for share in (0.5, 0.25, 0.75))]
        return self._first([(x, y + lift) for lift in (-5, 14) for x in across], text, wide)

    def _first(
        self, spots: Sequence[tuple[float, float]], text: str, wide: float, *, within: bool = False
    ) -> str:
        free = [spot for spot in spots if self._is_free(_box(*spot, wide), self.taken)]
        best = [spot for spot in free if self._is_free(_box(*spot, wide), self.curves)]
        if not free:
            return ""
        x, y = (best or free)[0]
        self.taken.append(_box(x, y, wide))
        where = "told in" if within else "told"
        return f'<text x="{_n(x)}" y="{_n(y)}" class="{where}">{escaped(text)}</text>'

    def _is_free(self, box: _Box, others: Sequence[_Box]) -> bool:
        across = box[0] >= self.plan.x.begin and box[2] <= self.plan.width
        up = box[1] >= 15 and box[3] <= self.plan.y.begin
        return across and up and not any(_meet(box, other) for other in others)


def _box(x: float, y: float, wide: float) -> _Box:
    """What a word takes whose line of writing begins there."""
    return (x, y - 11, x + wide, y + 3)


def _along(plan: _ChartPlan, one: Series) -> list[_Box]:
    """Small boxes along a curve."""
    places = [(plan.x.place(mark.x), plan.y.place(mark.y)) for mark in one.marks]
    found = []
    for (x0, y0), (x1, y1) in pairwise(places):
        count = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 10))
        for n in range(count + 1):
            x, y = x0 + (x1 - x0) * n / count, y0 + (y1 - y0) * n / count
            found.append((x - 2, y - 2, x + 2, y + 2))
    return found


def _meet(one: _Box, two: _Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def _n(value: float) -> str:
    """A pixel with one decimal at most."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _id(name: str, part: str) -> str:
    return f' id="{name}-{part}"' if name else ""
