"""A plan as a page: every cell, what to do, and a mark where no run on such a GPU is known."""

from __future__ import annotations

from pathlib import Path

import batchfit
from batchfit._plan.pure.options import PlanOptions
from batchfit._plan.pure.settings import Setting, is_confirmed, settings_for
from batchfit._plan.pure.speed import Cell, StepCost
from batchfit._plan.pure.table import RowCells, table_of
from batchfit.results import Plan, PlanRow

GIB = 2**30
COST = StepCost(1e12, 1e9, 1e10, 1e10)


def planned(*settings: Setting, gpus: str = "h200,rtx4090") -> Plan:
    asked = PlanOptions(gpus=gpus)
    rows: list[PlanRow | RowCells] = []
    for one in settings:
        fields = {name: getattr(one, name) for name in one.__slots__}
        cells = tuple(Cell(at + 3, (at + 5) * GIB, COST) for at in range(len(asked.columns)))
        rows.append(RowCells(one.name, one.method, fields, cells, is_confirmed(one, "causal")))
    rows.append(PlanRow(setting="QLoRA <b>", method="qlora", note="no nn.Linear & nothing"))
    columns, done = table_of(rows, asked.columns, prices={}, global_batch=None)
    return Plan(target="a/model", parameters=10**9, columns=columns, rows=done, unseen=("what a GPU says",))


def test_only_what_was_trained_on_that_gpu_is_confirmed() -> None:
    plan = planned(*settings_for("causal"))
    for row in plan.rows[:-1]:
        on_h200, on_rtx4090 = row.cells
        assert not on_rtx4090.confirmed
        assert on_h200.confirmed
    assert not is_confirmed(Setting(optimizer="sgd"), "image")
    assert not is_confirmed(Setting(weights="fp32"), "diffusion")
    several = planned(Setting(weights="fp32"), gpus="h200x8")
    assert not any(one.confirmed for row in several.rows for one in row.cells)
    assert "?: predicted" in str(plan)
    assert "3  5.00 GiB  100%*" in str(planned(Setting(weights="fp32"), gpus="h200")).replace("★", "*")
    assert "?" not in str(planned(Setting(weights="fp32"), gpus="h200"))


def test_a_report_of_a_plan_has_every_row_and_its_marks(tmp_path: Path) -> None:
    plan = planned(Setting(weights="fp32"), Setting(method="qlora", rank=8))
    (tmp_path / "plan.json").write_text(plan.to_json())
    text = batchfit.report(tmp_path / "plan.json", tmp_path / "plan.html").read_text()
    assert "Of 3 settings of a/model, predicted to fit: 2 on h200, 2 on rtx4090." in text
    assert text.count("<tr>") - 1 >= len(plan.rows)
    assert "3 ★<small>5.00 GiB</small>" in text
    assert "4 ★<small>6.00 GiB?</small>" in text
    assert "3<small>5.00 GiB?</small>" in text
    assert "QLoRA &lt;b&gt;" in text
    assert "no nn.Linear &amp; nothing" in text
    assert "what a GPU says" in text
    assert "?: predicted, and never compared" in text
