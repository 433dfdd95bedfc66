"""A plan on one screen: settings down, GPUs across, in each cell the largest microbatch and its peak.

Rules: the recommended row of each GPU is marked in its column and said below, with its peak, accumulation and
price; what does not fit is a dash. Columns that have no room at the width that is asked for go into another
table below.
"""

from __future__ import annotations

import html
import textwrap
from collections import defaultdict
from math import ceil
from typing import TYPE_CHECKING

from batchfit._charts.memory_page import fact
from batchfit._charts.text_charts import Line
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import Plan, PlanCell, PlanColumn, PlanRun

WIDTH = 80
_CELL = 21
_LEGEND = (
    "In a cell: the largest microbatch, its peak, and samples per second beside the best row of that GPU "
    "(from operations and bytes, not measured). Checkpoint: activation checkpointing of each block."
)
_SEVERAL = (
    "On several GPUs a row is DDP (the whole model on each) unless it says FSDP2; a single GPU has nothing "
    "to shard, so FSDP2 changes nothing there."
)
_DOUBT = "?: predicted, and never compared with training of that kind on such a GPU."


def plan_lines(plan: Plan, *, width: int = WIDTH, plain: bool = False) -> list[Line]:
    """A plan as lines of at most `width` characters (80 at least)."""
    width = max(width, WIDTH)
    lines: list[Line] = [[(part, "strong")] for part in textwrap.wrap(headline(plan), width)]
    names = max((len(row.setting) for row in plan.rows), default=10)
    cell = max([_CELL, *(len(text) + 1 for text in _all_texts(plan))])
    room = min(names, width - min(len(plan.columns), 2) * cell - 2)
    at_once = max(1, (width - room - 2) // cell)
    for first in range(0, len(plan.columns), at_once):
        chosen = range(first, min(first + at_once, len(plan.columns)))
        lines += [[], *_table(plan, chosen, room, cell, plain=plain)]
    lines += [[], *([("  " + part, "dim")] for part in textwrap.wrap(legend(plan), width - 2)), []]
    for column in plan.columns:
        lines += fact(column.title, advice(plan, column), width, room=_label_room(plan))
    if plan.run is not None:
        lines += fact("run here", run_text(plan.run), width, room=_label_room(plan))
    for note in (*_missing(plan), *plan.unseen):
        parts = textwrap.wrap(f"caveat: {note}", width - 2, break_on_hyphens=False)
        lines += [[("  " + part, "warn")] for part in parts]
    return lines


def headline(plan: Plan) -> str:
    """`meta-llama/Llama-3.1-8B (8.0B parameters), 2048 tokens per sample, global batch 64`."""
    text = plan.target
    if plan.parameters:
        count = plan.parameters
        text += f" ({count / 1e9:.1f}B parameters)" if count >= 1e9 else f" ({count / 1e6:.0f}M parameters)"
    if plan.seq_len is not None:
        text += f", samples of {plan.seq_len}"
    return text + (f", global batch {plan.global_batch}" if plan.global_batch is not None else "")


def legend(plan: Plan) -> str:
    """What a cell says."""
    text = _LEGEND
    if any(column.count > 1 for column in plan.columns):
        text += f" {_SEVERAL}"
    doubtful = any(map(is_doubtful, (c for row in plan.rows for c in row.cells)))
    return f"{text} {_DOUBT}" if doubtful else text


def is_doubtful(cell: PlanCell) -> bool:
    """Whether something fits of which no run on such a GPU is known."""
    return cell.batch_size > 0 and not cell.confirmed


def _missing(plan: Plan) -> list[str]:
    """Why some rows have no cells, once each."""
    rows: dict[str, list[str]] = defaultdict(list)
    for row in plan.rows:
        if row.note:
            rows[row.note].append(row.setting)
    return [f"not planned: {'; '.join(settings)}: {note}" for note, settings in rows.items()]


def _table(plan: Plan, chosen: range, room: int, width: int, *, plain: bool) -> list[Line]:
    head: Line = [(f"  {'microbatch per GPU':<{room}}", "head")]
    head += [(f"{plan.columns[at].title:>{width}}", "head") for at in chosen]
    sizes: Line = [(" " * (room + 2), "")]
    sizes += [(f"{format_bytes(plan.columns[at].usable_bytes):>{width}}", "dim") for at in chosen]
    lines = [head, sizes]
    for number, row in enumerate(plan.rows):
        first, *more = textwrap.wrap(row.setting, room, break_on_hyphens=False)
        line: Line = [(f"  {first:<{room}}", "")]
        for at in chosen:
            if row.note or not row.cells[at].batch_size:
                line.append((f"{'-':>{width}}", "dim"))
                continue
            best = plan.columns[at].recommended == number
            text = _text(row.cells[at], best=best, plain=plain)
            line.append((f"{text:>{width}}", "good" if best else ""))
        lines += [line, *([("    " + part, "")] for part in more)]
    return lines


def _all_texts(plan: Plan) -> list[str]:
    cells = [cell for row in plan.rows for cell in row.cells if cell.batch_size]
    return [_text(cell, best=False, plain=True) for cell in cells]


def _text(cell: PlanCell, *, best: bool, plain: bool) -> str:
    speed = "" if cell.speed is None else f" {cell.speed:>4.0%}"
    mark = ("*" if plain else "★") if best else " "
    doubt = "?" if is_doubtful(cell) else " "
    return f"{cell.batch_size} {format_bytes(cell.peak_bytes):>9}{doubt}{speed}{mark}"


def _label_room(plan: Plan) -> int:
    names = [column.title for column in plan.columns] + (["run here"] if plan.run is not None else [])
    return max(map(len, names)) + 1


def advice(plan: Plan, column: PlanColumn) -> str:
    """What to do on one GPU, in a sentence."""
    at = plan.columns.index(column)
    if column.recommended is None:
        fitting = [row for row in plan.rows if row.cells and row.cells[at].batch_size]
        if fitting:
            return f"fits: {fitting[0].setting}; no speed is known, so no row is recommended"
        return f"nothing fits; {column.remedy}" if column.remedy else "nothing fits"
    row = plan.rows[column.recommended]
    cell = row.cells[at]
    used = microbatch(plan, column, cell)
    room = f"{format_bytes(cell.peak_bytes)} of {format_bytes(column.usable_bytes)}"
    text = f"{row.setting}: microbatch {used} per GPU"
    text += f", {room}" if used == cell.batch_size else f" ({cell.batch_size} fit, {room})"
    if column.count > 1:
        text += f", x {column.count} GPUs{'' if row.options.get('shards') else ' with DDP'}"
        text += f" = {used * column.count} samples at once" if plan.global_batch is None else ""
    if plan.global_batch is not None:
        text += f", gradient accumulation {cell.accumulation}"
    if cell.cost is not None:
        text += (
            ", the cheapest per sample"
            if cell.cost <= 1.0005
            else f", {cell.cost:.2f} times the cheapest per sample"
        )
    return text


def microbatch(plan: Plan, column: PlanColumn, cell: PlanCell) -> int:
    """What to train with: the largest that fits, or as much less as reaches the global batch evenly."""
    if plan.global_batch is None or not cell.batch_size:
        return cell.batch_size
    return ceil(plan.global_batch / (column.count * cell.accumulation))


def run_text(run: PlanRun) -> str:
    """`as it is on cpu: 118 found, 120 planned; peak 1.91 GiB, 1.94 GiB planned; fastest at 64 (...)`."""
    text = f"{run.setting} on {run.device}: {run.batch_size:,} found, {run.planned_batch_size:,} planned"
    if run.peak_bytes is not None:
        text += f"; peak {format_bytes(run.peak_bytes)}, {format_bytes(run.planned_peak_bytes)} planned"
    return text + f"; {run.fastest:,} is enough for the best speed ({run.samples_per_s:,.3g} samples/s)"


def as_markup(plan: Plan) -> str:
    """The plan as an HTML table."""
    titles = "".join(
        f"<th>{html.escape(one.title)}<br><small>{format_bytes(one.usable_bytes)}</small></th>"
        for one in plan.columns
    )
    rows = "".join(_markup_row(plan, number) for number in range(len(plan.rows)))
    notes = f"<p>{html.escape(legend(plan))}</p>"
    notes += "".join(f"<p>caveat: {html.escape(note)}</p>" for note in plan.unseen)
    return (
        f"<table><caption>{html.escape(headline(plan))}</caption>"
        f"<thead><tr><th>microbatch per GPU</th>{titles}</tr></thead><tbody>{rows}</tbody></table>{notes}"
    )


def _markup_row(plan: Plan, number: int) -> str:
    row = plan.rows[number]
    if row.note:
        cells = f"<td colspan='{len(plan.columns)}'>{html.escape(row.note)}</td>"
    else:
        cells = "".join(
            f"<td>{_markup_cell(cell, best=column.recommended == number)}</td>"
            for cell, column in zip(row.cells, plan.columns, strict=True)
        )
    return f"<tr><td>{html.escape(row.setting)}</td>{cells}</tr>"


def _markup_cell(cell: PlanCell, *, best: bool) -> str:
    if not cell.batch_size:
        return "–"
    text = f"{cell.batch_size} ({format_bytes(cell.peak_bytes)}{'?' if is_doubtful(cell) else ''})"
    text += "" if cell.speed is None else f", {cell.speed:.0%}"
    return f"<b>{text} ★</b>" if best else text
