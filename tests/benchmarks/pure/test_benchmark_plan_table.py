"""The public page of plans: it is what its JSON says, and its commands are commands."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from batchfit._cli.app import app
from batchfit._plan.pure.options import PlanOptions
from batchfit._plan.pure.settings import settings_for
from batchfit._plan.pure.shapes import shape_named

FOLDER = Path(__file__).parents[3] / "benchmarks"
FEWEST_MODELS = 12  # 40 is the goal: `make plan-page` goes on


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not FOLDER.exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(str(FOLDER))
    import plan_table

    yield plan_table
    for name in ("plan_table", "pages", "rows"):
        sys.modules.pop(name, None)


def test_the_page_is_what_its_json_says(table: ModuleType) -> None:
    found = json.loads(table.RESULTS.read_text())
    assert len(found["models"]) >= FEWEST_MODELS
    assert table.PAGE.read_text(encoding="utf-8") == table.page(found)


def test_every_command_is_one_and_plans_the_cells_beside_it(table: ModuleType) -> None:
    found = json.loads(table.RESULTS.read_text())
    lines = table.page(found).splitlines()
    commands = [shlex.split(one) for one in lines if one.startswith("batchfit plan")]
    assert len(commands) >= len(found["models"])
    group: Any = typer.main.get_command(app)
    models = {one["name"]: one for one in found["models"].values()}
    for _, verb, *words in commands:
        given = group.commands[verb].make_context(verb, words).params
        model = models[shape_named(given["target"]).name]
        options = PlanOptions(
            gpus=given["gpus"], seq_len=given["seq_len"], methods=given["methods"], margin=given["margin"]
        )
        titles = [
            f"{one.gpu.name} x{one.count}" if one.count > 1 else one.gpu.name for one in options.columns
        ]
        assert titles == model["gpus"]
        assert [one.gpu.usable_bytes for one in options.columns] == model["usable"]
        assert options.seq_len == model["seq_len"]
        shape = shape_named(model["name"])
        known = {
            one.name
            for one in settings_for(
                shape.task, model_type=shape.kind, methods=options.wanted_methods, several=True
            )
        }
        shown = [one for one in model["rows"] if one["method"] in options.wanted_methods]
        assert shown
        assert {one["setting"] for one in shown} <= known


def _model(*rows: tuple[str, str, list[list[Any]]]) -> dict[str, Any]:
    return {
        "name": "owner/A-1B",
        "task": "causal",
        "parameters": 1_000_000_000,
        "seq_len": 2048,
        "gpus": ["rtx3060", "h100 x8"],
        "usable": [11 * 2**30, 79 * 2**30],
        "rows": [{"setting": name, "method": kind, "note": "", "cells": cells} for name, kind, cells in rows],
        "date": "2026-11-20",
        "cpu_s": 60.0,
    }


def test_the_fastest_row_of_a_method_is_bold_and_the_smallest_gpu_named(table: ModuleType) -> None:
    gib = 2**30
    model = _model(
        ("LoRA", "lora", [[0, 14 * gib, None, False], [2, 60 * gib, 1.0, True]]),
        ("LoRA, checkpoint", "lora", [[3, 10 * gib, 1.0, False], [40, 70 * gib, 0.7, True]]),
        ("full", "full", [[0, 99 * gib, None, False], [0, 98 * gib, None, False]]),
    )
    assert [table.best_rows(model, at) for at in range(2)] == [{"lora": 1}, {"lora": 0}]
    assert [table.smallest(model, one) for one in ("lora", "full", "qlora")] == [
        "rtx3060",
        "none of these",
        "",
    ]
    text = "\n".join(table.model_lines(model, ["rtx3060", "h100x8"]))
    assert "| LoRA | - (14) | **2** · 60.0 |" in text
    assert "| LoRA, checkpoint | **3** · 10.0\N{NO-BREAK SPACE}? | 40 · 70.0 |" in text
    assert "batchfit plan A-1B --method lora --seq-len 2048 --gpu rtx3060,h100x8" in text
    assert "--method qlora" not in text


def test_a_second_call_goes_on_and_other_versions_begin_again(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def planned(name: str) -> dict[str, Any]:
        asked.append(name)
        return _model()

    monkeypatch.setattr(table, "planned", planned)
    out = tmp_path / "table.json"
    one, two = table.MODELS[:2]
    assert not table.run(out, [one, two], -1.0)
    assert asked == []
    assert table.run(out, [one, two], None)
    assert asked == [one, two], "each once"
    monkeypatch.setattr(table, "versions", lambda: {"torch": "9.9"})
    assert table.run(out, [one], None)
    assert asked == [one, two, one]
