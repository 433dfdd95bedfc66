"""From cells to a table: relative speeds, costs, the recommended row, and what to do where none fits.

Rules: the recommended row is the one with the most predicted samples per second that fits; of rows within 1 %
of each other the first, which trains more. Where nothing fits, the row that needs the least is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import final

from batchfit._plan.pure.options import PlanGpu
from batchfit._plan.pure.speed import Cell
from batchfit._units import format_bytes
from batchfit.results import PlanCell, PlanColumn, PlanRow

_AS_FAST = 0.99  # of the best: as good


@final
@dataclass(frozen=True, slots=True)
class RowCells:
    """A row before its cells are compared."""

    setting: str
    method: str
    options: dict[str, str | int]
    cells: tuple[Cell, ...]
    is_confirmed: bool = False


def table_of(
    rows: Sequence[PlanRow | RowCells],
    gpus: Sequence[PlanGpu],
    *,
    prices: Mapping[str, float],
    global_batch: int | None,
) -> tuple[tuple[PlanColumn, ...], tuple[PlanRow, ...]]:
    """Columns and rows of the plan."""
    rates = [_rates(rows, at, gpu, global_batch) for at, gpu in enumerate(gpus)]
    costs = [[_cost(rate, gpu, prices) for rate in column] for column, gpu in zip(rates, gpus, strict=True)]
    cheapest = min((one for column in costs for one in column if one), default=None)
    columns = tuple(
        _column(rows, at, gpu, rates[at], prices.get(gpu.gpu.name)) for at, gpu in enumerate(gpus)
    )
    done = []
    for number, row in enumerate(rows):
        if isinstance(row, PlanRow):
            done.append(row)
            continue
        cells = tuple(
            PlanCell(
                batch_size=cell.batch_size,
                peak_bytes=cell.peak_bytes,
                accumulation=_accumulation(cell.batch_size, gpus[at].count, global_batch),
                speed=_share(rates[at][number], max(rates[at], default=0.0)),
                cost=_share(costs[at][number], cheapest) if cheapest else None,
                confirmed=row.is_confirmed and gpus[at].gpu.measured and gpus[at].count == 1,
            )
            for at, cell in enumerate(row.cells)
        )
        done.append(PlanRow(setting=row.setting, method=row.method, options=row.options, cells=cells))
    return columns, tuple(done)


def _rates(
    rows: Sequence[PlanRow | RowCells], at: int, gpu: PlanGpu, global_batch: int | None
) -> list[float]:
    """Samples per unit of time of each row on one GPU; 0 where it is not known."""
    found = []
    for row in rows:
        cell = row.cells[at] if isinstance(row, RowCells) else None
        if cell is None or cell.cost is None or not cell.cost.flops_per_sample:
            found.append(0.0)
            continue
        size = (
            cell.batch_size if global_batch is None else min(cell.batch_size, ceil(global_batch / gpu.count))
        )
        found.append(
            cell.cost.samples_per_unit(gpu.gpu.name, size, count=gpu.count, global_batch=global_batch)
        )
    return found


def _cost(rate: float, gpu: PlanGpu, prices: Mapping[str, float]) -> float:
    price = prices.get(gpu.gpu.name)
    return gpu.count * price / rate if price and rate else 0.0


def _share(value: float, best: float) -> float | None:
    return value / best if value and best else None


def _accumulation(size: int, count: int, global_batch: int | None) -> int:
    return 1 if global_batch is None or not size else max(1, ceil(global_batch / (size * count)))


def _column(
    rows: Sequence[PlanRow | RowCells], at: int, gpu: PlanGpu, rates: Sequence[float], price: float | None
) -> PlanColumn:
    best = max(rates, default=0.0)
    recommended = next((n for n, rate in enumerate(rates) if best and rate >= _AS_FAST * best), None)
    return PlanColumn(
        gpu=gpu.gpu.name,
        count=gpu.count,
        usable_bytes=gpu.gpu.usable_bytes,
        measured=gpu.gpu.measured,
        price=price,
        recommended=recommended,
        remedy=_remedy(rows, at, gpu),
    )


def _remedy(rows: Sequence[PlanRow | RowCells], at: int, gpu: PlanGpu) -> str:
    cells = [(row.cells[at], row.setting) for row in rows if isinstance(row, RowCells)]
    if not cells or any(cell.batch_size for cell, _ in cells):
        return ""
    least, name = min(cells, key=lambda one: one[0].peak_bytes)
    return (
        f"the least is needed by {name}: {format_bytes(least.peak_bytes)} for one sample. Try a shorter "
        f"--seq-len, or a GPU with more than {format_bytes(gpu.gpu.usable_bytes)}"
    )
