"""A plan in the report: settings by GPUs, with a mark at what no run on such a GPU has confirmed.

Rules: as on the terminal; what to do on each GPU comes first, and nothing is claimed that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchfit._charts.plan_page import advice, headline, is_doubtful, legend
from batchfit._charts.svg import escaped
from batchfit._report.markup import Fact, HtmlTable, card, table_of
from batchfit._units import format_bytes
from batchfit.results import Plan, PlanCell


def plan_clause(plan: Plan) -> str:
    """The recommended row of each GPU, in a sentence."""
    found = []
    for at, column in enumerate(plan.columns):
        if column.recommended is None:
            found.append(f"{'something' if _fits(plan, at) else 'nothing'} fits on {column.title}")
        else:
            row = plan.rows[column.recommended]
            found.append(f"{row.setting} with {row.cells[at].batch_size:,} per GPU on {column.title}")
    return f"{headline(plan)}: {'; '.join(found)} (predicted)"


def plan_facts(plan: Plan) -> list[Fact]:
    """What is recommended on each of the first GPUs."""
    found = []
    for at, column in enumerate(plan.columns):
        row = None if column.recommended is None else plan.rows[column.recommended]
        if row is None:
            found.append(Fact(column.title, "-" if _fits(plan, at) else "none", "nothing recommended"))
            continue
        cell = row.cells[at]
        more = f"{row.setting}; {format_bytes(cell.peak_bytes)} of {format_bytes(column.usable_bytes)}"
        found.append(Fact(f"microbatch on {column.title}", f"{cell.batch_size:,}", more))
    return found[:4]


def plan_sections(name: str, plan: Plan, number: int) -> Iterator[str]:
    """What to do on each GPU, the table, and what is not known."""
    yield f"<h2>{escaped(name)}Which settings fit on which GPU</h2>"
    items = "".join(
        f"<li><b>{escaped(column.title)}</b>: {escaped(advice(plan, column))}</li>" for column in plan.columns
    )
    notes = "".join(f"<li>{escaped(note)}</li>" for note in plan.unseen)
    yield card(f'<p class="dim">{escaped(headline(plan))}</p><ul class="list">{items}</ul>')
    yield card(table_of(_table(plan)), f'<p class="dim">{escaped(legend(plan))}</p>')
    yield card(f'<h3>What is not in it</h3><ul class="list">{notes}</ul>') if notes else ""


def _table(plan: Plan) -> HtmlTable:
    columns = tuple(f"{one.title} ({format_bytes(one.usable_bytes)})" for one in plan.columns)
    rows = []
    for number, row in enumerate(plan.rows):
        cells = [
            _cell(cell, best=column.recommended == number)
            for cell, column in zip(row.cells, plan.columns, strict=False)
        ]
        rows.append((row.setting, *(cells or [row.note, *[""] * (len(columns) - 1)])))
    best = {one.recommended for one in plan.columns if one.recommended is not None}
    return HtmlTable(
        ("microbatch per GPU", *columns), tuple(rows), words=("microbatch per GPU",), chosen=best
    )


def _cell(cell: PlanCell, *, best: bool) -> str:
    if not cell.batch_size:
        return "-"
    text = f"{cell.batch_size:,} · {format_bytes(cell.peak_bytes)}{'?' if is_doubtful(cell) else ''}"
    text += "" if cell.speed is None else f" · {cell.speed:.0%}"
    text += "" if cell.cost is None else f" · cost x{cell.cost:.2f}"
    return f"{text} ★" if best else text


def _fits(plan: Plan, at: int) -> bool:
    return any(row.cells[at].batch_size for row in plan.rows if row.cells)
