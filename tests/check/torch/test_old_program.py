"""A baseline of other versions: its program is traced again with those that are here, or a caveat."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from check_changes import CHANGES, PROGRAM, workload_of

import batchfit
from batchfit._check.check import check_with
from batchfit._check.old_program import retraced
from batchfit._check.pure.options import CheckOptions
from batchfit.results import MemoryCheck

TARGET = "train.py:make_workload"
SIZE = 64


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a step")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository whose baseline says that it was traced with another torch."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    workload = workload_of(PROGRAM, tmp_path)
    batchfit.check_memory(workload, name=TARGET, batch_size=SIZE, update=True)
    as_of_another_torch(tmp_path)
    commit(tmp_path)
    yield tmp_path
    sys.modules.pop("train", None)


def as_of_another_torch(folder: Path) -> None:
    path = folder / "memory.json"
    data = json.loads(path.read_text())
    data["targets"][TARGET]["versions"]["torch"] = "2.0.0"
    path.write_text(json.dumps(data))


def check(folder: Path, text: str) -> MemoryCheck:
    again = partial(retraced, path=Path("memory.json"), name=TARGET, target=TARGET, arguments=())
    options = CheckOptions(baseline="memory.json", max_increase="1%")
    return check_with(workload_of(text, folder), options, name=TARGET, retrace=again)


def caveats(found: MemoryCheck) -> list[str]:
    """Those of the baseline. torch 2.15 has one of its own, of cuBLAS, in every prediction."""
    return [caveat for caveat in found.unseen if not caveat.startswith("cuBLAS: ")]


def test_the_program_of_the_baseline_is_traced_again(project: Path) -> None:
    change = CHANGES[0]
    (project / "other.txt").write_text("a later commit, of another file")
    (project / "train.py").write_text(change.text)
    commit(project)
    found = check(project, change.text)
    assert found.versions_bytes == 0
    assert found.baseline_versions["torch"] == "2.0.0"
    assert not found.passed
    assert change.line in found.lines[0].code
    assert any(one.startswith("other versions (torch 2.0.0, here ") for one in found.reasons)
    assert not caveats(found)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        pytest.param("uncommitted", "the baseline is not committed", marks=pytest.mark.slow),
        ("no repository", "the baseline is in no git repository"),
        ("shallow", "the git repository is shallow: fetch all of its history"),
        ("broken", "cannot be traced here: .*no module named 'gone'"),
    ],
)
def test_where_it_cannot_be_had_a_caveat_says_why(
    project: Path, state: str, why: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if state == "uncommitted":
        data = json.loads((project / "memory.json").read_text())
        data["targets"][TARGET]["batch"] = ["int64[1]"]
        (project / "memory.json").write_text(json.dumps(data))
    elif state == "no repository":
        shutil.rmtree(project / ".git")
    elif state == "shallow":
        (project / "other.txt").touch()
        commit(project)
        copy = tmp_path_factory.mktemp("copy")
        git(copy, "clone", "-q", "--depth", "1", f"file://{project}", ".")
        shutil.rmtree(project / ".git")
        shutil.move(copy / ".git", project / ".git")
    else:
        (project / "train.py").write_text("import gone\n")
        git(project, "commit", "-q", "-a", "--amend", "-m", "broken")
    found = check(project, PROGRAM)
    (caveat,) = caveats(found)
    assert caveat.startswith("the baseline was traced with torch 2.0.0, here ")
    assert re.search(why, caveat, re.IGNORECASE), caveat
    assert found.versions_bytes is None


def test_a_workload_in_python_has_the_caveat(project: Path) -> None:
    found = batchfit.check_memory(workload_of(PROGRAM, project), name=TARGET)
    (caveat,) = caveats(found)
    assert "the program of the baseline is not known here" in caveat
    assert found.passed
