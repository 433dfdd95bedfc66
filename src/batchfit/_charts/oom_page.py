"""The post-mortem of an OOM on one screen: what failed, why, what to do, and who held the memory.

Rules: as in `memory_page`: the answer first, 80 columns and about 40 lines, nothing is printed here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchfit._charts.memory_page import WIDTH, fact, kind_bars, two_rankings
from batchfit._charts.text_charts import Line, shortened
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import Holder, OomExplanation

_MOST_RANKS = 16


def oom_lines(why: OomExplanation, *, width: int = WIDTH, plain: bool = False) -> list[Line]:
    """A post-mortem as lines of at most `width` characters (60 at least)."""
    width = max(width, 60)
    lines: list[Line] = [
        *([(part, "strong")] for part in textwrap.wrap(oom_headline(why), width)),
        *_memory(why, width),
        *_causes(why, width),
        *_held("live at the end", why.kinds, why.modules, why.lines, width, plain=plain),
    ]
    if why.peak_kinds:
        title = f"live at the peak, {format_bytes(why.peak_bytes)}"
        lines += _held(title, why.peak_kinds, why.peak_modules, why.peak_lines, width, plain=plain)
    lines += [*_growth(why, width, plain=plain), *_settings(why, width), *_ranks(why, width, plain=plain)]
    for number, note in enumerate(why.unseen):
        parts = textwrap.wrap(f"caveat: {note}", width - 2, break_on_hyphens=False)
        lines += [*([[]] if number == 0 else []), *([("  " + part, "warn")] for part in parts)]
    return lines


def oom_headline(why: OomExplanation) -> str:
    """`out of memory in forward: 72.0 MiB at train.py:38 forward; long batch`."""
    where = f" of rank {why.rank}" if why.rank is not None else ""
    device = "virtual memory" if why.is_virtual else f"GPU {why.device}"
    if why.requested_bytes is None:
        return f"{format_bytes(why.live_bytes)} live on {device}{where}; no OOM in this snapshot"
    phase = f" in {why.phase}" if why.phase else ""
    text = f"out of memory on {device}{where}{phase}: {format_bytes(why.requested_bytes)} at "
    text += why.requested_at
    return f"{text}; {', '.join(one.name for one in why.causes)}" if why.causes else text


def memory_facts(why: OomExplanation) -> list[tuple[str, str]]:
    """The figures of the moment: what was live, cached, fragmented, free, and held by others."""
    live = f"{format_bytes(why.live_bytes)} of {format_bytes(why.reserved_bytes)} reserved"
    if why.total_bytes is not None:
        live += f" of {format_bytes(why.total_bytes)}"
    found = [("live", live)]
    if why.is_virtual:
        live = f"{format_bytes(why.live_bytes)} of {format_bytes(why.total_bytes or why.reserved_bytes)}"
        found = [("live", live)]
    unused = f"{format_bytes(why.fragmented_bytes)} in inactive split blocks (fragmentation)"
    if why.largest_free_bytes:
        unused += f", the largest {format_bytes(why.largest_free_bytes)}"
    if not why.is_virtual:
        found.append(("not live", f"{unused}; {format_bytes(why.cached_bytes)} cached"))
    if why.awaiting_bytes:
        found.append(("awaiting", f"{format_bytes(why.awaiting_bytes)} freed, still in use by a stream"))
    if why.outside_bytes is not None:
        found.append(("outside", f"{format_bytes(why.outside_bytes)} held outside this process's allocator"))
    if why.free_bytes is not None:
        on = "" if why.is_virtual else f" on the GPU{_capped(why)}"
        found.append(("free", f"{format_bytes(why.free_bytes)}{on}"))
    if why.short_bytes:
        most = "at most " if why.short_is_most else ""
        found.append(("short by", f"{most}{format_bytes(why.short_bytes)} for this request"))
    if why.step is not None or why.batch:
        shapes = ", ".join(f"{key} {one}" for key, one in why.batch.items())
        step = f"step {why.step}" if why.step is not None else ""
        found.append(("batch", "; ".join(part for part in (step, shapes) if part)))
    return found


def _capped(why: OomExplanation) -> str:
    if why.short_is_most and why.requested_bytes is not None:
        return ": the process has a cap (its memory fraction)"
    return ""


def _memory(why: OomExplanation, width: int) -> list[Line]:
    return [line for label, text in memory_facts(why) for line in fact(label, text, width)]


def _causes(why: OomExplanation, width: int) -> list[Line]:
    lines: list[Line] = []
    for one in why.causes:
        lines += [[], [("  because  ", "head"), (one.name, "strong")]]
        lines += fact("", one.evidence, width)
        lines += fact("do", one.advice, width)
    return lines


def _held(
    title: str,
    kinds: Sequence[Holder],
    modules: Sequence[Holder],
    lines: Sequence[Holder],
    width: int,
    *,
    plain: bool,
) -> list[Line]:
    if not kinds:
        return []
    return [
        [],
        [(f"  {title}", "head")],
        *kind_bars(kinds, width, plain=plain),
        [],
        *two_rankings(modules, lines, width, plain=plain),
    ]


def _growth(why: OomExplanation, width: int, *, plain: bool) -> list[Line]:
    """What earlier steps left behind."""
    if not why.growth:
        return []
    lines: list[Line] = [[], [(f"  left behind from step to step ({why.steps} steps seen)", "head")]]
    room = width - 42
    for one in why.growth[:5]:
        lines.append(
            [
                (f"  {shortened(one.name, room, plain=plain):<{room}} ", ""),
                (f"{format_bytes(one.bytes_per_step):>9} per step", "warn"),
                (f"  {format_bytes(one.total_bytes):>9} in all", "dim"),
            ]
        )
    return lines


def _settings(why: OomExplanation, width: int) -> list[Line]:
    if not why.settings:
        return []
    lines: list[Line] = [[], [("  replayed with PYTORCH_CUDA_ALLOC_CONF", "head")]]
    for one in why.settings:
        words = (
            f"the request is granted, {format_bytes(one.reserved_bytes)} reserved"
            if one.fits
            else "out of memory as well"
        )
        lines.append([(f"  {one.setting:<28}", ""), (words[: width - 30], "good" if one.fits else "dim")])
    return lines


def _ranks(why: OomExplanation, width: int, *, plain: bool) -> list[Line]:
    """Each file: which were out of memory, and which held the most."""
    if not why.ranks:
        return []
    room = min(max(len(one.name) for one in why.ranks), width // 3)
    lines: list[Line] = [[], [("  files", "head")]]
    for one in why.ranks[:_MOST_RANKS]:
        ended = f"OOM at {format_bytes(one.requested_bytes)}" if one.requested_bytes is not None else "no OOM"
        left = width - room - 34
        lines.append(
            [
                (f"  {shortened(one.name, room, plain=plain):<{room}} ", ""),
                (f"{format_bytes(one.live_bytes):>9} live, ", ""),
                (f"{ended:<18} ", "warn" if one.has_oom else "dim"),
                (shortened(one.most, max(left, 8), plain=plain), "dim"),
            ]
        )
    if len(why.ranks) > _MOST_RANKS:
        lines.append([(f"  {len(why.ranks) - _MOST_RANKS} more", "dim")])
    return lines
