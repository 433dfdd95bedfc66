"""`check_memory` on changes that people make: each is named with its line; what is no change is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from check_changes import CHANGES, PROGRAM, ProgramChange, workload_of
from child_path import CHILD_PATH

import batchfit
from batchfit.results import MemoryCheck

Check = Callable[..., MemoryCheck]


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file with the program's baseline at each size."""
    folder = tmp_path_factory.mktemp("project")
    for size in sorted({one.size for one in CHANGES}):
        workload = workload_of(PROGRAM, folder)
        batchfit.check_memory(
            workload, baseline=folder / "memory.json", name=str(size), batch_size=size, update=True
        )
    yield folder / "memory.json"
    sys.modules.pop("train", None)


@pytest.fixture
def checked(baselines: Path) -> Check:
    """Checks a program against the baseline."""

    def check(text: str, *, size: int = 512, max_increase: str = "1%") -> MemoryCheck:
        workload = workload_of(text, baselines.parent)
        return batchfit.check_memory(workload, baseline=baselines, name=str(size), max_increase=max_increase)

    return check


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.name)
def test_a_change_is_named_with_its_line(change: ProgramChange, checked: Check) -> None:
    found = checked(change.text, size=change.size)
    assert found.change_bytes
    assert (found.change_bytes > 0) == change.grows
    assert found.passed != change.grows, found
    numbers = [n for n, text in enumerate(change.text.splitlines(), 1) if change.line in text]
    place = f"train.py:{numbers[0]} "
    if change.in_reasons:
        assert any(place in reason for reason in found.reasons), found
    else:
        first = found.lines[0]
        assert first.name.startswith(place), found
        assert change.line in first.code


def test_changes_add_up_to_the_change_of_the_peak(checked: Check) -> None:
    found = checked(CHANGES[0].text)
    for changes in (found.kinds, found.modules, found.lines):
        assert sum(one.change_bytes for one in changes) == found.change_bytes
    copy = 512 * 32 * 512 * 4
    assert found.change_bytes == copy
    assert found.lines[0].what == "logits in fp32 [512, 32, 512]"
    assert found.lines[0].kinds == {"activations": copy}


def test_who_calls_the_line_is_named_too(checked: Check) -> None:
    found = checked(next(one for one in CHANGES if "one-hot" in one.name).text)
    number = [n for n, text in enumerate(PROGRAM.splitlines(), 1) if "cross_entropy(logits, words) +" in text]
    assert found.lines[0].called_from == (f"train.py:{number[0] + 1} loss_fn",)


def test_another_optimizer_is_said_with_what_it_keeps(checked: Check) -> None:
    change = next(one for one in CHANGES if "optimizer" in one.name)
    (reason,) = checked(change.text, size=change.size).reasons
    assert reason == (
        "the optimizer is another: AdamW, whose state takes 3 x the trained weights, was SGD, whose state "
        "takes 1 x the trained weights"
    )


# What changes the text, and no memory.
_LOSS = "        return cross_entropy(logits, words) + F.mse_loss(logits, wanted)\n"
_BOTH = "\n    def both(logits, words, wanted):\n"
HARMLESS = {
    "lines above": (("import copy\n", "import copy\n\n# A comment.\n\n\n"),),
    "another name": (
        ("        logits = model(words)\n", "        scores = model(words)\n"),
        (_LOSS, _LOSS.replace("logits", "scores")),
    ),
    "a function of its own": (
        (
            _LOSS,
            f"        return both(logits, words, wanted)\n\n    def both(logits, words, wanted):\n{_LOSS}",
        ),
    ),
    "another function's name": (
        ("    def attend(self, x):", "    def attention(self, x):"),
        ("self.attend(", "self.attention("),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_takes_no_memory_is_no_change(name: str, checked: Check) -> None:
    text = PROGRAM
    for old, new in HARMLESS[name]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    found = checked(text)
    assert found.passed
    assert (found.change_bytes, found.lines, found.modules, found.kinds) == (0, (), (), ())


def test_the_user_s_objects_are_as_they_were(tmp_path: Path) -> None:
    import torch

    workload = workload_of(PROGRAM, tmp_path, "untouched")
    state = torch.get_rng_state()
    before = [one.clone() for one in workload.model.parameters()]
    batchfit.check_memory(workload, baseline=None, batch_size=4, max_peak="1GiB")
    assert all(torch.equal(one, two) for one, two in zip(before, workload.model.parameters(), strict=True))
    assert not workload.optimizer.state
    assert torch.equal(state, torch.get_rng_state())
    sys.modules.pop("untouched")


# -- the same everywhere


def test_the_baseline_is_the_same_each_time(baselines: Path) -> None:
    text = baselines.read_text()
    for size in (512, 4):
        workload = workload_of(PROGRAM, baselines.parent)
        found = batchfit.check_memory(workload, baseline=baselines, name=str(size), update=True)
        assert found.updated
    assert baselines.read_text() == text


def written(folder: Path, **environment: str) -> str:
    """The baseline that a process of its own writes in `folder`."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "batchfit", "check", "train.py:make_workload"]
    subprocess.run(
        [*command, "--batch-size", "32", "--update"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": CHILD_PATH, **environment},
        check=True,
        capture_output=True,
        timeout=240,
    )
    return (folder / "memory.json").read_text()


@pytest.mark.slow
def test_the_baseline_is_the_same_on_another_machine(tmp_path: Path) -> None:
    here = written(tmp_path / "here", PYTHONHASHSEED="1", OMP_NUM_THREADS="1")
    there = written(tmp_path / "some" / "where" / "else", PYTHONHASHSEED="2", OMP_NUM_THREADS="2")
    assert here == there
    assert str(tmp_path) not in here


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_baseline_is_the_same_in_ten_processes(tmp_path: Path) -> None:
    texts = {
        written(tmp_path / str(seed), PYTHONHASHSEED=str(seed), OMP_NUM_THREADS=str(1 + seed % 2))
        for seed in range(10)
    }
    assert len(texts) == 1
