"""The answer of `profile` on one terminal screen: throughput by batch size, and the bottleneck.

Rules: the answer first (which size, why), then the table of what was measured, then what holds throughput
back, each with its figures and what to change. It fits in 80 columns. Columns that have nothing to say are
left out. Nothing is printed here: lines go to `print` without roles, and to a terminal with them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from batchfit._charts.memory_page import WIDTH, fact
from batchfit._charts.text_charts import Level, Line, curves
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import ThroughputPoint, ThroughputProfile

_HEIGHT = 11


def throughput_lines(
    profile: ThroughputProfile, *, width: int = WIDTH, plain: bool = False, picture: bool = False
) -> list[Line]:
    """A profile as lines of at most `width` characters (60 at least, and the columns of the table)."""
    width = max(width, 60)
    sure = " (low confidence)" if profile.doubt else ""
    lines: list[Line] = [
        [(f"batch size {profile.recommended} is recommended{sure}", "strong")],
        *fact("because", profile.reason, width),
        *(fact("doubt", profile.doubt, width) if profile.doubt else ()),
        *fact("device", device_label(profile), width),
        [],
        *_table(profile, width),
    ]
    if picture and len(profile.points) > 1:
        lines += [[], *throughput_picture(profile, width=width, plain=plain)]
    found: list[Line] = []
    for one in profile.diagnosis:
        found += fact(one.kind, one.evidence, width, room=15)
        found += fact("", f"-> {one.advice}", width, room=15)
    if found:
        lines += [[], *found]
    if profile.accumulation is not None:
        lines += [[], *fact("accumulation", profile.accumulation.advice, width, room=15)]
    for note in profile.notes:
        lines += fact("note", note, width, room=15)
    return lines


def device_label(profile: ThroughputProfile) -> str:
    """`cuda:0 (NVIDIA H200), 139 GiB`; on several ranks their number."""
    model = f" ({profile.device_model})" if profile.device_model else ""
    ranks = f", {profile.world_size} ranks" if profile.world_size > 1 else ""
    return f"{profile.device}{model}, {format_bytes(profile.budget_bytes)}{ranks}"


def throughput_picture(
    profile: ThroughputProfile, *, width: int, height: int = _HEIGHT, plain: bool = False
) -> list[Line]:
    """Samples per second against the size, the recommended one marked."""
    points = [(float(point.size), point.samples_per_s) for point in profile.points]
    chosen = profile.at(profile.recommended)
    level = Level(
        profile.best.samples_per_s * (1 - profile.within),
        f"{1 - profile.within:.0%} of best",
        mark=(float(chosen.size), chosen.samples_per_s),
    )
    return curves(
        [points], [level], width=width, height=height, x_name="batch size", y_name="samples/s", plain=plain
    )


def format_seconds(seconds: float) -> str:
    """`1.24 s`, `35.2 ms`, `80.1 us`: three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError("unreachable")


def format_rate(rate: float) -> str:
    """`812`, `14.2k`, `3.1M`, `412T`: three digits."""
    for suffix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= scale * 0.9995:
            return f"{_three(rate / scale)}{suffix}"
    return _three(rate)


def _three(value: float) -> str:
    """Three digits, never with an exponent."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


# The columns of `point_cells`, and those that a narrow terminal can do without, the first first.
POINT_COLUMNS = ("time/step", "+-", "samples/s", "tokens/s", "gain", "peak", "FLOP/s", "of peak")
_DISPENSABLE = ("of peak", "FLOP/s", "tokens/s")


def point_cells(point: ThroughputPoint, *, unsteady: str, sizes: Collection[int]) -> tuple[str, ...]:
    """What a table says of a point besides its size; `-` where there is no reading.

    `sizes` were timed: a gain over half the size that was not is interpolated, and marked.
    """
    gain = "x{:.2f}" if point.size % 2 == 0 and point.size // 2 in sizes else "~x{:.2f}"

    def cell(value: float | None, shown: Callable[[float], str]) -> str:
        return "-" if value is None else shown(value)

    return (
        format_seconds(point.step_s),
        f"{point.spread:.1%}{'' if point.steady else unsteady}",
        format_rate(point.samples_per_s),
        cell(point.tokens_per_s, format_rate),
        cell(point.gain, gain.format),
        "-" if point.peak_bytes is None else format_bytes(point.peak_bytes),
        cell(point.flops_per_s, format_rate),
        cell(point.flops_share, "{:.0%}".format),
    )


def _table(profile: ThroughputProfile, width: int) -> list[Line]:
    sizes = {point.size for point in profile.points}
    rows = [
        {
            "": ">" if point.size == profile.recommended else "",
            "size": str(point.size),
            **dict(zip(POINT_COLUMNS, point_cells(point, unsteady="?", sizes=sizes), strict=True)),
        }
        for point in profile.points
    ]
    widths = {
        name: max([len(name), *(len(row[name]) for row in rows)])
        for name in ("", "size", *POINT_COLUMNS)
        if name not in _DISPENSABLE or any(row[name] != "-" for row in rows)
    }
    for name in _DISPENSABLE:
        if name in widths and sum(widths.values()) + len(widths) - 1 > width:
            del widths[name]
    gap = 2 if sum(widths.values()) + 2 * len(widths) <= width else 1

    def line(cells: Mapping[str, str]) -> str:
        return (" " * gap).join(cells[name].rjust(size) for name, size in widths.items())

    drawn: list[Line] = [[(line({name: name for name in widths}), "head")]]
    drawn += [[(line(row), "strong" if row[""] else "")] for row in rows]
    drawn += [
        [(f"{' ' * (widths[''] + gap)}{size:>{widths['size']}}{' ' * gap}ran out of memory", "dim")]
        for size in profile.too_large
    ]
    return drawn
