"""The report's section of a post-mortem: why it was out of memory, its timeline, and who held it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from batchfit._charts.oom_chart import oom_chart
from batchfit._charts.oom_page import memory_facts
from batchfit._charts.svg import escaped
from batchfit._report.markup import Fact, HtmlTable, bars, figure, panel, table_of
from batchfit._units import format_bytes
from batchfit.results import Holder, OomExplanation

Rows = Callable[[Sequence[Holder]], list[tuple[str, float, str, str]]]
_MOST_STACK = 12


def oom_sections(name: str, why: OomExplanation, number: int, rows: Rows) -> Iterator[str]:
    """Causes first, then the moment, the timeline, the holders, and what other settings would have done."""
    yield f"<h2>{escaped(name)}Why it was out of memory</h2>"
    if why.causes:
        items = "".join(
            f"<li><b>{escaped(one.name)}</b>: {escaped(one.evidence)}"
            f'<br><span class="dim">{escaped(one.advice)}</span></li>'
            for one in why.causes
        )
        yield panel(f'<ul class="list">{items}</ul>')
    columns = ("when it ended", "memory")
    facts = HtmlTable(columns, tuple(memory_facts(why)), words=columns)
    stack = "".join(f"<li><code>{escaped(one)}</code></li>" for one in why.stack[-_MOST_STACK:])
    below = f'<h3 class="next">The request that failed</h3><ol class="stack">{stack}</ol>' if stack else ""
    yield panel(table_of(facts), below)
    if why.timeline:
        yield figure(oom_chart(why), _timeline_table(why), name=f"oom-{number}", note=_note(why))
    yield _held("Live at the end", why.kinds, why.modules, why.lines, rows)
    if why.peak_kinds:
        title = f"Live at the peak, {format_bytes(why.peak_bytes)}"
        yield _held(title, why.peak_kinds, why.peak_modules, why.peak_lines, rows)
    yield from _tables(why)


def oom_facts(why: OomExplanation) -> list[Fact]:
    """The figures at the top of the page."""
    found = []
    if why.requested_bytes is not None:
        phase = why.phase and f"in {why.phase}"
        found.append(Fact("failed request", format_bytes(why.requested_bytes), phase))
    reserved = f"of {format_bytes(why.reserved_bytes)} reserved"
    found.append(Fact("live", format_bytes(why.live_bytes), reserved))
    found.append(Fact("fragmented", format_bytes(why.fragmented_bytes), "inactive split blocks"))
    return found


def _note(why: OomExplanation) -> str:
    return (
        f"{why.entries:,} entries of the allocator, {why.steps} steps. Draw over a stretch to look closer; "
        "a double click shows the whole."
    )


def _held(
    title: str, kinds: Sequence[Holder], modules: Sequence[Holder], lines: Sequence[Holder], rows: Rows
) -> str:
    return panel(
        f"<h3>{escaped(title)}</h3>{bars('kind', rows(kinds))}",
        f'<div class="columns"><div>{bars("module", rows(modules))}</div>',
        f"<div>{bars('source line', rows(lines))}</div></div>",
    )


def _timeline_table(why: OomExplanation) -> HtmlTable:
    kinds = sorted({kind for moment in why.timeline for kind in moment.kinds})
    every = max(1, len(why.timeline) // 20)
    rows = tuple(
        (
            f"{m.at:,}",
            m.phase or "-",
            *(format_bytes(m.kinds.get(kind, 0)) for kind in kinds),
            format_bytes(reserved),
        )
        for m, reserved in list(zip(why.timeline, why.reserved_timeline, strict=False))[::every]
    )
    return HtmlTable(("entry", "phase", *kinds, "reserved"), rows, words=("phase",))


def _tables(why: OomExplanation) -> Iterator[str]:
    if why.growth:
        grown = tuple(
            (
                one.name,
                format_bytes(one.bytes_per_step),
                f"{one.steps} of {one.of_steps}",
                format_bytes(one.total_bytes),
            )
            for one in why.growth
        )
        table = HtmlTable(("source line", "per step", "steps", "in all"), grown, words=("source line",))
        yield panel(f"<h3>Left behind from step to step</h3>{table_of(table)}")
    if why.settings:
        tried = tuple(
            (one.setting, "granted", format_bytes(one.reserved_bytes))
            if one.fits
            else (one.setting, "out of memory", "-")
            for one in why.settings
        )
        table = HtmlTable(("setting", "the request", "reserved"), tried, words=("setting", "the request"))
        yield panel(f"<h3>Replayed with PYTORCH_CUDA_ALLOC_CONF</h3>{table_of(table)}")
    if why.ranks:
        ranked = tuple(
            (
                one.name,
                format_bytes(one.requested_bytes) if one.requested_bytes is not None else "-",
                format_bytes(one.live_bytes),
                format_bytes(one.peak_bytes),
                format_bytes(one.reserved_bytes),
                one.most,
            )
            for one in why.ranks
        )
        columns = ("file", "failed request", "live", "peak", "reserved", "most of it")
        yield panel(f"<h3>Files</h3>{table_of(HtmlTable(columns, ranked, words=('file', 'most of it')))}")
    if why.unseen:
        items = "".join(f"<li>{escaped(one)}</li>" for one in why.unseen)
        yield panel(f'<h3>What the snapshot does not say</h3><ul class="list">{items}</ul>')
