"""The driver of the GPU benchmarks: what is complete, left, ended or failed is told apart."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
FAKES = {
    "complete": "print('a: is there'); print('0 rows left')",
    "behind": "print('2 rows left')",
    "broken": "raise RuntimeError('no such card')",
    "endless": "import subprocess, sys, time; print('1 rows left', flush=True)\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()",
}


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not SCRIPT.exists():
        pytest.skip("benchmarks are not in the distribution")
    spec = importlib.util.spec_from_file_location("benchmark_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_gpu", module)  # dataclasses look it up
    spec.loader.exec_module(module)
    for name, code in FAKES.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "GRACE_S", 0.1)
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    return module


@pytest.mark.parametrize(
    ("name", "deadline_s", "complete", "told"),
    [
        ("complete", 30.0, True, "complete run: complete"),
        ("behind", 30.0, False, "behind run: 2 left ("),
        ("broken", 30.0, False, "failed with 1: RuntimeError: no such card, see broken.log"),
        ("endless", 1.5, False, "endless run: 1 left, ended at the deadline"),
    ],
)
def test_each_end_is_reported(
    driver: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    deadline_s: float,
    complete: bool,
    told: str,
) -> None:
    parts = (driver.Part(name, name, ("run",), name), driver.Part("after", "complete", ("run",), "after"))
    monkeypatch.setattr(driver, "PARTS", parts)
    begun = time.monotonic()
    assert driver.run(tmp_path / "out", deadline_s, [name], False) is complete
    assert told in capsys.readouterr().out
    assert time.monotonic() - begun < 30  # what hangs is ended, and what it started too


def test_the_others_go_on_after_one_that_failed(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        driver.Part("b", "broken", ("run",), "b"),
        driver.Part("c", "complete", ("run",), "c"),
        driver.Part("d", "complete", ("run",), "d", alone=False),
        driver.Part("e", "behind", ("run",), "e", alone=False),
    )
    monkeypatch.setattr(driver, "PARTS", parts)
    assert not driver.run(tmp_path / "out", 30.0, [], False)
    assert [line.split(" (")[0].split(":")[1].strip() for line in capsys.readouterr().out.splitlines()] == [
        "failed with 1",
        "complete",
        "complete",
        "2 left",
    ]


def test_the_order_is_the_users_and_quick_takes_what_has_a_short_form(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = (
        driver.Part("a", "complete", ("run", "a"), "a", quick=("short",)),
        driver.Part("b", "behind", ("run", "b"), "b", quick=()),
        driver.Part("c", "broken", ("run",), "c"),
    )
    monkeypatch.setattr(driver, "PARTS", parts)
    assert not driver.run(tmp_path / "out", 30.0, ["b", "a"], False)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "behind run b",
        "complete run a",
    ]
    driver.run(tmp_path / "out", 30.0, [], True)
    assert "broken" not in capsys.readouterr().out


def test_pages_carry_the_tag_and_all_that_is_made_from_them_follows(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "import pathlib, sys; here = pathlib.Path(__file__)\n"
    note += "with (here.parent / 'calls').open('a') as calls: print(here.stem, *sys.argv[1:], file=calls)"
    for name in ("find_gpu", "ragged_gpu", "prediction_gpu", "plots", "summary"):
        (tmp_path / f"{name}.py").write_text(note)
    (tmp_path / "results").mkdir()
    kept = tmp_path / "gpu"
    kept.mkdir()
    for name in ("find", "ragged", "truth"):
        (kept / f"{name}.json").write_text("{}")
    driver.pages(kept, "h200_209901")
    calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
    assert sorted(calls[:-2]) == [
        "find_gpu page gpu/find.json --to results/find_h200_209901.json",
        "prediction_gpu page gpu --to results/prediction_h200_209901.json",
        "ragged_gpu page gpu/ragged.json --to results/ragged_h200_209901.md",
    ]
    assert calls[-2:] == ["plots write", "summary write"]
    assert (tmp_path / "results" / "ragged_h200_209901.json").exists()


def test_a_folder_begins_with_what_is_kept(driver: ModuleType, tmp_path: Path) -> None:
    results, folder = tmp_path / "results", tmp_path / "gpu"
    results.mkdir()
    folder.mkdir()
    for name in ("find", "ragged", "noise", "prediction"):
        (results / f"{name}_h200_209901.json").write_text('"kept"')
    (folder / "ragged.json").write_text('"newer"')
    driver.begin_with_kept(folder, "h200_209901", ["find", "ragged", "prediction"])
    assert {one.name: one.read_text() for one in folder.iterdir()} == {
        "find.json": '"kept"',
        "ragged.json": '"newer"',
    }
    driver.begin_with_kept(folder, "h200_209901", [])
    assert (folder / "noise.json").exists()


def test_a_run_that_is_ended_while_it_writes_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SCRIPT.exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import rows

    out = tmp_path / "run.json"
    rows.keep(out, {"a": 1})
    whole = out.read_text()

    def ended(path: Path, text: str) -> int:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", ended)
        with pytest.raises(KeyboardInterrupt):
            rows.keep(out, {"a": 1, "b": 2})
    assert out.read_text() == whole
    rows.keep(out, {"a": 1, "b": 2})
    assert '"b": 2' in out.read_text()


def test_ranks_that_had_no_time_are_left_for_another_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not SCRIPT.exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import ranks_gpu

    def measured(rounds: int) -> None:
        times = {name: [1.0] * rounds for name in ranks_gpu.CONTENDERS}
        found = {"seconds": times, "in_votes_s": times, "vote_s": [0.1]}
        monkeypatch.setattr(ranks_gpu, "both_ranks", lambda *_: found)

    monkeypatch.setattr(ranks_gpu, "about", lambda smoke: {})
    given = argparse.Namespace(out=tmp_path / "ranks.json", smoke=False, deadline_s=60.0)
    measured(ranks_gpu.LEAST - 1)
    ranks_gpu.run(given)
    assert "2 parts left" in capsys.readouterr().out
    assert not given.out.exists()
    measured(ranks_gpu.LEAST)
    ranks_gpu.run(given)
    assert "0 parts left" in capsys.readouterr().out
