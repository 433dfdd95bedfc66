"""Real programs under the probe, from their command to the trial; nothing of them is left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from short_temp import short_temp

from batchfit._engine.trial.trial import TrialRequest
from batchfit._find.find import find_with
from batchfit._find.pure.options import FindOptions
from batchfit._program.find import program_trials
from batchfit._program.pure.template import CommandTemplate, FileSetting
from batchfit._program.trials import ProgramTarget, ProgramTrials
from batchfit.errors import ProgramError, SearchStoppedError
from batchfit.results import FitResult

TRAIN = """
import os, sys, torch
size, steps = int(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(steps):
    loss = model(torch.randn(size, 256)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("finished", "w").close()
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in a folder of their own; the probe leaves neither a process nor a file."""
    with short_temp(monkeypatch) as temp:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield
        assert list(temp.iterdir()) == []


def template(*words: str, env: tuple[str, ...] = (), sets: tuple[str, ...] = ()) -> CommandTemplate:
    return CommandTemplate(words=words, env=env, sets=tuple(FileSetting.parse(one) for one in sets))


def trials(*words: str, **places: tuple[str, ...]) -> ProgramTrials:
    target = ProgramTarget(template=template(*words, **places), budget_bytes=8 * 2**20)
    return ProgramTrials(target, TrialRequest(1, steps=3))


def program(text: str, *arguments: str) -> ProgramTrials:
    Path("train.py").write_text(text)
    return trials(sys.executable, "train.py", *(arguments or ("{}", "1000")))


def run_one(runner: ProgramTrials, size: int, *, steps: int = 3) -> object:
    with runner.trying(8 * 2**20) as run:
        return run(TrialRequest(size, steps=steps, is_smallest=size == 1))


def find(*words: str, **places: tuple[str, ...]) -> FitResult:
    options = FindOptions(budget="8MiB", isolate=True)
    return find_with(
        program_trials(ProgramTarget(template=template(*words, **places)), options), lambda: options
    )


def test_a_trial_ends_before_the_program_does() -> None:
    runner = program(TRAIN)
    with runner.trying(8 * 2**20) as run:
        trial = run(TrialRequest(64, steps=3))
        assert trial is not None
        assert trial.fits
        # Weights, gradients and two moments of 256 KiB each, and the batch.
        assert 2**20 < (trial.peak_bytes or 0) < 2 * 2**20
        again = run(TrialRequest(64, steps=25, soak=True))
        assert again is not None
        assert again.soak
        assert again.elapsed_s < trial.elapsed_s
    assert runner.device.name == "cpu"
    assert not Path("finished").exists()


@pytest.mark.slow  # six runs of a program
def test_find_answers_with_a_size_that_ran() -> None:
    Path("train.py").write_text(TRAIN)
    fit = find("sh", "-c", f"{sys.executable} train.py {{}} 1000; touch uploaded")
    assert fit.device == "cpu"
    assert 1000 < fit.batch_size < 4000
    assert fit.survived_steps == 25
    assert not Path("uploaded").exists()


def test_a_command_that_is_not_found() -> None:
    with pytest.raises(ProgramError, match=r"could not be started: no-such-command: No such file"):
        run_one(trials("no-such-command", "{}"), 1)


def test_a_command_that_is_no_python() -> None:
    with pytest.raises(ProgramError, match=r"no Python was seen in the program: echo"):
        run_one(trials("echo", "{}"), 1)


def test_a_python_without_torch() -> None:
    with pytest.raises(ProgramError, match="never imported torch"):
        run_one(trials(sys.executable, "-c", "print({})"), 1)


def test_a_python_that_fails_shows_its_last_lines() -> None:
    with pytest.raises(ProgramError, match="exited by itself with code 2 before its first step") as caught:
        run_one(trials(sys.executable, "missing.py", "{}"), 1)
    assert "No such file or directory" in caught.value.lines[-1]


@pytest.mark.slow  # one start of torch each
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch", "ended before its first step, at batch size 1"),
        ("import torch; input('size?')", "asks for input, and a probe has none"),
        ("import torch; raise KeyError('data')", "raised KeyError: 'data', at batch size 1"),
        ("import torch, time; time.sleep(60)", "took no step within 3 s"),
        ("import torch, os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
    ],
)
def test_programs_that_take_no_step(text: str, message: str) -> None:
    Path("train.py").write_text(text)
    target = ProgramTarget(
        template=template(sys.executable, "train.py", "{}"),
        budget_bytes=8 * 2**20,
        timeout_s=3 if "sleep" in text else None,
    )
    with pytest.raises(ProgramError, match=message):
        run_one(ProgramTrials(target, TrialRequest(1, steps=3)), 1)


def test_a_time_limit_ends_a_program_that_is_still_starting() -> None:
    Path("train.py").write_text("import time; time.sleep(60)")
    options = FindOptions(budget="8MiB", isolate=True, time_limit_s=0.5)
    target = ProgramTarget(template=template(sys.executable, "train.py", "{}"))
    begun_s = time.monotonic()
    with pytest.raises(SearchStoppedError, match="no size had run when the search stopped"):
        find_with(program_trials(target, options), lambda: options)
    assert time.monotonic() - begun_s < 30


CATCHES = """
import sys, torch
size = int(sys.argv[1])
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(100):
    try:
        model(torch.randn(size, 256)).square().mean().backward()
    except RuntimeError:
        print("skipped")
    optimizer.step()
"""


@pytest.mark.slow  # one start of torch each
@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (TRAIN, "oom"),
        (CATCHES, "oom"),
        ("import torch, os, signal; torch.nn.Linear(1, 1)(torch.ones(1)); os.kill(os.getpid(), 9)", "killed"),
    ],
)
def test_how_a_program_is_too_large(text: str, outcome: str) -> None:
    trial = run_one(program(text), 100_000)
    assert getattr(trial, "outcome", None) == outcome


def test_the_size_comes_by_a_variable_and_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    Path("config.yaml").write_text("train:  # ours\n  batch_size: 8\n  name: !x run\n")
    read = (
        "import os, sys; text = open(sys.argv[1]).read(); "
        "sys.exit(text + os.environ['SIZE'] + os.environ['BATCHFIT_PROBE'] + os.environ['WANDB_MODE'])"
    )
    places = {"env": ("SIZE",), "sets": ("config.yaml:train.batch_size",)}
    with pytest.raises(ProgramError) as caught:
        run_one(trials(sys.executable, "-c", read, "config.yaml", **places), 5)
    assert caught.value.lines == ("train:  # ours", "  batch_size: 5", "  name: !x run", "51disabled")
    assert "batch_size: 8" in Path("config.yaml").read_text()
    assert "BATCHFIT_PROBE" not in os.environ
