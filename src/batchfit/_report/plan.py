"""A plan in the report: settings by GPUs, with a mark at what no run on such a GPU has confirmed.

Rules: as on the terminal; what to do on each GPU comes first, and nothing is claimed that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from batchfit._charts.plan_page import advice, headline, is_doubtful, legend
from batchfit._charts.svg import escaped
from batchfit._report.markup import Fact, panel
from batchfit._units import format_bytes
from batchfit.results import Plan, PlanCell, PlanRow


def plan_clause(plan: Plan) -> str:
    """How many of the settings fit, in a sentence: which ones stands below it."""
    counts = [
        f"{sum(row.cells[at].batch_size > 0 for row in plan.rows if row.cells)} on {column.title}"
        for at, column in enumerate(plan.columns)
    ]
    return f"of {len(plan.rows)} settings of {plan.target}, predicted to fit: {', '.join(counts)}"


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
    yield panel(f'<p class="dim">{escaped(headline(plan))}</p><ul class="list">{items}</ul>')
    yield panel(_table(plan), f'<p class="dim">{escaped(legend(plan))}</p>')
    yield panel(f'<h3>What is not in it</h3><ul class="list">{notes}</ul>') if notes else ""


def _table(plan: Plan) -> str:
    titles = "".join(
        f'<th scope="col">{escaped(one.title)}<small>{format_bytes(one.usable_bytes)}</small></th>'
        for one in plan.columns
    )
    body = "".join(
        f'<tr><td class="words">{escaped(row.setting)}</td>{_cells(plan, row, number)}</tr>'
        for number, row in enumerate(plan.rows)
    )
    return (
        '<div class="scroll"><table class="plan"><thead><tr><th scope="col" class="words">microbatch per GPU'
        f"</th>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(plan: Plan, row: PlanRow, number: int) -> str:
    if not row.cells:
        return f'<td class="note" colspan="{len(plan.columns)}">{escaped(row.note)}</td>'
    return "".join(
        _cell(cell, best=column.recommended == number)
        for cell, column in zip(row.cells, plan.columns, strict=True)
    )


def _cell(cell: PlanCell, *, best: bool) -> str:
    if not cell.batch_size:
        return "<td>-</td>"
    more = [f"{format_bytes(cell.peak_bytes)}{'?' if is_doubtful(cell) else ''}"]
    more += [] if cell.speed is None else [f"speed {cell.speed:.0%}"]
    more += [] if cell.cost is None else [f"cost x{cell.cost:.2f}"]
    small = "".join(f"<small>{one}</small>" for one in more)
    head = f"{cell.batch_size:,}{' ★' if best else ''}{small}"
    return f'<td class="best">{head}</td>' if best else f"<td>{head}</td>"


def _fits(plan: Plan, at: int) -> bool:
    return any(row.cells[at].batch_size for row in plan.rows if row.cells)
