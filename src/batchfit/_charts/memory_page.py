"""The memory breakdown of `explain` on one terminal screen.

Rules: the answer first (how much, when, where), then who holds it (kinds, modules, source lines), then what
would change it, best first. It fits in 80 columns and about 30 lines, uses more width where there is some,
and can do with 60. Nothing is printed here: lines go to `print` without roles, and to a terminal with them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchfit._charts.text_charts import Line, bar, shortened
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import Holder, MemoryExplanation, WhatIf

WIDTH = 80
# "train.py:41 forward": the function is the first thing to go where there is no room.
_LINE = re.compile(r"^(\S+:\d+) .*")
_SIDE_BY_SIDE = 70  # columns, below which two lists have no room beside each other
_TOP = 5  # modules, lines and changes that are shown
_WORTH = 1.005  # a change that brings less than half a percent shares one line with the others


def memory_lines(explanation: MemoryExplanation, *, width: int = WIDTH, plain: bool = False) -> list[Line]:
    """An explanation as lines of at most `width` characters (60 at least)."""
    width = max(width, 60)
    return [
        *_head(explanation, width),
        [],
        *kind_bars(explanation.kinds, width, plain=plain),
        [],
        *two_rankings(explanation.modules, explanation.lines, width, plain=plain),
        *_changes(explanation, width, plain=plain),
        *_caveats(explanation.unseen, width),
    ]


def operation_name(operation: str) -> str:
    """`aten.mm` of `aten.mm.default`: the overload says nothing to people."""
    return operation.removesuffix(".default")


def fact(label: str, text: str, width: int, *, room: int = 11) -> list[Line]:
    """`label  text`, over as many lines as it needs."""
    parts = textwrap.wrap(text, width - room - 2, break_on_hyphens=False) or [""]
    return [[(f"  {label if n == 0 else '':<{room}}", "dim"), (part, "")] for n, part in enumerate(parts)]


def _head(explanation: MemoryExplanation, width: int) -> list[Line]:
    at = f" at {explanation.peak_source}" if explanation.peak_source else ""
    doing = f", {operation_name(explanation.peak_operation)}" if explanation.peak_operation else ""
    cached = explanation.reserved_bytes if explanation.reserved_bytes > explanation.peak_bytes else 0
    kept = f"{format_bytes(cached)} with what the allocator caches" if cached else ""
    if kept and explanation.budget_bytes is not None:
        kept += f", {cached / explanation.budget_bytes:.0%} of the budget"
    return [
        *([(part, "strong")] for part in textwrap.wrap(headline(explanation), width)),
        *fact("peak", f"in {explanation.peak_phase}{doing}{at}", width),
        *(fact("reserved", kept, width) if kept else []),
        *fact("traced", f"for {explanation.card}, {explanation.based_on}", width),
    ]


def headline(explanation: MemoryExplanation) -> str:
    """`batch size 32 needs 61.2 GiB of 78.6 GiB; the largest batch is 41`."""
    text = f"batch size {explanation.batch_size} needs {format_bytes(explanation.peak_bytes)}"
    if explanation.budget_bytes is not None:
        text += f" of {format_bytes(explanation.budget_bytes)}"
    if explanation.largest is None:
        return text
    return text + (
        f"; the largest batch is {explanation.largest}" if explanation.largest else "; no batch fits"
    )


def kind_bars(kinds: Sequence[Holder], width: int, *, plain: bool) -> list[Line]:
    """A bar for each kind of memory, with its bytes and its share."""
    longest = max((one.share for one in kinds), default=1.0) or 1.0
    names = max((len(one.name) for one in kinds), default=0)
    room = min(width - names - 22, 60)
    return [
        [
            (f"  {one.name:<{names}} ", ""),
            (f"{bar(one.share / longest, room, plain=plain):<{room}}", one.name),
            (f" {format_bytes(one.peak_bytes):>9}", "strong"),
            (f" {one.share:>6.1%}", "dim"),
        ]
        for one in kinds
    ]


def two_rankings(
    modules: Sequence[Holder], sources: Sequence[Holder], width: int, *, plain: bool
) -> list[Line]:
    """Modules and source lines, side by side; one above the other where that is too narrow."""
    if width < _SIDE_BY_SIDE:
        one_column = [
            *_ranking("modules", modules, width - 2, plain=plain),
            *_ranking("source lines", sources, width - 2, plain=plain),
        ]
        return [[("  ", ""), *line] for line in one_column]
    side = (width - 4) // 2
    left = _ranking("modules", modules, side, plain=plain)
    right = _ranking("source lines", sources, side, plain=plain)
    left += [[(" " * side, "")]] * (len(right) - len(left))
    right += [[]] * (len(left) - len(right))
    return [[("  ", ""), *one, ("  ", ""), *two] for one, two in zip(left, right, strict=True)]


def _ranking(title: str, holders: Sequence[Holder], width: int, *, plain: bool) -> list[Line]:
    if not holders:
        return []
    room = width - 15
    lines: list[Line] = [[(f"{title:<{width}}", "head")]]
    for one in holders[:_TOP]:
        name = one.name if len(one.name) <= room else _LINE.sub(r"\1", one.name)
        lines.append(
            [
                (f"{shortened(name, room, plain=plain):<{room}} ", ""),
                (f"{format_bytes(one.peak_bytes):>9}", ""),
                (f" {one.share:>4.0%}", "dim"),
            ]
        )
    rest = holders[_TOP:]
    if rest:
        count, share = sum(one.peak_bytes for one in rest), sum(one.share for one in rest)
        lines.append([(f"{f'{len(rest)} more':<{room}} {format_bytes(count):>9} {share:>4.0%}", "dim")])
    return lines


def _changes(explanation: MemoryExplanation, width: int, *, plain: bool) -> list[Line]:
    """What would change it: the most first."""
    if not explanation.what_ifs:
        return []
    by_size = explanation.largest is not None
    ranked = sorted(explanation.what_ifs, key=lambda one: -_gain(one, by_size=by_size))
    worth = [one for one in ranked if _gain(one, by_size=by_size) > _WORTH]
    arrow = "->" if plain else "→"
    wide = max((len(str(one.largest_after)) for one in worth[:_TOP]), default=0)
    numbers = [_numbers(one, arrow, wide, by_size=by_size) for one in worth[:_TOP]]
    room = max(map(len, numbers), default=0)
    what = "the largest batch" if by_size else "the peak"
    lines: list[Line] = [[], [(f"  what would change {what}", "head")]]
    for one, number in zip(worth[:_TOP], numbers, strict=True):
        first, *more = textwrap.wrap(one.change, width - room - 4, break_on_hyphens=False) or [""]
        lines.append([("  ", ""), (f"{number:<{room}}", "good"), ("  " + first, "strong")])
        lines += [[(" " * (room + 4) + part, "strong")] for part in more]
        if _is_sum(one, worth):
            lines += _below("how", "both of these, which are below", width)
            continue
        lines += _below("how", one.how, width)
        lines += _below("costs", one.cost, width)
    lost = [one.change for one in (*worth[_TOP:], *(one for one in ranked if one not in worth))]
    if lost:
        label = "little or no gain: " if worth else "nothing that was tried helps: "
        wrapped = textwrap.wrap(label + "; ".join(lost), width - 2, break_on_hyphens=False)
        lines += [[("  " + part, "dim")] for part in wrapped]
    return lines


def _below(label: str, text: str, width: int) -> list[Line]:
    """How to make a change, or what it costs, under its name."""
    parts = textwrap.wrap(text, width - 12, break_on_hyphens=False)
    return [[(f"      {label if n == 0 else '':<6}{part}", "dim")] for n, part in enumerate(parts)]


def _is_sum(one: WhatIf, others: Sequence[WhatIf]) -> bool:
    """Whether it is two of the others at once: how they are made is said there."""
    names = [other.change for other in others[:_TOP]]
    return any(one.change == f"{a} and {b}" for a in names for b in names)


def _gain(one: WhatIf, *, by_size: bool) -> float:
    return one.gain if by_size else one.peak_bytes_before / max(one.peak_bytes_after, 1)


def _numbers(one: WhatIf, arrow: str, wide: int, *, by_size: bool) -> str:
    if by_size:
        times = f"x{one.gain:.2f}" if one.largest_before else "fits"
        return f"{one.largest_before:>{wide}} {arrow} {one.largest_after:<{wide}} {times}"
    return f"{format_bytes(one.peak_bytes_before)} {arrow} {format_bytes(one.peak_bytes_after)}"


def _caveats(notes: Sequence[str], width: int) -> list[Line]:
    lines: list[Line] = [[]] if notes else []
    for note in notes:
        parts = textwrap.wrap(f"caveat: {note}", width - 2, break_on_hyphens=False)
        lines += [[("  " + part, "warn")] for part in parts]
    return lines
