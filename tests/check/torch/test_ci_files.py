"""The files of examples/ci are what their tools read, and say commands that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from generated import cli

FOLDER = Path(__file__).parents[3] / "examples" / "ci"
FILES = sorted(FOLDER.glob("*.y*ml"))


def read(path: Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="needs yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_and_flag_exists(path: Path) -> None:
    known = {one.name: one for one in cli.commands()}
    lines = re.findall(r"^\s*(?:run|entry|-\s*run): (batchfit .+)$", path.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        _, name, *words = line.split()
        flags = {spelling for flag in known[name].flags for spelling in flag.names}
        assert {word for word in words if word.startswith("-")} <= flags


def test_the_action_checks_and_comments() -> None:
    action = read(FOLDER / "memory.yml")
    (job,) = action["jobs"].values()
    assert action["permissions"]["pull-requests"] == "write"
    checkout, *_ = job["steps"]
    assert checkout["with"]["fetch-depth"] == 0, "an older program is in the history"
    written = next(step["run"] for step in job["steps"] if "batchfit check" in step.get("run", ""))
    assert "--markdown comment.md" in written
    used = [step["run"] for step in job["steps"] if "comment.md" in step.get("run", "")]
    assert len(used) == 3


def test_the_hook_runs_once_for_all_files() -> None:
    ((hook,),) = (repo["hooks"] for repo in read(FOLDER / "pre-commit-config.yaml")["repos"])
    assert hook["pass_filenames"] is False
    assert re.search(hook["files"], "src/train.py")
    assert not re.search(hook["files"], "README.md")
