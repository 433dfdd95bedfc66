"""The benchmarks of the noise scale, as far as a CPU can run them: their parts and their pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import run


@pytest.mark.slow
def test_planted_scales_go_on_where_they_were(tmp_path: Path) -> None:
    out = str(tmp_path / "planted.json")
    assert run("noise_planted", "run", "--seeds", "2", "--deadline-s", "0", "--out", out) == "38 cells left\n"
    assert run("noise_planted", "run", "--seeds", "2", "--out", out) == "0 cells left\n"
    cells = json.loads(Path(out).read_text())["cells"]
    assert cells["64 8x16 ragged exact"]["median"] == pytest.approx(64, rel=0.1)
    page = run("noise_planted", "page", out)
    assert "| 64 | 8x16 ragged | exact | 0% |" in page
    assert len(page.splitlines()) > 38


@pytest.mark.slow
def test_schedules_at_equal_tokens(tmp_path: Path) -> None:
    out = str(tmp_path / "smoke.json")
    smoke = ("run", "--smoke", "--seeds", "0", "--ways", "constant", "smith", "noise, bound", "--out", out)
    assert "0 runs left" in run("schedules_gpu", *smoke)
    runs = json.loads(Path(out).read_text())["runs"]
    assert (runs["constant/0"]["updates"], runs["smith/0"]["updates"]) == (320, 179)
    assert runs["noise, bound/0"]["decisions"]
    for one in runs.values():
        assert one["floor"] < one["loss"] < 3.6
    assert run("schedules_gpu", *smoke) == "0 runs left\n"
    assert "| smith | 1 |" in run("schedules_gpu", "page", out)


@pytest.mark.slow
def test_smoke_of_the_overhead(tmp_path: Path) -> None:
    out = str(tmp_path / "smoke.json")
    assert "0 parts left" in run("noise_gpu", "run", "--smoke", "--out", out)
    assert json.loads(Path(out).read_text())["cheap"]["steps_seen"] == 4
    assert "| exact |" in run("noise_gpu", "page", out)
