"""Charts made of characters, for a terminal: bars, columns, and curves under horizontal lines.

Rules: a picture is a list of lines, and a line is a list of parts (text, role). A role is a word such as
"strong", "dim" or a kind of memory; whoever prints decides which colour that is, or none. A picture never is
wider than it was asked to be. With `plain=True` it needs no more than ASCII.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[str, str]
Line = list[Span]

_EIGHTHS = " ▏▎▍▌▋▊▉█"
# The dot of a braille cell by (column, row from the top), as Unicode numbers them.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800


def as_text(lines: Iterable[Line]) -> str:
    """The lines without their roles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def bar(share: float, width: int, *, plain: bool = False) -> str:
    """A bar of at most `width` characters; what is not nothing is at least a sliver."""
    share = min(max(share, 0.0), 1.0)
    if plain:
        return "#" * max(round(share * width), 1 if share > 0 else 0)
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    full, part = divmod(eighths, 8)
    return "█" * full + (_EIGHTHS[part] if part else "")


def shortened(text: str, width: int, *, plain: bool = False) -> str:
    """The text in at most `width` characters. Paths differ at their ends: the beginning is left out."""
    if len(text) <= width:
        return text
    dots = ".." if plain else "…"
    return (dots + text[len(text) - max(width - len(dots), 0) :])[:width]


def ticks(top: float, most: int) -> list[float]:
    """Round numbers from 0 to `top`: 1, 2, 2.5 or 5 times a power of ten apart, at most `most` of them."""
    if top <= 0 or most < 2:
        return [0.0]
    least = top / (most - 1)
    power = 10.0 ** math.floor(math.log10(least))
    apart = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= least * (1 - 1e-9))
    return [apart * number for number in range(int(top / apart + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line, what is written at its end, and the point of a curve that belongs to it."""

    height: float
    label: str
    mark: tuple[float, float] | None = None


def curves(
    lines: Sequence[Sequence[tuple[float, float]]],
    levels: Sequence[Level],
    *,
    width: int,
    height: int,
    x_name: str,
    y_name: str,
    plain: bool = False,
) -> list[Line]:
    """Curves over 0 to their largest x, with levels across; the axes have round numbers."""
    right = max((point[0] for line in lines for point in line), default=1.0)
    heights = [point[1] for line in lines for point in line] + [level.height for level in levels]
    top = max(heights, default=1.0) * 1.04
    y_ticks = ticks(top, max(2, height // 2))
    margin = max(len(f"{tick:g}") for tick in y_ticks) + 2
    labels = _labels(levels, top, height)
    room = width - margin - max((len(text) + 1 for text in labels.values()), default=0)
    if room < 10:  # no room for words at the lines' ends
        labels, room = {}, max(width - margin, 4)
    grid = _grid(lines, right, top, room, height, plain=plain)
    drawn: list[Line] = [[(f"{y_name:>{margin}}", "dim")]]
    named = {_row(tick, top, height): f"{tick:g}" for tick in y_ticks}
    dashed = {_row(level.height, top, height) for level in levels}
    marks = {
        (_row(level.mark[1], top, height), min(int(level.mark[0] / right * room), room - 1))
        for level in levels
        if level.mark is not None
    }
    axis = ("|", "+") if plain else ("│", "┤")
    for row in range(height):
        line: Line = [
            (f"{named.get(row, ''):>{margin - 1}}{axis[row in named]}", "dim"),
            *_joined(_cell(grid, row, at, marks, row in dashed, plain=plain) for at in range(room)),
        ]
        if row in labels:
            line.append((" " + labels[row], "level"))
        drawn.append(line)
    return [*drawn, *_bottom(right, room, margin, x_name, width=width, plain=plain)]


def _labels(levels: Sequence[Level], top: float, height: int) -> dict[int, str]:
    """What is written at the end of each row; levels that share a row share its end."""
    found: dict[int, str] = {}
    for level in levels:
        row = _row(level.height, top, height)
        found[row] = f"{found[row]}, {level.label}" if row in found else level.label
    return found


def _row(value: float, top: float, height: int) -> int:
    return height - 1 - min(int(value / top * height), height - 1)


def _grid(
    lines: Sequence[Sequence[tuple[float, float]]],
    right: float,
    top: float,
    width: int,
    height: int,
    *,
    plain: bool,
) -> list[list[int]]:
    """The dots of the curves: braille numbers, or 1 where a curve goes through."""
    across, down = (1, 1) if plain else (2, 4)
    grid = [[0] * width for _ in range(height)]
    for points in lines:
        before: int | None = None
        for column in range(width * across):
            value = _height_at(points, (column + 0.5) / (width * across) * right)
            if value is None:
                before = None
                continue
            dot = height * down - 1 - min(int(value / top * height * down), height * down - 1)
            # A steep curve is drawn as a stroke, without gaps.
            stroke = range(min(dot, dot if before is None else before + 1), dot + 1)
            if before is not None and before > dot:
                stroke = range(dot, before)
            for one in stroke:
                bit = 1 if plain else _DOTS[column % 2][one % 4]
                grid[one // down][column // across] |= bit
            before = dot
    return grid


def _height_at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """A curve's height between its points; None beside them."""
    if not points or x > points[-1][0]:
        return None
    at = bisect_left([point[0] for point in points], x)
    if at == 0:
        return points[0][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _cell(
    grid: list[list[int]], row: int, at: int, marks: set[tuple[int, int]], dashed: bool, *, plain: bool
) -> Span:
    if (row, at) in marks:
        return ("O" if plain else "●", "good")
    if grid[row][at]:
        return ("*" if plain else chr(_BRAILLE + grid[row][at]), "curve")
    return ("-" if plain else "┄", "level") if dashed else (" ", "")


def _joined(cells: Iterable[Span]) -> Line:
    """Neighbours of one role as one text."""
    line: Line = []
    for text, role in cells:
        if line and line[-1][1] == role:
            line[-1] = (line[-1][0] + text, role)
        else:
            line.append((text, role))
    return line


def short_count(value: float) -> str:
    """`500`, `65.5k`, `5M`: a number at an axis."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    return f"{value:g}"


def _bottom(right: float, room: int, margin: int, name: str, *, width: int, plain: bool) -> list[Line]:
    """The x axis, its numbers and its name."""
    rule, corner, tick = ("-", "+", "+") if plain else ("─", "└", "┬")
    axis, numbers = [rule] * room, [" "] * (room + margin)
    end = -1
    for value in ticks(right, max(2, room // 12)):
        at = min(int(value / right * room), room - 1)
        text = short_count(value)
        begin = max(margin + at - len(text) // 2, 0)
        if begin <= end or begin + len(text) > len(numbers):
            continue
        axis[at] = tick
        numbers[begin : begin + len(text)] = text
        end = begin + len(text)
    line = "".join(numbers).rstrip()
    first: Line = [(" " * (margin - 1) + corner + "".join(axis), "dim")]
    if len(line) + 2 + len(name) <= width:
        return [first, [(f"{line}  {name}", "dim")]]
    return [first, [(line, "dim")], [(f"{name:>{width}}"[-width:], "dim")]]
