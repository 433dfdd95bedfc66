"""`batchfit check -- COMMAND`: the memory of a program against its baseline, by its own lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_runner import runner
from short_temp import short_temp

from batchfit._cli.app import app
from batchfit._cli.exits import Code

TRAIN = """
import sys
import torch
import parts

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(2)])
optimizer = parts.optimizer_of(model)
for _ in range(6):
    out = model(torch.randn(int(sys.argv[1]), 512, 256))
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARTS = """
import torch

def optimizer_of(model):
    return torch.optim.AdamW(model.parameters())

def unused(model):
    return torch.optim.AdamW(model.parameters())
"""
COMMAND = [sys.executable, "train.py"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with short_temp(monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.chdir(tmp_path)
        Path("pyproject.toml").write_text("")
        Path("train.py").write_text(TRAIN)
        Path("parts.py").write_text(PARTS)
        yield


def check(*arguments: str) -> Any:
    return runner().invoke(app, ["check", *arguments])


def test_a_command_with_its_size_in_it_has_a_baseline_by_line() -> None:
    done = check("--update", "--output", "check.json", "--", *COMMAND, "8")
    assert done.exit_code == 0, done.stderr
    found = json.loads(Path("check.json").read_text())
    assert found["batch_size"] == 8
    assert "it ran on a CPU" in found["unseen"][0]
    (record,) = json.loads(Path("memory.json").read_text())["targets"].values()
    assert (
        record["optimizer"]["place"] == "parts.py:optimizer_of: return torch.optim.AdamW(model.parameters())"
    )
    assert "train.py:<module>: loss.backward()" in json.dumps(record)
    activations = 8 * 512 * 256 * 4
    assert found["peak_bytes"] > 3 * activations


@pytest.mark.parametrize("drop_last", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_size_beyond_the_programs_samples_has_no_baseline(drop_last: bool) -> None:
    """Its batches are of 20 samples, and not of 32; without its last batch it takes no step at all."""
    source = TRAIN.replace("int(sys.argv[1])", "min(int(sys.argv[1]), 20)")
    if drop_last:
        source = source.replace("for _ in range(6):", "for _ in range(6 if int(sys.argv[1]) <= 20 else 0):")
    Path("train.py").write_text(source)
    done = check("--update", "--batch-size", "32", "--", *COMMAND, "{}")
    assert done.exit_code == Code.RAISED
    assert "batch_size must leave the program two whole batches, not 32" in done.stderr.replace("\n", " ")
    assert not Path("memory.json").exists()


@pytest.mark.slow
def test_a_change_of_a_program_is_named_with_its_line() -> None:
    command = [*COMMAND, "{}"]
    assert check("--update", "--batch-size", "8", "--", *command).exit_code == 0
    Path("train.py").write_text(TRAIN.replace("out.square().mean()", "(out.square() + out.exp()).mean()"))
    done = check("--output", "check.json", "--", *command)
    assert done.exit_code == Code.MORE_MEMORY
    found = json.loads(Path("check.json").read_text())
    assert found["lines"][0]["name"] == "train.py:10 <module>"
    assert found["lines"][0]["after_bytes"] - found["lines"][0]["before_bytes"] == 8 * 512 * 256 * 4
    Path("train.py").write_text("# a comment more\n" + TRAIN)
    assert check("--output", "check.json", "--", *command).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--update", "--batch-size", "8", "--", *COMMAND, "8"], "batch-size must be left out for a command"),
        (["--update", "--", *COMMAND, "{}"], "batch-size must be given"),
        (["--env", "SIZE", "train.py:make"], "--env is for a command after --"),
        (["--", *COMMAND, "8"], "has no baseline of"),
    ],
)
def test_what_is_wrong_is_said_before_the_program_is_run(arguments: list[str], says: str) -> None:
    Path("train.py").write_text("raise SystemExit('it was run')")
    done = check(*arguments)
    assert done.exit_code == Code.USAGE
    assert says in done.stderr.replace("batch_size", "batch-size")
