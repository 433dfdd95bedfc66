"""`batchfit sweep` as a person or a script meets it; the two examples, killed and resumed."""

from __future__ import annotations

import inspect
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from child_path import CHILD_PATH
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from warm import run_python

import batchfit
from batchfit import SweepEvent, SweepRecord, SweepResult
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.sweep import sweep as command
from batchfit._cli.sweep.sweep import sweep_file
from batchfit._cli.sweep.sweep_file import NEEDED, OPTIONAL, SweepFile
from batchfit._cli.sweep.sweep_flags import SweepFlags
from batchfit._cli.sweep.sweep_table import Pace, SweepLines, SweepTable, column_widths
from batchfit._sweep.job import Job
from batchfit._sweep.pure.grid import plan
from batchfit._sweep.pure.options import SweepOptions

ROOT = Path(__file__).parents[3]
with batchfit.virtual_memory("64MiB"):  # what this imports is frozen before the first test
    nn.Linear(1, 1)(torch.zeros(1, 1))
MODEL = """
import batchfit
from batchfit.testing import simulated_oom

def make(most, fails=()):
    print("the factory prints")
    if most in fails:
        raise ValueError(f"not {most}")
    if most == 99:
        raise KeyboardInterrupt
    def step(size):
        if size > most:
            raise simulated_oom()
    return batchfit.Workload(step, state=[])

def measure(workload, size):
    return {"twice": 2 * size}

def half(configuration, batch_size):
    return batch_size // 2

def nothing(most):
    return batchfit.Workload(half_done, state=[])

def half_done(size):
    raise simulated_oom()
"""
SWEEP = """\
factory: model.py:make
measure: model.py:measure
knobs:
  most: [3, 5, 7]
batch_size: 6
budget: 64MiB
steps: 2
soak_steps: 0
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("model", None)


def run(*sets: str, file: str = "sweep.yaml", **flags: Any) -> Code:
    return sweep_file(Path(file), SweepFlags(sets=sets, **flags))


def refused(*sets: str, **flags: Any) -> CommandFailed:
    with pytest.raises(CommandFailed) as caught:
        run(*sets, **flags)
    return caught.value


def test_a_file_may_set_every_keyword_of_sweep() -> None:
    keywords = set(inspect.signature(batchfit.sweep).parameters)
    # the rest are flags, and objects of a program's own
    rest = {"resume", "retry_failed", "overwrite", "on_record", "on_event"}
    assert keywords == {*NEEDED, *OPTIONAL, *rest}
    defaults = {name: one.default for name, one in inspect.signature(batchfit.sweep).parameters.items()}
    assert {one.name: one.default for one in fields(SweepOptions)} == {
        name: default for name, default in defaults.items() if name not in NEEDED
    }


def test_every_flag_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from batchfit._cli.app import app

    seen: list[Any] = []

    def catch(path: Path, flags: SweepFlags) -> Code:
        seen.append((path, flags))
        return Code.SOME_FAILED

    monkeypatch.setattr(command, "sweep_file", catch)
    arguments = ["--devices", "cpu,cpu", "--engine", "ray", "--ray-address", "auto"]
    arguments += ["--set", "a=1", "--set", "b=2", "--output", "o.json", "--resume", "--retry-failed"]
    arguments += ["--overwrite", "--csv", "o.csv", "--json", "--dry-run", "--traceback"]
    ran = CliRunner().invoke(app, ["sweep", "s.yaml", *arguments])
    assert ran.exit_code == 7, ran.output
    everything = SweepFlags(
        sets=["a=1", "b=2"], devices="cpu,cpu", engine="ray", ray_address="auto",
        output=Path("o.json"), resume=True, retry_failed=True, overwrite=True,
        csv=Path("o.csv"), as_json=True, dry_run=True, full_traceback=True,
    )  # fmt: skip
    assert seen == [(Path("s.yaml"), everything)]


def test_a_table_files_and_log_lines(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(csv=Path("out.csv")) == Code.FOUND
    out, err = capsys.readouterr()
    table = [line.split() for line in out.splitlines() if "prints" not in line]
    assert table[:4] == [
        ["most", "batch_size_used", "twice"], ["3", "3", "6"], ["5", "5", "10"], ["7", "6", "12"],
    ]  # fmt: skip
    assert "saved: sweep-results.json, out.csv" in out
    assert "Testing most=5\n" in err
    assert "Using batch size: 5 for most=5\n" in err
    assert "2 of 3 configurations, about " in err
    kept = SweepResult.from_json((project / "sweep-results.json").read_text())
    assert [one["batch_size_used"] for one in kept.summary] == [3, 5, 6]
    assert kept.settings["factory"] == "model.py:make"
    assert (project / "out.csv").read_text().splitlines()[1] == "3,3,6,"


def test_a_table_that_cannot_be_saved_is_shown(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SweepResult, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SweepResult, "to_csv", full)
    failed = refused(csv=Path("out.csv"))
    assert failed.code == Code.BROKEN
    assert failed.text == "the result could not be saved to out.csv: No space left on device"
    out, _ = capsys.readouterr()
    assert "batch_size_used" in out
    assert "saved: sweep-results.json\n" in out


def test_the_file_can_be_run_from_anywhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert run(file="../sweep.yaml") == Code.FOUND
    assert [path.name for path in folder.iterdir()] == ["sweep-results.json"]
    monkeypatch.chdir(project)
    sys.modules.pop("model", None)
    # the same sweep, whatever folder it is run from
    assert run(output=folder / "sweep-results.json", resume=True) == Code.FOUND


def test_a_dry_run_runs_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("start_from=5", "estimate=model.py:half", "batch_size=9")
    assert run(*sets, dry_run=True) == Code.FOUND
    out = capsys.readouterr().out
    assert [line.split(maxsplit=2) for line in out.splitlines()[1:4]] == [
        ["3", "-", "skipped: it stands before most=5"],
        ["5", "4", "run"],
        ["7", "4", "run"],
    ]
    assert "2 of 3 configurations would be run (strategy guided, at most 9)" in out
    assert "prints" not in out
    assert not (project / "sweep-results.json").exists()
    run()
    capsys.readouterr()
    run(dry_run=True, resume=True)
    assert "0 of 3 configurations would be run" in capsys.readouterr().out
    assert run("auto=false", dry_run=True) == Code.FOUND
    assert "3 of 3 configurations would be run (fixed at 6)" in capsys.readouterr().out


def test_a_dry_run_for_machines(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run("start_from=5", "estimate=model.py:half", "batch_size=9", dry_run=True, as_json=True)
        == Code.FOUND
    )
    assert json.loads(capfd.readouterr().out) == {
        "kind": "sweep_plan",
        "schema_version": 1,
        "configurations": [
            {"knobs": {"most": 3}, "begins_with": None, "skipped": "it stands before most=5"},
            {"knobs": {"most": 5}, "begins_with": 4, "skipped": None},
            {"knobs": {"most": 7}, "begins_with": 4, "skipped": None},
        ],
    }
    with pytest.raises(CommandFailed, match=r"csv must be left out with --dry-run"):
        run(dry_run=True, csv=Path("out.csv"))


def test_some_that_fail_have_a_code_of_their_own(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("knobs={most: [3, 5], fails: [[3], []]}", "mode=zip")
    assert run(*sets) == Code.SOME_FAILED
    out, err = capsys.readouterr()
    assert "✗ most=3, fails=[3] failed: ValueError: not 3" in err
    assert "most=3, fails=[3]: ValueError: not 3 (at model.py:8)" in out
    assert run(*sets, resume=True) == Code.SOME_FAILED
    assert "Testing" not in capsys.readouterr().err
    assert run(*sets, resume=True, retry_failed=True) == Code.SOME_FAILED
    assert capsys.readouterr().err.count("Testing") == 1


def test_all_that_fail_are_an_error_with_its_line(project: Path) -> None:
    failed = refused("knobs={most: [3, 5], fails: [[3, 5]]}")
    assert (failed.code, failed.text) == (
        Code.RAISED,
        "every configuration failed; most=3, fails=[3, 5] in factory at model.py:8: ValueError: not 3",
    )
    failed = refused("factory=model.py:nothing", overwrite=True)
    assert failed.code == Code.NOTHING_FITS


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("batch_size: 6->batch_sise: 6", "sweep.yaml:5: 'batch_sise' must be one of factory, knobs, mode, "),
        ("[3, 5, 7]->[]", "sweep.yaml:4: the knob 'most' must have at least one value, not none"),
        ("[3, 5, 7]->3", "sweep.yaml:4: the knob 'most' must have a list of values, not 3"),
        ("[3, 5, 7]->\n    - 3\n    - 5\n    - 3",
         "sweep.yaml:7: the knob 'most' must have each value once, not 3 twice"),
        ("  most: [3->  least: [3", "sweep.yaml:4: the knob 'least' must be an argument of the factory at "
         "model.py:5, which takes most, fails"),
        ("knobs:\n  most: [3, 5, 7]\n->knobs:\n- {most: 1}\n- {most: 2}\n- {most: 1}\n",
         "sweep.yaml:6: each configuration must come once: number 3 is number 1 again (most=1)"),
        ("steps: 2\n->steps: 2\nstart_from:\n  most: 4\n",
         "sweep.yaml:9: start_from must be among the values of 'most' (3, 5, 7), not 4"),
        ("steps: 2\n->steps: 2\nestimate: {most: crop}\n",
         "sweep.yaml:8: estimate for 'most' must be one of crops, top_k or arithmetic over the knobs (most), "
         "not 'crop': 'crop' is no knob; did you mean crops?"),
        ("steps: 2\n->steps: 2\nestimate:\n  most: most - 5\n",
         "sweep.yaml:9: the estimate for 'most' must be a positive factor at most=3, not -2"),
        ("batch_size: 6->batch_size: many",
         "sweep.yaml:5: batch_size must be a positive integer or None, not 'many'"),
        ("steps: 2\n->steps: 1\n", "sweep.yaml:7: steps must be an integer of at least 2, not 1"),
        ("budget: 64MiB->budget: lots",
         "sweep.yaml:6: budget must be bytes or text such as '24GiB' or '800MiB', not 'lots'"),
        ("steps: 2\n->strategy: luck\n", "sweep.yaml:7: strategy must be one of guided, bisect, "),
        ("steps: 2\n->steps: 2\nbatch_size: 3\n",
         "sweep.yaml:8: batch_size must be given once, not again (line 5)"),
        ("model.py:make->model.py:mkae", "sweep.yaml:1: there is no 'mkae' in model.py (target "
         "model.py:mkae); did you mean model.py:make?"),
        ("model.py:make->models.py:make", "sweep.yaml:1: the file models.py of the target "
         "models.py:make does not exist; did you mean model.py:make?"),
        ("model.py:measure->model.py:meas", "sweep.yaml:2: there is no 'meas' in model.py (target "
         "model.py:meas); did you mean model.py:measure?"),
        ("model.py:make->[1]", "sweep.yaml:1: factory must be file.py:function, not [1]"),
        ("factory: model.py:make\n->", "sweep.yaml: factory or command must be given to a sweep, and is not"),
        ("knobs:\n  most: [3, 5, 7]\n->", "sweep.yaml: knobs must be given to a sweep, and is not"),
        ("knobs:->knobs: [", "'sweep.yaml' must be YAML, and is not: "),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(change: str, text: str, project: Path) -> None:
    before, _, after = change.partition("->")
    assert before in SWEEP
    (project / "sweep.yaml").write_text(SWEEP.replace(before, after, 1))
    failed = refused()
    assert failed.code == Code.USAGE
    assert failed.text.startswith(text), failed.text
    assert not (project / "sweep-results.json").exists()


def test_json_files_have_lines_too(project: Path) -> None:
    (project / "sweep.json").write_text('{\n  "factory": "model.py:make",\n  "knobs": {"most": []}\n}\n')
    failed = refused(file="sweep.json")
    assert failed.text == "sweep.json:3: the knob 'most' must have at least one value, not none"


@pytest.mark.parametrize(
    ("one", "text"),
    [
        ("batch_size=0", "--set batch_size=0: batch_size must be a positive integer or None, not 0"),
        ("batch_size", "--set must be KEY=VALUE, such as batch_size=32, not 'batch_size'"),
        ("knobs.most=[]", "--set knobs.most=[]: the knob 'most' must have at least one value, not none"),
        ("factory.x=1", "--set factory.x=1: factory must be a mapping to be set a key of, and is not"),
        ("a=[", "--set a=[ must be YAML, and is not"),
        ("a=1", "--set a=1: 'a' must be one of factory, knobs"),
    ],
)
def test_what_is_typed_wrong_is_named_as_it_was_typed(one: str, text: str, project: Path) -> None:
    failed = refused(one)
    assert (failed.code, failed.text[: len(text)]) == (Code.USAGE, text)


def test_set_reaches_into_the_file(project: Path) -> None:
    file = SweepFile.read(Path("sweep.yaml"), ["knobs.most=[4]", "knobs.fails=[[]]", "batch_size=null"])
    assert file.data["knobs"] == {"most": [4], "fails": [[]]}
    assert file.options["batch_size"] is None
    assert "estimate" not in file.options


def test_a_module_that_raises_is_the_users_error(project: Path) -> None:
    (project / "model.py").write_text("import batchfit\nraise ValueError('x must be y')\n")
    failed = refused()
    assert (failed.code, failed.text) == (
        Code.RAISED,
        "model.py:make raised ValueError at model.py:2 (in <module>)",
    )
    assert "x must be y" in failed.details


def test_nothing_is_written_over(project: Path) -> None:
    (project / "sweep-results.json").write_text("mine")
    failed = refused()
    assert failed.code == Code.USAGE
    assert (
        "Go on with it (--resume), replace it (--overwrite), or name another file (--output)" in failed.text
    )
    assert (project / "sweep-results.json").read_text() == "mine"
    assert refused(resume=True).text.startswith("sweep-results.json cannot be resumed from: not JSON")
    assert refused(resume=True, overwrite=True).text.startswith("overwrite must be False with resume")
    assert run(overwrite=True) == Code.FOUND
    failed = refused("batch_size=7", resume=True)
    assert "was begun with other settings (batch_size: 6 then, 7 now)" in failed.text


def test_ctrl_c_keeps_what_was_found_and_says_how_to_go_on(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = refused("knobs.most=[3, 99, 5]")
    assert (failed.code, failed.text) == (
        Code.INTERRUPTED,
        "interrupted; 2 of 3 configurations are left: "
        "batchfit sweep sweep.yaml --set 'knobs.most=[3, 99, 5]' --resume",
    )
    assert len(SweepResult.from_json((project / "sweep-results.json").read_text()).records) == 1
    assert "1 of 3 configurations" in capsys.readouterr().out


def test_what_is_replaced_is_not_resumed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file of another day is there, and Ctrl-C comes before the first record."""
    old = SweepResult(planned=1, settings={"of": "another day"}).to_json()
    (project / "sweep-results.json").write_text(old)
    failed = refused("knobs.most=[99, 5]", overwrite=True)
    assert failed.text.endswith("--set 'knobs.most=[99, 5]' --resume")
    assert SweepResult.from_json((project / "sweep-results.json").read_text()).planned == 2
    assert refused("knobs.most=[99, 5]", resume=True).text == failed.text


def test_a_file_that_was_not_touched_yet_is_not_called_saved(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that says nothing before its first record, such as Ray's."""

    def stopped(self: Job, configuration: Any, on_event: Any = None) -> SweepRecord:
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "run", stopped)
    (project / "sweep-results.json").write_text("mine")
    failed = refused(overwrite=True)
    assert failed.text.endswith("3 of 3 configurations are left: batchfit sweep sweep.yaml --overwrite")
    assert "saved" not in capsys.readouterr().out
    assert (project / "sweep-results.json").read_text() == "mine"


# The screen


def record(most: int, **more: Any) -> SweepRecord:
    return SweepRecord(knobs={"most": most}, elapsed_s=30.0, **more)


def test_a_live_table_with_the_time_left() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=70, height=20, force_terminal=True, color_system=None)
    table = SweepTable(plan({"most": [3, 5, 7]}), [], console=console)

    def shown() -> list[list[str]]:
        with console.capture() as caught:
            console.print(table.picture())
        return [line.split() for line in caught.get().splitlines()]

    assert shown()[-1] == ["0", "of", "3", "configurations"]
    table.on_event(SweepEvent(kind="trying", knobs={"most": 3}, size=19))
    assert shown()[1] == ["3", "trying", "19", "0", "s"]
    table.on_event(SweepEvent(kind="record", knobs={"most": 3}, record=record(3, batch_size_used=3)))
    measured = record(5, batch_size_used=5, measures={"accuracy": 0.5})
    table.on_event(SweepEvent(kind="record", knobs={"most": 5}, record=measured))
    assert shown() == [
        ["most", "batch", "size", "accuracy"],
        ["3", "3", "-", "30.0", "s"],
        ["5", "5", "0.5", "30.0", "s"],
        ["7"],
        ["2", "of", "3", "configurations,", "about", "30", "s", "left"],
    ]
    table.on_event(SweepEvent(kind="record", knobs={"most": 7}, record=record(7, error="ValueError: x")))
    assert shown()[-2] == ["7", "-", "-", "ValueError:", "x"]
    assert shown()[-1] == ["3", "of", "3", "configurations,", "1", "failed"]


def test_a_wide_table_keeps_its_knobs_and_sizes() -> None:
    """On 80 columns, where rich by itself would leave out what comes first."""
    from rich.console import Console

    knobs = {"learning_rate": [0.1], "width": [8, 16], "number_of_layers": [12], "activation": ["relu"]}
    entries = plan(knobs)
    text = "RuntimeError: " + "a long story " * 20
    measures = {"accuracy": 0.5, "latency_of_a_token_s": 0.25, "curve": list(range(99))}
    done = [
        SweepRecord(knobs=dict(entries[0].configuration), batch_size_used=48, measures=measures),
        SweepRecord(knobs=dict(entries[1].configuration), error=text),
    ]
    stream = io.StringIO()
    console = Console(file=stream, width=80, height=24, force_terminal=False)
    console.print(SweepTable(entries, done, console=console).picture())
    head, first, second, foot = stream.getvalue().rstrip().splitlines()
    assert head.split()[0] in ("learning_…", "learning_r…")  # the second with rich 13.7 to 14.0
    assert head.split()[1] == "width"
    assert first.split()[:5] == ["0.1", "8", "12", "relu", "48"]
    assert "RuntimeError: a long" in second
    assert foot == "2 of 2 configurations, 1 failed"
    assert max(len(head), len(first), len(second)) <= 80


@given(
    widths=st.lists(st.integers(1, 60), min_size=2, max_size=14),
    first=st.integers(1, 14),
    room=st.integers(20, 200),
)
@examples(100)
def test_columns_have_room(widths: list[int], first: int, room: int) -> None:
    first = min(first, len(widths))
    shown = column_widths(widths, first=first, room=room)
    assert len(shown) >= first
    assert all(one <= width for one, width in zip(shown, widths, strict=False))
    assert shown[first:] == widths[first : len(shown)]  # a measure is whole, or not there
    least = sum(min(width, 5) + 2 for width in widths[:first])
    assert sum(one + 2 for one in shown) <= max(room - 24, least)


def test_a_long_sweep_shows_the_part_that_runs() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=70, height=14, force_terminal=True, color_system=None)
    entries = plan({"most": list(range(100))})
    table = SweepTable(entries, [record(one, batch_size_used=1) for one in range(50)], console=console)
    with console.capture() as caught:
        console.print(table.picture())
    shown = [line.split()[0] for line in caught.get().splitlines()[1:-1]]
    assert len(shown) == 10
    assert "50" in shown
    assert "49" in shown


def test_time_left_in_words() -> None:
    pace = Pace(3)
    assert pace.left == ""
    pace.ended(100.0)
    assert pace.left == "about 3 min left"
    pace.ended(8000.0)
    assert pace.left == "about 68 min left"
    pace.ended(1.0)
    assert pace.left == ""
    silent = SweepLines(None, total=1)
    silent.on_event(
        SweepEvent(kind="record", knobs={"most": 3}, record=record(3))
    )  # another rank says nothing


# In processes of their own


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batchfit", "sweep", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_json_is_alone_on_stdout(project: Path) -> None:
    ran = run_python("-m", "batchfit", "sweep", "sweep.yaml", "--json", folder=project)
    assert ran.returncode == 0, ran.stderr
    assert [one["twice"] for one in json.loads(ran.stdout)["summary"]] == [6, 10, 12]
    assert "the factory prints" in ran.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_sweep(project: Path) -> None:
    """`batchfit sweep sweep.yaml 2>&1 | head -1`, with a factory that writes to stderr too."""
    text = MODEL.replace('print("the factory prints")', 'import os; os.write(2, b"the factory writes")')
    (project / "model.py").write_text(text)
    command = [sys.executable, "-m", "batchfit", "sweep", "sweep.yaml"]
    ends = os.pipe()
    os.close(ends[0])
    process = subprocess.Popen(
        command,
        cwd=project,
        env={**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"},
        stdout=ends[1],
        stderr=ends[1],
    )
    os.close(ends[1])
    assert process.wait(timeout=120) == 0
    kept = SweepResult.from_json((project / "sweep-results.json").read_text())
    assert [one["batch_size_used"] for one in kept.summary] == [3, 5, 6]
    assert not kept.failed


@pytest.mark.parametrize("name", ["moe", pytest.param("crops", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_example_killed_in_the_middle_and_resumed_gives_the_same_file(name: str, tmp_path: Path) -> None:
    if name == "crops":
        pytest.importorskip("transformers", reason="needs transformers")
    example = ROOT / "examples" / f"sweep_{name}.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 150
    file, killed, whole = str(example.with_suffix(".yaml")), tmp_path / "killed.json", tmp_path / "whole.json"
    other = start(file, "--output", str(whole), folder=tmp_path)
    process = start(file, "--output", str(killed), folder=tmp_path)
    deadline = time.monotonic() + 120
    while not killed.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    part = SweepResult.from_json(killed.read_text())
    assert 0 < len(part.records) < part.planned

    process = start(file, "--output", str(killed), "--resume", folder=tmp_path)
    _, reported = process.communicate(timeout=120)
    _, said = other.communicate(timeout=120)
    assert (process.returncode, other.returncode) == (0, 0), reported + said
    assert f"{len(part.records)} configurations are in it" in reported
    resumed, straight = (SweepResult.from_json(path.read_text()) for path in (killed, whole))
    assert resumed.without_timings() == straight.without_timings()
    assert resumed.records[: len(part.records)] == part.records  # not run again
    sizes = [one["batch_size_used"] for one in resumed.summary]
    assert len(set(sizes)) == len(sizes)
    assert sizes[0] == max(sizes)
    assert all(one.ooms == 0 for one in resumed.records)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.json", "whole.json"]


def test_more_crops_leave_room_for_fewer_samples(living_bytes: int) -> None:
    """The example in this process: generation in the trial, the loader made in it, the measurement after."""
    pytest.importorskip("transformers", reason="needs transformers")
    example = runpy.run_path(str(ROOT / "examples" / "sweep_crops.py"))
    budget = 6 * 2**20 + living_bytes
    state = torch.get_rng_state()
    try:
        result = batchfit.sweep(
            example["make"],
            {"max_crops": [2, 12]},
            measure=example["accuracy"],
            budget=budget,
            steps=2,
            soak_steps=0,
        )
    finally:
        torch.set_rng_state(state)
    few, many = result.records
    assert (few.batch_size_used, few.error, many.error) == (64, None, None)
    assert 1 < (many.batch_size_used or 0) < 32
    assert (few.ooms, many.ooms) == (0, 0)
    assert few.measures["samples"] == many.measures["samples"] == 64
