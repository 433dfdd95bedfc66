"""The guard of the benchmarks, on planted figures: what is worse, what is noise, what dropped out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parents[3] / "benchmarks"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_guard", FOLDER / "guard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_guard"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


if not (FOLDER / "guard.py").exists():
    pytest.skip("benchmarks are not in the distribution", allow_module_level=True)
guard = load()


class Planted:
    """A subject whose measurements are known; asking more often than planned is an error."""

    def __init__(self, *measurements: dict[str, float]) -> None:
        self.left = list(measurements)

    def __call__(self, subject: str) -> dict[str, float]:
        return self.left.pop(0)


def rows_of(stored: dict[str, float], *measurements: dict[str, float], kind: str = "ratio") -> dict[str, str]:
    planted = Planted(*measurements)
    rows = guard.compared({"s": stored}, {"s": kind}, planted, ["s"])
    assert not planted.left, "not all measurements were asked for"
    return {row.name: row.verdict for row in rows}


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ((1.2,), "as stored"),
        ((1.32,), "as stored"),  # exactly 10 % more
        ((1.33, 1.2), "as stored"),  # it did not repeat
        ((1.33, 1.4, 1.31), "as stored"),
        ((1.33, 1.4, 1.33), "worse"),
        ((1.09,), "as stored"),
        ((1.07,), "better"),
    ],
)
def test_a_ratio_is_worse_only_if_three_measurements_say_so(
    measured: tuple[float, ...], verdict: str
) -> None:
    assert rows_of({"a": 1.2}, *({"a": one} for one in measured)) == {"a": verdict}


def test_the_others_of_a_subject_are_measured_again_too_and_not_blamed() -> None:
    stored = {"bad": 1.0, "good": 1.0}
    noisy = [{"bad": 1.5, "good": 1.0}, {"bad": 1.5, "good": 1.3}, {"bad": 1.5, "good": 1.3}]
    assert rows_of(stored, *noisy) == {"bad": "worse", "good": "as stored"}


@pytest.mark.parametrize(
    ("name", "stored", "now", "verdict"),
    [
        ("trials", 4.7, 4.7 + 1e-12, "as stored"),
        ("trials", 4.7, 4.7025, "worse"),  # one trial more in 400
        ("trials", 4.7, 4.6975, "better"),
        ("OOMs", 0.0, 0.0025, "worse"),
        ("of the maximum", 0.98, 0.9799, "worse"),
        ("of the maximum", 0.98, 0.9801, "better"),
    ],
)
def test_counts_must_not_get_worse_at_all_and_are_asked_once(
    name: str, stored: float, now: float, verdict: str
) -> None:
    assert rows_of({name: stored}, {name: now}, kind="cost") == {name: verdict}


def test_nothing_drops_out_or_comes_in_without_a_word() -> None:
    found = rows_of({"gone": 1.0, "kept": 1.0}, {"kept": 1.0, "new": 1.0})
    assert found == {"gone": "not measured", "kept": "as stored", "new": "not stored"}
    assert all(guard.Row(name, "ratio", None, (1.0,)).failed for name in ("new",))
    assert guard.Row("gone", "ratio", 1.0).failed


@given(
    st.floats(0.01, 100), st.lists(st.floats(0.001, 1000), min_size=1, max_size=3), st.permutations(range(3))
)
def test_the_order_of_measurements_does_not_matter_and_a_good_one_acquits(
    stored: float, measured: list[float], order: list[int]
) -> None:
    row = guard.Row("a", "ratio", stored, tuple(measured))
    shuffled = tuple(measured[at] for at in order if at < len(measured))
    assert guard.Row("a", "ratio", stored, shuffled).verdict == row.verdict
    acquitted = guard.Row("a", "ratio", stored, (*measured[:2], stored)).verdict
    assert acquitted in ("as stored", "better")
    if min(measured) > stored * 1.11:
        assert row.verdict == ("worse" if len(measured) == 3 else "again")


def test_the_table_ends_with_what_failed_and_the_conclusion_names_it() -> None:
    rows = [
        guard.Row("slow", "ratio", 1.0, (1.5, 1.4, 1.6)),
        guard.Row("fine", "ratio", 1.0, (1.01,)),
        guard.Row("fast", "ratio", 1.0, (0.5,)),
        guard.Row("none left", "cost", 0.0, (0.0,)),
    ]
    lines = guard.table(rows).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["figure", "fine", "fast", "none left", "slow"]
    assert lines[-1].split() == ["slow", "1", "1.4", "+40.0%", "worse", "(3", "times)"]
    told = guard.conclusion(rows)
    assert "4 figures, 1 failed: slow" in told
    assert "better than stored (fast)" in told
    assert "better" not in guard.conclusion(rows[1:2])


def test_the_stored_figures_are_those_that_are_measured() -> None:
    stored = json.loads(guard.STORED.read_text())["figures"]
    assert set(stored) == set(guard.SUBJECTS)
    assert all(figures for figures in stored.values())
    timed = [name for subject, kind in guard.KINDS.items() if kind == "ratio" for name in stored[subject]]
    assert all(" / " in name for name in timed)  # never a time


@pytest.mark.parametrize("is_planted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_exit_code_reports_a_planted_regression_of_the_search(is_planted: bool, tmp_path: Path) -> None:
    """Run as `make bench` runs it; the stored figure claims one trial in a thousand fewer."""
    stored = json.loads(guard.STORED.read_text())
    file = tmp_path / "stored.json"
    command = [sys.executable, str(FOLDER / "guard.py"), "run", "--subjects", "search", "--stored", str(file)]

    name = "search, default, held bytes unknown: trials"
    stored["figures"]["search"][name] -= 0.001 * is_planted
    file.write_text(json.dumps(stored))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == is_planted, done.stdout + done.stderr
    assert (f"1 failed: {name}" in done.stdout) is is_planted  # and no other
