"""Programs that nobody adapted: each is found by its command, and as a workload the answer is the same.

The answers of all of them: benchmarks/results/program_cpu_202611.md.
"""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatch
from pathlib import Path

import pytest
from program_cases import CASES, MORE, ProgramCase


@pytest.mark.slow  # each starts its program four to eight times
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda case: case.name)
def test_the_answer_by_command_is_that_of_the_workload(case: ProgramCase, tmp_path: Path) -> None:
    for name in case.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    (tmp_path / "command").mkdir()
    (tmp_path / "workload").mkdir()
    case.make(tmp_path / "command")
    case.make(tmp_path / "workload")
    before = {path for path in (tmp_path / "command").rglob("*") if "__pycache__" not in path.parts}
    command = case.by_command(tmp_path / "command")
    workload = case.as_workload(tmp_path / "workload")
    answers = command.batch_size, workload.batch_size
    if abs(answers[0] - answers[1]) > 1:  # each search may end below the last size, within its tolerance
        answers = case.both_exact(tmp_path / "command", tmp_path / "workload")
    assert abs(answers[0] - answers[1]) <= 1
    assert command.sustained
    left = {path for path in (tmp_path / "command").rglob("*") if "__pycache__" not in path.parts} - before
    assert [path for path in left if not any(fnmatch(path.name, one) for one in case.writes)] == []
