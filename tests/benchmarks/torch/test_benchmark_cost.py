"""The benchmarks of our own cost: how ratios are made, whose a sample is, and that each part runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from benchmark_scripts import FOLDER, run

RESULTS = FOLDER / "results"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def script(name: str) -> ModuleType:
    return __import__(name)


def test_ways_are_run_in_turn_and_the_order_turns_around() -> None:
    turns, ran = script("turns"), []
    ways: dict[str, Any] = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}
    clock = iter(range(100))

    def seconds(work: Any) -> float:
        work()
        return next(clock)

    times = turns.in_turn(ways, 3, seconds=seconds, warm_up=1)
    assert "".join(ran) == "ab" + "ba" + "ab" + "ba"
    assert times == {"a": [1, 2, 5], "b": [0, 3, 4]}


def test_a_ratio_is_the_median_of_pairs_and_not_of_sums() -> None:
    turns = script("turns")
    times = {"ours": [1.1, 9.0, 2.2], "plain": [1.0, 1.0, 2.0]}  # one round was disturbed
    assert turns.ratio(times, "ours", "plain") == pytest.approx(1.1)


def busy() -> None:
    ends = time.process_time() + 0.1
    while time.process_time() < ends:
        pass


def test_cpu_time_of_children_is_theirs_alone() -> None:
    turns = script("turns")
    assert turns.own_cpu_s(busy) >= 0.1
    assert turns.children_cpu_s(busy) == 0

    def both() -> None:
        busy()
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)

    assert turns.children_cpu_s(both) > 0
    assert turns.all_cpu_s(both) > 0.1


class Frame:
    """A stack of files, the innermost first."""

    def __init__(self, *files: str) -> None:
        self.f_code = type("Code", (), {"co_filename": files[0]})
        self.f_back: Any = Frame(*files[1:]) if files[1:] else None


@pytest.mark.parametrize(
    ("files", "whose"),
    [
        (("/site/torch/nn/functional.py", "/a/batchfit/_torch/tries.py"), "batchfit/_torch/tries.py"),
        (("/site/torch/autograd/graph.py", "/a/batchfit/_torch/tries.py"), "the program"),
        (("/site/torch/_ops.py", "/a/batchfit/_torch/virtual.py"), "the program"),
        (("/site/torch/_subclasses/fake_tensor.py", "/site/torch/_ops.py"), "torch's fake tensors"),
        (("/site/torch/nn/linear.py", str(FOLDER / "cost_cpu.py"), "/a/batchfit/_find.py"), "the program"),
        (("/python/selectors.py", str(FOLDER / "own_cost.py")), "the rest"),
    ],
)
def test_a_sample_belongs_to_the_innermost_frame_that_names_it(files: tuple[str, ...], whose: str) -> None:
    frame: FrameType = Frame(*files)  # type: ignore[assignment]
    assert script("own_cost").owner(frame) == whose


def test_shares_add_up_to_one_and_the_timer_is_stopped() -> None:
    found = script("own_cost").sampled(busy, 2)
    assert found["samples"] > 0
    assert found["shares"] == {"the rest": pytest.approx(1)}
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_neither_start_loads_torch_or_pydantic() -> None:
    import_time = script("import_time")
    assert import_time.loaded(import_time.STARTS["import batchfit"]) == []
    assert set(import_time.loaded(import_time.HELP)) == {"typer", "rich", "typing"}
    assert import_time.loaded("import typing") == ["typing"]


@pytest.mark.slow
def test_a_trace_gives_the_ratio_that_the_guard_stores() -> None:
    cost_cpu = script("cost_cpu")
    stored = json.loads((RESULTS / "guard.json").read_text())["figures"]
    measure, _ = cost_cpu.PARTS["trace"]
    assert set(measure(1)["ratios"]) == set(stored["trace"])


@pytest.mark.slow
def test_the_long_parts_run_as_they_are_called(tmp_path: Path) -> None:
    stored = json.loads((RESULTS / "guard.json").read_text())["figures"]
    out, parts = tmp_path / "cost.json", ("microbatch", "loader", "find", "virtual")
    run("cost_cpu", "run", "--parts", *parts, "--rounds", "1", "--out", str(out))
    found = json.loads(out.read_text())
    for part in parts:
        assert set(found[part]["ratios"]) == set(stored[part])
    assert "| find / the steps that it ran |" in run("cost_cpu", "page", str(out))


@pytest.mark.slow
def test_votes_and_a_trace_of_the_growth(tmp_path: Path) -> None:
    out = tmp_path / "growth.json"
    run("growth", "run", "--parts", "votes", "--out", str(out))
    assert set(json.loads(out.read_text())["votes"]) == {"1", "2", "3", "4"}
    assert json.loads(run("growth", "one", "9 M"))["layers"] == 6
    assert "## A decision of all ranks" in run("growth", "page", str(out))
