"""`batchfit profile` as a person or a script meets it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from child_path import CHILD_PATH

import batchfit
from batchfit._cli.commands import profile as command
from batchfit._cli.commands.profile import point_line, profile_target
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.target import TargetCall
from batchfit._options import flags_in
from batchfit._profile.pure.options import ProfileOptions
from batchfit.results import ThroughputPoint, ThroughputProfile

TRAIN = """
import torch
from torch import nn
import batchfit

def make():
    print("the factory prints")
    model = nn.Linear(64, 64)
    return batchfit.inference(model, lambda n: torch.ones(n, 64))

def raises():
    def step(size):
        raise RuntimeError("wrong")
    return batchfit.Workload(step, state=[])
"""
OWN = {"context", "target", "json", "output", "plot", "traceback", "env", "set_"}
# Keywords that are objects of a program's own: there is no way to write them on a command line.
OBJECTS = {"loader", "on_point"}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("train", None)


def profile_here(target: str, *, delivery: Delivery | None = None, **changes: Any) -> Code:
    settings: Any = {"budget": "64MiB", **changes}
    return profile_target(TargetCall(target, settings, delivery or Delivery()))


@pytest.mark.parametrize(("stop", "code"), [("KeyboardInterrupt", 130), ("os.kill(os.getpid(), 15)", 143)])
def test_an_interrupt_saves_what_was_timed(stop: str, code: int, project: Path) -> None:
    (project / "train.py").write_text(
        "import os, batchfit\n"
        "def make():\n"
        "    def step(size):\n"
        f"        if size == 8:\n            {'raise ' if code == 130 else ''}{stop}\n"
        "    return batchfit.Workload(step, state=[])\n"
    )
    delivery = Delivery(output=project / "profile.json")
    assert profile_here("train.py:make", sizes=[4, 8], delivery=delivery) == code
    saved = ThroughputProfile.from_json((project / "profile.json").read_text())
    assert [point.size for point in saved.points] == [4]
    assert saved.stopped_because == "interrupted"


def test_flags_are_the_keywords_of_the_function() -> None:
    from batchfit._cli import app

    flags = {n: p.default for n, p in inspect.signature(app.profile).parameters.items() if n not in OWN}
    parameters = inspect.signature(batchfit.profile_throughput).parameters
    keywords = {n: p.default for n, p in parameters.items() if n not in {"workload", *OBJECTS}}
    assert flags == keywords
    assert set(flags) == {name for name, *_ in flags_in(ProfileOptions)}


def test_every_flag_is_spelled_like_its_keyword_and_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from cli_runner import runner

    from batchfit._cli.app import app

    given = {
        "smallest": 2, "largest": 64, "sizes": [4, 8], "within": 0.1, "budget": "1GiB", "time_limit_s": 9.0,
        "device": "cpu", "tokens_per_sample": 12, "target_batch_size": 4096, "diagnose": False,
    }  # fmt: skip
    arguments = ["profile", "train.py:make", "--json", "--output", "a.json", "--plot", "a.png"]
    for word, value in given.items():
        flag = word.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--no-{flag}")
        else:
            for one in value if isinstance(value, list) else [value]:
                arguments += [f"--{flag}", str(one)]
    seen: list[object] = []

    def catch(call: TargetCall) -> Code:
        seen.extend([call.target, call.flags, call.delivery])
        return Code.FOUND

    monkeypatch.setattr(command, "profile_target", catch)
    ran = runner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert seen == ["train.py:make", given, Delivery(as_json=True, output=Path("a.json"), plot=Path("a.png"))]


def test_a_table_a_picture_and_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    delivery = Delivery(output=project / "p.json", plot=project / "p.png")
    code = profile_here("train.py:make", sizes=[1, 4, 16], target_batch_size=10**6, delivery=delivery)
    assert code == Code.FOUND
    reported = ThroughputProfile.from_json((project / "p.json").read_text())
    out, err = capsys.readouterr()
    assert f"batch size {reported.recommended} is recommended" in out
    assert "samples/s" in out
    assert "adds no throughput" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines() if "saved" not in line), out
    assert (project / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert "size 16: " in err


@pytest.mark.slow
def test_json_is_alone_on_stdout(project: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable, "-m", "batchfit", "profile", "train:make", "--json", "--budget", "64MiB",
            "--largest", "16",
        ],
        env={**os.environ, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ThroughputProfile.from_json(ran.stdout).largest <= 16
    assert "the factory prints" in ran.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"largest": 0}, "largest must be a positive integer or None, not 0"),
        ({"sizes": [0]}, r"sizes must hold positive integers, not \(0,\)"),
        ({"sizes": [4], "largest": 9}, "largest must be None where sizes are given, not 9"),
        ({"smallest": 0}, "smallest must be a positive integer, not 0"),
        ({"smallest": 8, "largest": 4}, r"largest must be at least smallest \(8\), not 4"),
        ({"within": 2.0}, "within must be above 0 and below 1, not 2.0"),
        ({"budget": "x"}, "budget must be bytes"),
        ({"time_limit_s": -1.0}, "time_limit_s must be a positive number of seconds, not -1.0"),
    ],
)
def test_wrong_flags_are_refused_before_the_target_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandFailed, match=message) as failed:
        profile_here("there_is_no_such_file.py:make", **changes)
    assert failed.value.code == Code.USAGE
    assert "batchfit profile --help" in failed.value.text


def test_a_limit_before_any_size_was_timed_has_its_own_exit_code(project: Path) -> None:
    with pytest.raises(CommandFailed, match="no size was timed") as failed:
        profile_here("train:make", budget="64MiB", time_limit_s=1e-6)
    assert failed.value.code == Code.STOPPED


def test_a_file_that_cannot_be_written_is_refused_before_any_work(project: Path) -> None:
    with pytest.raises(CommandFailed, match="output must be a file that can be written"):
        profile_here("train.py:make", delivery=Delivery(output=project / "no" / "p.json"))


def test_an_error_of_the_step_is_the_users(project: Path) -> None:
    with pytest.raises(CommandFailed, match="raised RuntimeError") as failed:
        profile_here("train.py:raises", sizes=[1])
    assert failed.value.code == Code.RAISED


def test_nothing_fits(project: Path) -> None:
    with pytest.raises(CommandFailed, match="a batch of 1 does not fit") as failed:
        profile_here("train.py:make", budget="16KiB", sizes=[1])
    assert failed.value.code == Code.NOTHING_FITS


def test_a_point_is_one_line() -> None:
    point = ThroughputPoint(
        size=64, step_s=0.0352, step_s_low=0.035, step_s_high=0.036, samples_per_s=1818.2, peak_bytes=2**30
    )
    assert point_line(point) == "size 64: 35.2 ms a step, 1.82k samples/s, 1.00 GiB"
    assert point_line(point.model_copy(update={"steady": False})).endswith(", not steady")
