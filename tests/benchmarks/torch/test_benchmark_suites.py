"""The comparison of a suite run plain and with `adapt`: what differs, what was refused, its page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import imported


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("trainer_suites", monkeypatch)


def noted(outcome: str = "passed", reason: str = "", **more: Any) -> dict[str, Any]:
    one = {"outcome": outcome, "adapted": 0, "refused": [], "trainings": 0, "batches": 0, "cut": 0}
    return one | ({"reason": reason} if reason else {}) | more


PLAIN = {
    "t.py::A::test_trains": noted(),
    "t.py::A::test_logs": noted(),
    "t.py::A::test_experts": noted(),
    "t.py::A::test_breaks": noted(),
    "t.py::A::test_downloads": noted("failed", "hub.py:1: OSError: Couldn't reach 'x/y' on the Hub"),
    "t.py::A::test_gpu": noted("skipped", "Skipped: test requires accelerator"),
}
CUT = {
    "t.py::A::test_trains": noted(adapted=1, trainings=1, batches=5, cut=4),
    "t.py::A::test_logs": noted(
        "failed", "t.py:2: KeyError: 'loss'", adapted=1, trainings=1, batches=2, cut=2
    ),
    "t.py::A::test_experts": noted("failed", "a.py:3: batchfit.errors.BatchfitError: experts compare tokens"),
    "t.py::A::test_breaks": noted("failed", "t.py:4: AssertionError: 1 != 2", refused=["ValueError: not so"]),
}
UNLOGGED = {"t.py::A::test_logs": noted(), "t.py::A::test_breaks": noted("failed", "t.py:4: the same")}


def test_a_difference_a_refusal_and_a_download_are_told_apart(suites: ModuleType) -> None:
    found = suites.compare(PLAIN, CUT, UNLOGGED)
    assert (found["run"], found["passed"], found["trainings"]) == (4, 1, 2)
    assert (found["batches"], found["batches_cut"]) == (7, 6)
    assert found["refused"] == {"BatchfitError: experts compare tokens": 1, "ValueError: not so": 1}
    assert [(one["test"], one["unlogged"]) for one in found["differences"]] == [
        ("t.py::A::test_logs", "passed"),
        ("t.py::A::test_breaks", "failed"),
    ]
    assert "the hub" in suites.plain_reason(PLAIN["t.py::A::test_downloads"]["reason"])
    assert suites.plain_reason("t.py:9: AssertionError: 3 != 4") == suites.OTHER


def test_the_page_names_each_difference_with_its_reason(
    suites: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"plain": PLAIN, "cut": CUT, "cut-unlogged": UNLOGGED}
    for way, tests in kept.items():
        (tmp_path / f"some-test_t.{way}.json").write_text(json.dumps(tests))
    about = {"suite": "some", "version": "v1", "file": "t.py", "select": "not slow"}
    (tmp_path / "some-test_t.about.json").write_text(json.dumps(about))
    monkeypatch.setattr(suites, "version", lambda package: "1.0")
    out = tmp_path / "found.json"
    suites.gather(argparse.Namespace(work=tmp_path, hub=None, out=out))
    page = suites.page(json.loads(out.read_text()))
    assert "| some: t | 4 | 1 | 1 | cut | 4 | 1 | 1 | 2 | 2 | 7 | 6 |" in page
    by_design, unknown = page.split("**Not understood**")
    assert "- some, t.py: test_logs (cut)" in by_design
    assert "- some, t.py: test_breaks (cut): t.py:4: AssertionError: 1 != 2" in unknown
    assert "BatchfitError" not in page.split("## Refused")[1].split("|\n")[-2]
    monkeypatch.setattr(suites, "EXPLAINED", (("test_breaks", "1 != 2", "By design", "it counts."),))
    page = suites.page(json.loads(out.read_text()))
    assert "**By design: it counts.**\n\n- some, t.py: test_breaks (cut)" in page
    assert "Not understood" not in page
    assert '`t.py`: `-k "not slow"`' in page
