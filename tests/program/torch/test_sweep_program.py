"""A sweep over commands, as its file describes it: sizes found, measurements run, results kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runner import runner
from short_temp import short_temp
from typer.testing import Result

from batchfit._cli.app import app
from batchfit.results import SweepResult

EXPERIMENT = """
import json, sys, torch
size, crops, most = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(30):
    model(torch.randn(size * crops, 256)).sum().backward()
    optimizer.step()
print("evaluating", size)
if size > most:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
print(json.dumps({"score": size * crops}))
print("done")
"""
FILE = """
command: {python} exp.py {{}} {{crops}} {{most}}
measure: command
knobs: {{crops: [2, 4], most: [4]}}
mode: grid
strategy: halve
batch_size: 4
soak_steps: 0
budget: 16MiB
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in a folder of their own, and leave no file of ours."""
    with short_temp(monkeypatch) as temp:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.chdir(tmp_path)
        Path("exp.py").write_text(EXPERIMENT)
        Path("sweep.yaml").write_text(FILE.format(python=sys.executable))
        yield
        assert list(temp.glob("batchfit*")) == []


def sweep(*flags: str) -> Result:
    return runner().invoke(app, ["sweep", "sweep.yaml", *flags])


def kept() -> SweepResult:
    return SweepResult.from_json(Path("sweep-results.json").read_text())


def test_each_configuration_is_found_and_measured() -> None:
    ran = sweep("--set", "knobs.crops=[2]", "--csv", "table.csv")
    assert ran.exit_code == 0, ran.stderr
    (record,) = kept().records
    assert record.batch_size_used == 4
    assert record.measures == {"score": 8}
    assert [trial.size for trial in record.trials] == [4]
    assert (record.device, record.budget_bytes) == ("cpu", 16 * 2**20)
    assert record.measure_s > 0
    assert Path("table.csv").read_text() == "crops,most,batch_size_used,score,error\n2,4,4,8,\n"
    assert kept().settings["command"].endswith("exp.py '{}' '{crops}' '{most}'")


@pytest.mark.slow  # eight runs of a program
def test_a_measurement_that_is_out_of_memory_goes_down_and_a_sweep_goes_on() -> None:
    ran = sweep("--set", "knobs.crops=[2, 4]", "--set", "knobs.most=[3]")
    assert ran.exit_code == 0, ran.stderr
    assert [(one.batch_size_used, one.measure_sizes) for one in kept().records] == [(3, (4, 3))] * 2
    whole = Path("sweep-results.json").read_text()
    half = json.loads(whole)
    half["records"] = half["records"][:1]
    Path("sweep-results.json").write_text(json.dumps(half))
    ran = sweep("--set", "knobs.crops=[2, 4]", "--set", "knobs.most=[3]", "--resume")
    assert ran.exit_code == 0, ran.stderr
    assert "1 configurations are in it" in ran.stderr
    assert kept().without_timings() == SweepResult.from_json(whole).without_timings()


@pytest.mark.slow  # four runs of a program
def test_a_configuration_that_fails_is_a_record() -> None:
    ran = sweep("--set", "knobs.crops=[2, 100000]", "--set", f"measure={sys.executable} -c 'print({{}})'")
    assert ran.exit_code in (3, 4, 7)
    small, large = kept().records
    assert (small.failed_in, small.batch_size_used) == ("measure", 4)
    assert "must print a JSON object" in (small.error or "")
    assert large.failed_in == "search"
    assert "NothingFitsError" in (large.error or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("command=python exp.py {crops} {most}", "no place for the batch size"),
        ("command=python exp.py {} {most}", "the knob 'crops' must have a place {crops} in the command"),
        ("factory=model.py:make", "factory must be left out where there is a command"),
        ("engine=ray", "engine must be left out where there is a command"),
        ("measure=[]", "measure must be a command"),
        ("steps=1", "steps must be"),
        ("commands=3", "'commands' must be one of command, knobs"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_run(change: str, message: str) -> None:
    ran = sweep("--set", change)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert not Path("sweep-results.json").exists()
