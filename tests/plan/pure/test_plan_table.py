"""From cells to a table: speeds, costs, the recommended row, and what is shown and pasted."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchfit._charts.plan_page import as_markup, microbatch, plan_lines
from batchfit._charts.text_charts import as_text
from batchfit._engine.allocator.footprint import Footprint, Origin
from batchfit._plan.pure.options import PlanOptions
from batchfit._plan.pure.paste import pasted
from batchfit._plan.pure.settings import TRAINERS, Setting, settings_for
from batchfit._plan.pure.speed import PEAKS, Cell, StepCost
from batchfit._plan.pure.table import RowCells, table_of
from batchfit.results import Plan, PlanRow

GIB = 2**30
COST = StepCost(1e12, 1e9, 1e10, 1e10)


def fields(setting: Setting) -> dict[str, str | int]:
    return {name: getattr(setting, name) for name in setting.__slots__}


def row(setting: Setting, *cells: Cell) -> RowCells:
    return RowCells(setting.name, setting.method, fields(setting), cells)


def planned(rows: list[RowCells | PlanRow], gpus: str, **options: object) -> Plan:
    asked = PlanOptions(gpus=gpus, **options)  # type: ignore[arg-type]
    columns, done = table_of(rows, asked.columns, prices=asked.hourly, global_batch=asked.global_batch)
    return Plan(
        target="some/model", parameters=10**9, seq_len=2048, global_batch=asked.global_batch,
        columns=columns, rows=done, unseen=("a caveat",),
    )  # fmt: skip


FULL, LORA = Setting(), Setting(method="lora", checkpointing="all")


def test_the_faster_row_is_recommended_and_the_other_is_a_share_of_it() -> None:
    slow = StepCost(2e12, 1e9, 1e10, 1e10)
    plan = planned([row(FULL, Cell(4, GIB, slow)), row(LORA, Cell(4, GIB, COST))], "h100")
    assert plan.columns[0].recommended == 1
    assert plan.rows[1].cells[0].speed == 1.0
    assert 0.4 < (plan.rows[0].cells[0].speed or 0) < 1
    best = plan.best("h100")
    assert best is not None
    assert best.setting == LORA.name


def test_of_equal_rows_the_first_is_recommended() -> None:
    plan = planned([row(FULL, Cell(4, GIB, COST)), row(LORA, Cell(4, GIB, COST))], "h100")
    assert plan.columns[0].recommended == 0


def test_where_nothing_fits_the_least_is_named() -> None:
    plan = planned([row(FULL, Cell(0, 30 * GIB)), row(LORA, Cell(0, 20 * GIB))], "t4")
    assert plan.columns[0].recommended is None
    assert LORA.name in plan.columns[0].remedy
    assert "20.0 GiB" in plan.columns[0].remedy
    assert "nothing fits" in str(plan)


def test_prices_make_the_cheapest_cell_one() -> None:
    plan = planned(
        [row(FULL, Cell(4, GIB, COST), Cell(4, GIB, COST))], "rtx4090,h100", prices="rtx4090=0.4,h100=2"
    )
    cheap, dear = (cell.cost for cell in plan.rows[0].cells)
    assert cheap == 1.0
    assert dear is not None
    assert dear > 1
    assert "cheapest per sample" in str(plan)


@given(size=st.integers(1, 64), wanted=st.integers(1, 512), count=st.sampled_from([1, 2, 8]))
def test_accumulation_reaches_the_global_batch_and_no_microbatch_more(
    size: int, wanted: int, count: int
) -> None:
    gpus = "h100" if count == 1 else f"h100x{count}"
    plan = planned([row(FULL, Cell(size, GIB, COST))], gpus, global_batch=wanted)
    passes = plan.rows[0].cells[0].accumulation
    assert passes * size * count >= wanted
    assert passes == 1 or (passes - 1) * size * count < wanted


@given(flops=st.floats(1e9, 1e15), moved=st.floats(1e6, 1e12), size=st.integers(1, 512))
def test_more_work_is_never_faster_and_a_larger_batch_never_slower(
    flops: float, moved: float, size: int
) -> None:
    cost = StepCost(flops, moved, 1e9, 1e9)
    rate = cost.samples_per_unit("h100", size)
    assert StepCost(2 * flops, moved, 1e9, 1e9).samples_per_unit("h100", size) < rate
    assert StepCost(flops, 2 * moved, 1e9, 1e9).samples_per_unit("h100", size) < rate
    assert cost.samples_per_unit("h100", size + 1) >= rate * (1 - 1e-9)
    assert cost.samples_per_unit("h100", 0) == 0
    assert cost.samples_per_unit("mygpu", size) == 0


def test_an_unknown_speed_recommends_nothing_and_says_so() -> None:
    plan = planned([row(FULL, Cell(4, GIB, COST))], "mygpu=24GiB")
    assert plan.columns[0].recommended is None
    assert plan.rows[0].cells[0].speed is None
    assert "no speed is known" in str(plan)


def test_what_a_step_moves_is_read_off_its_last_step() -> None:
    weight, grad, made = (
        Origin("weights", "setup"), Origin("gradients", "backward"), Origin("activations", "forward"),
    )  # fmt: skip
    footprint = Footprint(
        fixed=(100.0, 0.0, 100.0), per_sample=(0.0, 10.0, 0.0), origins=(weight, made, grad),
        events=(0, 1, 2, ~1, ~2), begins=1, step_ends=(5,),
    )  # fmt: skip
    cost = StepCost.of(footprint, 7.0)
    assert cost.flops_per_sample == 7.0
    assert cost.bytes_per_sample == 3 * 10
    assert cost.bytes_per_microbatch == 2 * 100
    assert cost.bytes_per_step == 2 * (100 + 100)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_pasted_is_code_for_every_setting(trainer: str) -> None:
    cell = planned([row(FULL, Cell(4, GIB, COST))], "h100").rows[0].cells[0]
    for setting in settings_for("causal"):
        text = pasted(
            PlanRow(setting=setting.name, method=setting.method, options=fields(setting)),
            cell,
            trainer,
            seq_len=512,
        )
        assert "4" in text
        if trainer != "torchtune":
            ast.parse(text)
    with pytest.raises(ValueError, match="paste must be one of"):
        pasted(PlanRow(setting="", method="full", options=fields(FULL)), cell, "nemo", seq_len=None)


def test_a_row_of_a_workload_says_how() -> None:
    cell = planned([row(FULL, Cell(4, GIB, COST))], "h100").rows[0].cells[0]
    text = pasted(
        PlanRow(setting="bf16", method="as it is", options={"how": "model.bfloat16()"}),
        cell,
        "trl",
        seq_len=None,
    )
    assert "model.bfloat16()" in text


def test_a_row_without_cells_says_why_below() -> None:
    reason = "no nn.Linear for bitsandbytes to hold in 4 bits"
    missing = PlanRow(setting="QLoRA", method="qlora", options={}, note=reason)
    plan = planned([row(FULL, Cell(9465, 828 * GIB, COST)), missing], "h100=900GiB")
    text = as_text(plan_lines(plan))
    assert f"not planned: QLoRA: {reason}" in " ".join(text.split())
    assert f"{FULL.name} 9465" in " ".join(text.split()), "a wide cell stays apart from the name"


@pytest.mark.parametrize(("fits", "used", "times"), [(37, 32, 2), (15, 13, 5), (900, 64, 1), (64, 64, 1)])
def test_a_microbatch_is_no_larger_than_the_global_batch_needs(fits: int, used: int, times: int) -> None:
    plan = planned([row(FULL, Cell(fits, GIB, COST))], "h100", global_batch=64)
    assert microbatch(plan, plan.columns[0], plan.rows[0].cells[0]) == used
    text = " ".join(as_text(plan_lines(plan)).split())
    assert f"microbatch {used} per GPU" in text
    assert f"gradient accumulation {times}" in text
    assert (f"({fits} fit, " in text) == (used < fits)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    cells = [Cell(n, n * GIB, COST) for n in range(1, 5)]
    rows: list[RowCells | PlanRow] = [row(one, *cells) for one in settings_for("causal")]
    rows.append(PlanRow(setting="QLoRA", method="qlora", note="a reason that is rather long, " * 4))
    plan = planned(rows, "t4,rtx4090,a100-80gb,h100")
    text = as_text(plan_lines(plan, width=width))
    assert max(map(len, text.splitlines())) <= width
    for name in ("t4", "rtx4090", "a100-80gb", "h100", "caveat: a caveat"):
        assert name in text
    assert as_markup(plan).count("<tr>") == len(rows) + 1
    assert Plan.from_json(plan.to_json()) == plan


def test_every_gpu_with_a_speed_is_known() -> None:
    for name in PEAKS:
        assert PlanOptions(gpus=name).columns[0].gpu.name == name


def test_several_gpus_say_how_they_share_and_how_many_samples_that_is() -> None:
    sharded = Setting(shards="fsdp2")
    cells = [Cell(3, GIB, COST), Cell(3, GIB, COST)]
    ddp, fsdp2 = planned([row(FULL, *cells)], "h100,h100x8"), planned([row(sharded, *cells)], "h100,h100x8")
    told = [" ".join(as_text(plan_lines(one, width=200)).split()) for one in (ddp, fsdp2)]
    assert "microbatch 3 per GPU, 1.00 GiB of 78.6 GiB, x 8 GPUs with DDP = 24 samples at once" in told[0]
    assert "microbatch 3 per GPU, 1.00 GiB of 78.6 GiB, x 8 GPUs = 24 samples at once" in told[1]
    assert all("a row is DDP (the whole model on each) unless it says FSDP2" in one for one in told)
    alone = as_text(plan_lines(planned([row(FULL, Cell(3, GIB, COST))], "h100"), width=200))
    assert "DDP" not in alone
    assert "at once" not in alone
