"""A command's answer in the store: what it is kept by, and that an earlier one costs one run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from batchfit._find.find import find_with
from batchfit._find.pure.options import FindOptions
from batchfit._program.find import program_trials
from batchfit._program.pure.stored_name import StoredName
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.stored import command_digest
from batchfit._program.trials import ProgramTarget
from batchfit.results import FitResult

TRAIN = """
import sys, torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(1000):
    model(torch.randn(int(sys.argv[1]), 256)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATCHFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def digest(*words: str, key: str | None = None, budget: str | None = None, env: tuple[str, ...] = ()) -> str:
    template = CommandTemplate(words=words, env=env)
    return command_digest(StoredName(key=key), template, FindOptions(isolate=True, budget=budget))


def test_what_a_command_is_known_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = digest("python", "train.py", "{}")
    assert plain == digest("python", "train.py", "{}")
    others = [
        digest("python", "train.py", "{}", "--lr=1"),
        digest("python", "train.py", "{}", budget="1GiB"),
        digest("python", "train.py", "{}", env=("SIZE",)),
        digest("python", "train.py", "{}", key="mine"),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    others.append(digest("python", "train.py", "{}"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    others.append(digest("python", "train.py", "{}"))
    assert len({plain, *others}) == 1 + len(others)
    # A name of the user's stands for the words and the folder.
    assert others[3] == digest("python", "train.py", "{}", "--lr=2", key="mine")


def find(*, fresh: bool = False) -> FitResult:
    options = FindOptions(budget="16MiB", max_size=64, soak_steps=0, isolate=True)
    target = ProgramTarget(template=CommandTemplate(words=(sys.executable, "train.py", "{}")))
    return find_with(program_trials(target, options, StoredName(fresh=fresh)), lambda: options)


@pytest.mark.slow  # five runs of a program
def test_an_earlier_answer_costs_one_run(tmp_path: Path) -> None:
    Path("train.py").write_text(TRAIN)
    first = find()
    assert len(first.trials) > 1
    again = find()
    assert again.from_store
    assert [trial.size for trial in again.trials] == [first.batch_size] == [again.batch_size]
    assert again.trials[0].elapsed_s > 0.5  # it was really run
    assert not find(fresh=True).from_store


@pytest.mark.slow  # nine runs of a program
def test_a_stored_size_that_no_longer_fits_is_searched_again() -> None:
    Path("train.py").write_text(TRAIN)
    first = find()
    Path("train.py").write_text(TRAIN.replace("torch.randn(", "torch.randn(1000 * "))
    again = find()
    assert not again.from_store
    assert again.trials[0].size == first.batch_size
    assert again.batch_size < first.batch_size
