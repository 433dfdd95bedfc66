"""A sweep on several devices: a child process each, whatever happens to one of them."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep_targets as targets
from child_path import CHILD_PATH
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import batchfit
from batchfit import SweepRecord, SweepResult
from batchfit._engine.trial import child_main as child_side
from batchfit._sweep import devices as sweep_devices
from batchfit._sweep.devices import Devices
from batchfit._sweep.engines import engine_of
from batchfit._sweep.job import Job
from batchfit._sweep.pure.grid import plan
from batchfit._sweep.pure.options import SweepOptions
from batchfit._sweep.pure.visible_devices import VisibleDevice
from batchfit._sweep.ranks import RankAnswer, may_go_on, settle
from batchfit._sweep.run_state import SweepSettings
from batchfit._sweep.worker import Death
from batchfit.errors import BatchfitError, SearchStoppedError

QUICK: dict[str, Any] = {"soak_steps": 0, "steps": 2, "batch_size": 4, "budget": "64MiB"}
SUPPORT = Path(__file__).parents[2] / "support"


def pids(folder: Path, number: int) -> list[str]:
    return (folder / f"made-{number}").read_text().split()


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
def test_the_file_is_that_of_one_process(tmp_path: Path) -> None:
    files = {"here": None, "devices": ["cpu", "cpu:1"]}
    results = {}
    for name, devices in files.items():
        results[name] = batchfit.sweep(
            targets.make,
            targets.KNOBS,
            measure=targets.measure,
            devices=devices,
            output=tmp_path / name,
            **targets.SETTINGS,
        )
    assert results["devices"].without_timings() == results["here"].without_timings()
    again = SweepResult.from_json((tmp_path / "devices").read_text())
    assert again == results["devices"]
    assert {one.error is None for one in again.records} == {True, False}


@pytest.mark.parametrize("deaths", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_child_that_is_killed_is_noticed(tmp_path: Path, deaths: int) -> None:
    events = []
    knobs = {"folder": [str(tmp_path)], "number": [1, 2, 3, 4], "deaths": [deaths]}
    result = batchfit.sweep(
        targets.dying, knobs, devices="cpu,cpu", on_event=events.append, output=tmp_path / "out", **QUICK
    )
    assert [one.knobs["number"] for one in result.records] == [1, 2, 3, 4]
    assert len([event for event in events if event.kind == "record"]) == 4
    assert len(set(pids(tmp_path, 2))) == 2  # once more, in another process
    assert all(len(pids(tmp_path, number)) == 1 for number in (1, 3, 4))
    two = result.records[1]
    if deaths == 1:
        assert (two.error, two.batch_size_used) == (None, 2)
    else:
        assert two.error == (
            "ChildDiedError: the process that ran it on cpu was killed (SIGKILL, as the system does when RAM "
            "is exhausted), 2 times"
        )
        assert two.failed_in == "factory"
    assert [one.batch_size_used for one in result.records if one is not two] == [1, 3, 4]


def test_a_dead_device_costs_its_child_only() -> None:
    result = batchfit.sweep(
        targets.poisoned, {"number": [1, 2, 3]}, devices=["cpu"], measure=targets.process, **QUICK
    )
    first, second, third = result.records
    assert first.error is not None
    assert "illegal memory access" in first.error
    assert (second.error, third.error) == (None, None)
    assert second.measures == third.measures  # one child for both
    assert second.measures["pid"] != os.getpid()
    assert second.measures["visible"] == ""  # on a CPU no GPU is seen


@pytest.mark.slow
def test_what_children_print_and_say_comes_out_here(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = []
    result = batchfit.sweep(
        targets.whoami,
        {"number": [1, 2]},
        devices="cpu",
        estimate=targets.half,
        on_event=lambda event: kinds.append((event.kind, event.knobs["number"])),
        **QUICK,
    )
    assert capsys.readouterr().out == "made 1\nmade 2\n"
    assert kinds[0] == ("begin", 1)
    assert [kind for kind, number in kinds if number == 2][-2:] == ["using", "record"]
    assert [one.estimate for one in result.records] == [2, 2]


DRAWING = """
import numpy
import torch

torch.rand(3)  # once in a process, and no part of any configuration

def make(number):
    return lambda batch_size: torch.rand(batch_size)

def measure(workload, size):
    return {"numpy": numpy.random.rand(), "torch": torch.rand(()).item()}
"""


def test_random_numbers_are_those_of_the_configuration_in_a_new_process(tmp_path: Path) -> None:
    """There `numpy.random` and the user's module are loaded for the first time."""
    (tmp_path / "drawing.py").write_text(DRAWING)
    targets_there = [f"{tmp_path}/drawing.py:{name}" for name in ("make", "measure")]
    measured = []
    for devices in (None, "cpu"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the step has no state to declare
            result = batchfit.sweep(
                targets_there[0], {"number": [1]}, measure=targets_there[1], devices=devices, **QUICK
            )
        measured.append(result.at(number=1).measures)
    assert measured[0] == measured[1] != {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"factory": lambda number: None}, "factory must be a function at the top of a module, or its name "
         "as 'file.py:function', where other processes run it, not <lambda>"),
        ({"measure": lambda workload, size: {}}, "measure must be a function at the top of a module"),
        ({"estimate": lambda configuration, size: 3}, "estimate must be a function at the top of a module"),
        ({"factory": functools.partial(targets.dying, open(os.devnull))},  # noqa: SIM115
         "factory must be a function at the top of a module"),
        ({"device": "cpu"}, "device must be None with devices, not 'cpu'"),
        ({"devices": ["cuda:9"]}, "devices must be among"),
        ({"engine": "ray"}, "devices must be None with engine, which chooses its own, not 'cpu'"),
        ({"engine": "rya", "devices": None}, "engine must be 'ray', a callable or None, not 'rya'; did you "
         "mean ray?"),
        ({"engine": 3, "devices": None}, "engine must be 'ray', a callable or None, not 3"),
        ({"num_gpus": 1}, "num_gpus must be None without engine='ray', not 1"),
        ({"ray_address": "auto"}, "ray_address must be None without engine='ray', not 'auto'"),
    ],
)  # fmt: skip
def test_what_no_process_could_run_is_refused(change: dict[str, Any], text: str) -> None:
    asked: dict[str, Any] = {"factory": targets.whoami, "devices": "cpu", **QUICK, **change}
    factory = asked.pop("factory")
    knobs = {"number": [1], "deaths": [0]} if isinstance(factory, functools.partial) else {"number": [1]}
    with pytest.raises((TypeError, ValueError)) as caught:
        batchfit.sweep(factory, knobs, **asked)
    assert str(caught.value).startswith(text), caught.value


def of_main(value: Any) -> float:
    return 0.5


@pytest.mark.parametrize("given", ["factory", "estimate"])
def test_what_is_of_the_main_module_inside_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has another main module: it would die of it, at every configuration."""
    monkeypatch.setattr(of_main, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    whole = functools.partial(targets.whoami, label=of_main) if given == "factory" else targets.whoami
    estimate = {"number": of_main} if given == "estimate" else None
    with pytest.raises(TypeError, match=rf"^{given} must be .* with something of the main module in it$"):
        batchfit.sweep(whole, {"number": [1]}, estimate=estimate, devices="cpu", **QUICK)


def test_what_a_child_cannot_load_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no configuration is recorded as failed for it."""
    (tmp_path / "only_here.py").write_text("def make(number): return lambda batch_size: None\n")
    monkeypatch.syspath_prepend(tmp_path)
    make = importlib.import_module("only_here").make
    (tmp_path / "only_here.py").write_text("1 / 0\n")
    file = tmp_path / "out.json"
    with pytest.raises(BatchfitError, match=r"cannot load its functions: .*Error"):
        batchfit.sweep(make, {"number": [1, 2]}, devices="cpu", output=file, **QUICK)
    assert not file.exists()


def test_no_engine_of_ones_own_choice_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="devices must be None under torchrun"):
        engine_of(SweepOptions(devices="cpu"))
    with pytest.raises(ValueError, match="engine must be None under torchrun"):
        engine_of(SweepOptions(engine="ray"))


def test_children_have_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_side, "active", True)
    with pytest.raises(BatchfitError, match=r"called again in a child .* under if __name__"):
        batchfit.sweep(targets.whoami, {"number": [1]}, devices="cpu", **QUICK)


def test_children_that_cannot_start_end_the_sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("batchfit._sweep.worker.MODULE", "no_such_module")
    with pytest.raises(SearchStoppedError, match=r"a child process on cpu exited .* 3 times in a row"):
        batchfit.sweep(targets.whoami, {"number": [1]}, devices="cpu", output=tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_an_engine_of_ones_own() -> None:
    def backwards(job: Any, waiting: Any, on_event: Any) -> Any:
        for entry in reversed(waiting):
            yield job.run(entry.configuration, on_event)

    seen: list[int] = []
    result = batchfit.sweep(
        targets.whoami,
        {"number": [1, 2, 3]},
        engine=backwards,
        on_record=lambda record: seen.append(record.knobs["number"]),
        **QUICK,
    )
    assert seen == [3, 2, 1]
    assert [one.knobs["number"] for one in result.records] == [1, 2, 3]


SCRIPT = """
import sys
import batchfit
from sweep_targets import slow

def make(folder, number):
    return slow(folder, number)

if __name__ == "__main__":
    batchfit.sweep(make, {{"folder": [{folder!r}], "number": [1, 2, 3, 4]}}, devices="cpu,cpu",
                   output={output!r}, resume=True, soak_steps=0, steps=2, batch_size=4, budget="64MiB")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_stopped_in_the_middle_and_resumed(tmp_path: Path, how: signal.Signals) -> None:
    """The factory is in the main file. Ctrl-C or kill -9: no child lives on, and the file is whole."""
    folder, output, script = tmp_path / "notes", tmp_path / "out.json", tmp_path / "main.py"
    folder.mkdir()
    script.write_text(SCRIPT.format(folder=str(folder), output=str(output)))
    environment = {**os.environ, "PYTHONPATH": f"{CHILD_PATH}:{SUPPORT}"}
    command = [sys.executable, str(script)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (output.exists() and len(list(folder.glob("begun-[34]-*"))) == 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(how)
    process.communicate(timeout=30)
    children = [int(path.name.split("-")[2]) for path in folder.iterdir()]
    while any(lives(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kept = SweepResult.from_json(output.read_text())
    assert {one.knobs["number"] for one in kept.records} == {1, 2}
    (folder / "hurry").touch()
    subprocess.run(command, env=environment, check=True, timeout=100)
    whole = SweepResult.from_json(output.read_text())
    assert [one.batch_size_used for one in whole.records] == [1, 2, 3, 4]
    assert len(list(folder.glob("begun-[12]-*"))) == 2  # none was run again


class Scripted:
    """A worker that lives and dies as a script says: "record", "death", "bad start", "dead device"."""

    script: list[str]
    begun: list[str]

    def __init__(self, job: str, *, environment: Any = None) -> None:
        self.child = self.entry = None
        self.trials: list[Any] = []

    def begin(self, entry: Any) -> None:
        assert self.entry is None  # one at a time
        self.entry = entry

    def said(self) -> Iterator[Any]:
        entry, self.entry = self.entry, None
        if entry is None:
            return
        how = self.script.pop(0) if self.script else "record"
        if how == "bad start":
            yield Death("exited", started=False)
            return
        self.begun.append(entry.key)
        if how == "death":
            yield Death("was killed", started=True)
        else:
            dead = "device_died" if how == "dead device" else ""
            yield SweepRecord(knobs=dict(entry.configuration), batch_size_used=1, stopped_because=dead)

    def failed(self, entry: Any, error: str) -> SweepRecord:
        return SweepRecord(knobs=dict(entry.configuration), error=error)

    def end(self, *, gently: bool = False) -> None:
        self.child = self.entry = None


@given(
    script=st.lists(st.sampled_from(["record", "death", "bad start", "dead device"]), max_size=30),
    count=st.integers(1, 12),
    devices=st.integers(1, 4),
)
@examples(150)
def test_whatever_dies_each_configuration_has_one_record(script: list[str], count: int, devices: int) -> None:
    Scripted.script, Scripted.begun = list(script), []
    entries = plan({"n": list(range(count))})
    engine = Devices(tuple(VisibleDevice("cpu") for _ in range(devices)))
    records: list[SweepRecord] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_devices, "Worker", Scripted)
        patch.setattr(sweep_devices, "portable", lambda job: "")
        patch.setattr(sweep_devices, "wait_for_any", lambda children: None)
        try:
            for record in engine(Job("x.py:make", SweepSettings(batch_size=1)), entries, lambda event: None):
                records.append(record)
        except SearchStoppedError:
            assert "bad start" in script
        else:
            assert sorted(one.key for one in records) == sorted(entry.key for entry in entries)
    assert len({one.key for one in records}) == len(records)
    for record in records:
        assert Scripted.begun.count(record.key) <= 2
        assert record.error is None or Scripted.begun.count(record.key) == 2


# What all ranks answer is one record


def answer(error: str | None = None, *, failed_in: Any = "factory", size: int = 4) -> RankAnswer:
    return RankAnswer(
        SweepRecord(knobs={"a": 1}, batch_size_used=size, error=error, failed_in=failed_in if error else None)
    )


def test_one_record_of_all_ranks() -> None:
    assert settle([answer(), answer()]) == answer().record
    assert settle([answer("E: x"), answer("E: x")]) == answer("E: x").record
    one = settle([answer(), answer("E: x")])
    assert one is not None
    assert one.error == "E: x (on rank 1)"
    cut = settle([RankAnswer(), answer("E: x")])
    assert cut is not None
    assert cut.error == "E: x (on rank 1)"
    because = settle([answer("RankMissingError: rank 1"), answer("E: x")])
    assert because is not None
    assert because.error == "E: x (on rank 1)"
    assert settle([answer(), RankAnswer(death="was killed")]) is None
    assert settle([answer("RankMissingError: rank 1"), RankAnswer(death="was killed")]) is None
    assert settle([answer(), RankAnswer()]) is None


def test_children_go_on_only_where_all_are_as_before() -> None:
    assert may_go_on([answer(), answer()])
    assert may_go_on([answer("E: x"), answer("E: x")])
    assert may_go_on([answer("NothingFitsError: x", failed_in="search")] * 2)
    assert not may_go_on([answer("E: x", failed_in="search")] * 2)
    assert not may_go_on([answer("E: x"), answer("E: y")])
    assert not may_go_on([answer(), answer("E: x")])
    assert not may_go_on([answer(), RankAnswer()])
    reported = answer("E: x")
    assert RankAnswer.of(reported.as_json()) == reported
    assert RankAnswer.of(RankAnswer(death="gone").as_json()) == RankAnswer(death="gone")
